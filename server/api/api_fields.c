/* Reading one value by its row of a field table, and a whole body by the table. */
#include <math.h>
#include <string.h>

#include "server/api/api.h"
#include "server/api/json_fields.h"

/* ---- scalars ---- */

int field_wrong_type(const struct field *f, const cJSON *v, const char *allowed, struct err *e)
{
    return err_set_param(e, ERR_INVALID, f->name, "%s must be %s, not %s", f->name, allowed,
                         json_kind(v));
}

int field_has_nul(const char *name, struct err *e)
{
    return err_set_param(e, ERR_INVALID, name,
                         "%s holds the character NUL (\\u0000), which it may not", name);
}

int field_integer(int32_t *ret, const char *name, const cJSON *v, double lo, double hi,
                  struct err *e)
{
    if (!cJSON_IsNumber(v)) {
        return err_set_param(e, ERR_INVALID, name, "%s must be an integer, not %s", name,
                             json_kind(v));
    }
    char text[JSON_NUMBER_BYTES];
    uint64_t n;
    bool minus;
    int rc = json_integer(v, &minus, &n);
    if (rc == ERR_INVALID) {
        return err_set_param(e, ERR_INVALID, name, "%s is %s but must be an integer", name,
                             json_number_text(v, text));
    }
    double d = minus ? -(double)n : (double)n; /* inexact only far beyond any bound */
    if (rc || d < lo || d > hi) {
        return err_set_param(e, ERR_INVALID, name, "%s is %s but must be between %.0f and %.0f",
                             name, json_number_text(v, text), lo, hi);
    }
    *ret = (int32_t)d;
    return 0;
}

static int float_range_error(const struct field *f, const cJSON *v, struct err *e)
{
    const char *than = f->lo_open ? "greater than" : "at least";
    char text[JSON_NUMBER_BYTES];

    json_number_text(v, text);
    if (isinf(f->lo)) {
        return err_set_param(e, ERR_INVALID, f->name,
                             "%s is %s but must be finite in single precision", f->name, text);
    }
    if (isinf(f->hi)) {
        return err_set_param(e, ERR_INVALID, f->name,
                             "%s is %s but must be %s %g, and finite in single precision", f->name,
                             text, than, f->lo);
    }
    return err_set_param(e, ERR_INVALID, f->name, "%s is %s but must be %s %g and at most %g",
                         f->name, text, than, f->lo, f->hi);
}

static int read_float(float *ret, const struct field *f, const cJSON *v, struct err *e)
{
    if (!cJSON_IsNumber(v)) {
        return field_wrong_type(f, v, "a number", e);
    }
    /* The float that is stored must be within the bounds, too: 1e-60 is greater than 0
     * only as a double. */
    double d = v->valuedouble;
    float single = (float)d;
    if (!isfinite(single) || d < f->lo || d > f->hi || (f->lo_open && single <= f->lo)) {
        return float_range_error(f, v, e);
    }
    *ret = single;
    return 0;
}

static int field_read(const struct field *f, void *ret, const cJSON *v,
                      const struct api_context *ctx, struct err *e)
{
    char *at = (char *)ret + f->offset;

    switch (f->type) {
    case FIELD_BOOL:
        if (!cJSON_IsBool(v)) {
            return field_wrong_type(f, v, "true or false", e);
        }
        *(bool *)at = cJSON_IsTrue(v);
        return 0;
    case FIELD_INT:
        return field_integer((int32_t *)at, f->name, v, f->lo, f->hi, e);
    case FIELD_FLOAT:
        return read_float((float *)at, f, v, e);
    case FIELD_STRING:
        return cJSON_IsString(v) ? 0 : field_wrong_type(f, v, "a string", e);
    case FIELD_MISSING:
        return err_set_param(e, ERR_UNSUPPORTED, f->name,
                             "%s is not supported: this server has no %s; leave it out", f->name,
                             f->help);
    default:
        return f->read(ret, f, v, ctx, e);
    }
}

/* ---- a whole body ---- */

bool field_in(const struct field_table *t, const struct field *f)
{
    return f->only == ROUTE_BOTH || f->only == t->route;
}

static const struct field *field_find(const struct field_table *t, const char *name)
{
    for (int i = 0; i < t->n; i++) {
        if (field_in(t, &t->field[i]) && strcmp(t->field[i].name, name) == 0) {
            return &t->field[i];
        }
    }
    return NULL;
}

void note_ignored(char *ignored, size_t size, const char *name)
{
    size_t at = strlen(ignored), need = strlen(name);

    if (at + need + 3 > size || need > 64) {
        return;
    }
    if (at) {
        ignored[at++] = ',';
        ignored[at++] = ' ';
    }
    for (size_t i = 0; i < need; i++) {
        bool plain = name[i] > ' ' && name[i] < 0x7f && name[i] != ',';
        ignored[at++] = plain ? name[i] : '?';
    }
    ignored[at] = '\0';
}

static bool repeated(const cJSON *object, const cJSON *member)
{
    for (const cJSON *m = object->child; m != member; m = m->next) {
        if (strcmp(m->string, member->string) == 0) {
            return true;
        }
    }
    return false;
}

int fields_read(const struct field_table *t, void *ret, const cJSON *object,
                const struct api_context *ctx, char *ignored, size_t ignored_size, struct err *e)
{
    int n = 0;

    if (!cJSON_IsObject(object)) {
        return err_set(e, ERR_INVALID, "body must be a JSON object, not %s", json_kind(object));
    }
    for (const cJSON *m = object->child; m; m = m->next) {
        if (++n > LIMIT_JSON_MEMBERS) {
            return err_set(e, ERR_INVALID, "body has more than %d fields", LIMIT_JSON_MEMBERS);
        }
        const struct field *f = field_find(t, m->string);
        if (repeated(object, m)) {
            return err_set_param(e, ERR_INVALID, f ? f->name : "", "field '%.64s' is given twice",
                                 m->string);
        }
        if (!f && ctx->reject_unknown) {
            return err_set(e, ERR_INVALID,
                           "field '%.64s' is not known; leave it out (or set unknown-fields: warn)",
                           m->string);
        }
        if (!f) {
            note_ignored(ignored, ignored_size, m->string);
            continue;
        }
        if (cJSON_IsNull(m)) {
            continue;
        }
        int rc = field_read(f, ret, m, ctx, e);
        if (rc) {
            return rc;
        }
        if (f->given >= 0) {
            *(bool *)((char *)ret + f->given) = true;
        }
    }
    return 0;
}
