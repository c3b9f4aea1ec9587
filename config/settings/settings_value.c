/* The conversion of one setting: text to value, with bounds, and value to YAML. */
#include <assert.h>
#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "config/base/limits.h"
#include "config/settings/settings_table.h"

struct unit {
    const char *name;
    double factor;
};

static const struct unit BYTE_UNITS[] = {
    {"", 1},         {"b", 1},      {"kib", 0x1p10}, {"mib", 0x1p20}, {"gib", 0x1p30},
    {"tib", 0x1p40}, {"k", 0x1p10}, {"m", 0x1p20},   {"g", 0x1p30},   {"t", 0x1p40},
    {"kb", 1e3},     {"mb", 1e6},   {"gb", 1e9},     {"tb", 1e12},    {0},
};
static const struct unit TIME_UNITS[] = {{"", 1},   {"ms", 1e-3}, {"s", 1},
                                         {"m", 60}, {"h", 3600},  {0}};

static void *value_at(const struct settings *s, const struct setting *row)
{
    return (char *)s + row->offset;
}

static uint8_t *origin_at(struct settings *s, const struct setting *row)
{
    return &s->origin[row - setting_table];
}

enum setting_origin setting_origin(const struct settings *s, const struct setting *row)
{
    return (enum setting_origin)s->origin[row - setting_table];
}

/* A finite decimal number; *ret_rest is what follows it. */
static bool parse_number(const char *text, double *ret, const char **ret_rest)
{
    if (!isdigit((unsigned char)text[0]) && text[0] != '-' && text[0] != '+' && text[0] != '.') {
        return false; /* strtod accepts inf, nan and leading space */
    }
    if (strpbrk(text, "xXpP")) {
        return false; /* it also accepts hexadecimal */
    }
    char *end;
    double value = strtod(text, &end);
    if (end == text || !isfinite(value)) {
        return false;
    }
    *ret = value;
    *ret_rest = end;
    return true;
}

/* The factor of a unit, after optional blanks and in upper or lower case; 0:
 * unknown. */
static double unit_factor(const struct unit *unit, const char *text)
{
    text += strspn(text, " ");
    for (; unit->name != NULL; unit++) {
        if (strcasecmp(unit->name, text) == 0) {
            return unit->factor;
        }
    }
    return 0;
}

static void format_bytes(struct buf *out, double bytes)
{
    static const struct unit shown[] = {
        {"TiB", 0x1p40}, {"GiB", 0x1p30}, {"MiB", 0x1p20}, {"KiB", 0x1p10}};

    for (size_t i = 0; i < ARRAY_LEN(shown); i++) {
        if (bytes >= shown[i].factor && fmod(bytes, shown[i].factor) == 0) {
            buf_printf(out, "%.0f%s", bytes / shown[i].factor, shown[i].name);
            return;
        }
    }
    buf_printf(out, "%.0f", bytes);
}

static int refuse(const struct setting *row, const char *text, const char *where,
                  const char *wanted, struct err *e)
{
    return err_set_param(e, ERR_INVALID, row->key, "%s: '%.80s' is not %s", where, text, wanted);
}

static int refuse_range(const struct setting *row, const char *text, const char *where,
                        struct err *e)
{
    struct buf range;

    buf_init(&range, 128);
    if (row->type == SETTING_BYTES) {
        format_bytes(&range, row->min);
        buf_puts(&range, " to ");
        format_bytes(&range, row->max);
    } else {
        buf_printf(&range, row->max > 1e15 ? "%.10g to 2^63 - 1" : "%.10g to %.10g", row->min,
                   row->max);
    }
    int rc = err_set_param(e, ERR_INVALID, row->key, "%s: '%.80s' is out of range; allowed: %s",
                           where, text, !range.data ? "" : range.data);
    buf_release(&range);
    return rc;
}

static int set_int(struct settings *s, const struct setting *row, const char *text,
                   const char *where, struct err *e)
{
    char *end;

    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (end == text || *end != '\0' || isspace((unsigned char)text[0])) {
        return refuse(row, text, where, "a whole number", e);
    }
    if (errno == ERANGE || (double)value < row->min || (double)value > row->max) {
        return refuse_range(row, text, where, e);
    }
    *(int64_t *)value_at(s, row) = value;
    return 0;
}

static int set_bytes(struct settings *s, const struct setting *row, const char *text,
                     const char *where, struct err *e)
{
    double value;
    const char *rest;

    if (!parse_number(text, &value, &rest)) {
        return refuse(row, text, where, "a size such as 8MiB or 4GiB", e);
    }
    double factor = unit_factor(BYTE_UNITS, rest);
    if (factor == 0) {
        return refuse(row, text, where,
                      "a size: the unit is one of KiB, MiB, GiB, TiB, kB, MB, GB, TB", e);
    }
    if (row->gib_without_unit && *rest == '\0' && value < 1024) {
        factor = 0x1p30;
    }
    value = floor(value * factor);
    if (value < row->min || value > row->max) {
        return refuse_range(row, text, where, e);
    }
    *(int64_t *)value_at(s, row) = (int64_t)value;
    return 0;
}

static int set_float(struct settings *s, const struct setting *row, const char *text,
                     const char *where, struct err *e)
{
    bool seconds = row->type == SETTING_SECONDS;
    double value;
    const char *rest;

    if (!parse_number(text, &value, &rest)) {
        return refuse(row, text, where,
                      seconds ? "a time such as 30, 30s or 2m" : "a finite number", e);
    }
    double factor = seconds ? unit_factor(TIME_UNITS, rest) : *rest == '\0' ? 1 : 0;
    if (factor == 0) {
        return refuse(row, text, where,
                      seconds ? "a time: the unit is one of ms, s, m, h" : "a finite number", e);
    }
    if (value * factor < row->min || value * factor > row->max) {
        return refuse_range(row, text, where, e);
    }
    *(double *)value_at(s, row) = value * factor;
    return 0;
}

/* A bool, or with SETTING_SWITCH an int. */
static int set_switch(struct settings *s, const struct setting *row, const char *text,
                      const char *where, struct err *e)
{
    static const struct setting_choice words[] = {
        {"true", SWITCH_ON}, {"false", SWITCH_OFF}, {"yes", SWITCH_ON},
        {"no", SWITCH_OFF},  {"on", SWITCH_ON},     {"off", SWITCH_OFF},
        {"1", SWITCH_ON},    {"0", SWITCH_OFF},     {"auto", SWITCH_AUTO}};
    bool has_auto = row->type == SETTING_SWITCH;

    for (size_t i = 0; i < ARRAY_LEN(words); i++) {
        if (strcasecmp(text, words[i].name) != 0) {
            continue;
        }
        if (has_auto) {
            *(int *)value_at(s, row) = words[i].value;
            return 0;
        }
        if (words[i].value != SWITCH_AUTO) {
            *(bool *)value_at(s, row) = words[i].value == SWITCH_ON;
            return 0;
        }
    }
    return refuse(row, text, where, has_auto ? "true, false or auto" : "true or false", e);
}

/* The choice named `text`; NULL: none, and `e` lists the allowed ones. */
static const struct setting_choice *find_choice(const struct setting *row, const char *text,
                                                const char *where, struct err *e)
{
    struct buf names;

    buf_init(&names, 256);
    for (const struct setting_choice *c = row->choice; c->name != NULL; c++) {
        if (strcmp(c->name, text) == 0) {
            buf_release(&names);
            return c;
        }
        buf_printf(&names, "%s%s", c == row->choice ? "" : ", ", c->name);
    }
    err_set_param(e, ERR_INVALID, row->key, "%s: '%.80s' is not one of %s", where, text,
                  names.data ? names.data : "");
    buf_release(&names);
    return NULL;
}

/* Whether text and a metric's name together are a valid Prometheus name. */
static bool is_metric_prefix(const char *text)
{
    if (isdigit((unsigned char)text[0])) {
        return false;
    }
    for (; *text != '\0'; text++) {
        if (!isalnum((unsigned char)*text) && *text != '_' && *text != ':') {
            return false;
        }
    }
    return true;
}

static int check_string(const struct setting *row, const char *text, const char *where,
                        struct err *e)
{
    if (row->choice) {
        return find_choice(row, text, where, e) ? 0 : ERR_INVALID;
    }
    for (const char *c = text; *c != '\0'; c++) {
        if (iscntrl((unsigned char)*c)) {
            return err_set_param(e, ERR_INVALID, row->key, "%s: a control character is not allowed",
                                 where);
        }
    }
    if (strlen(text) > LIMIT_SETTING_BYTES) {
        return err_set_param(e, ERR_INVALID, row->key, "%s: %zu bytes; at most %d are allowed",
                             where, strlen(text), (int)LIMIT_SETTING_BYTES);
    }
    if (row->offset == offsetof(struct settings, metrics_prefix) && !is_metric_prefix(text)) {
        return refuse(row, text, where, "a metric prefix: letters, digits, _ and :, no digit first",
                      e);
    }
    if (row->offset == offsetof(struct settings, served_model_name) &&
        strlen(text) > LIMIT_MODEL_NAME_BYTES) {
        return err_set_param(e, ERR_INVALID, row->key, "%s: a name may have at most %d bytes",
                             where, (int)LIMIT_MODEL_NAME_BYTES);
    }
    return 0;
}

/* An empty text unsets a string that may be absent. */
static int set_string(struct settings *s, const struct setting *row, const char *text,
                      const char *where, struct err *e)
{
    int rc = check_string(row, text, where, e);

    if (rc < 0) {
        return rc;
    }
    char *copy = NULL;
    if (text[0] != '\0' || row->offset == offsetof(struct settings, metrics_prefix)) {
        copy = strdup(text);
        if (!copy) {
            return err_nomem(e, row->key);
        }
    } else if (row->preset) {
        return err_set_param(e, ERR_INVALID, row->key, "%s: the value is empty", where);
    }
    char **at = value_at(s, row);
    free(*at);
    *at = copy;
    return 0;
}

static void clear_keys(struct settings *s)
{
    for (int64_t i = 0; i < s->n_api_keys; i++) {
        free(s->api_key[i]);
    }
    free(s->api_key);
    s->api_key = NULL;
    s->n_api_keys = 0;
}

int setting_add_key(struct settings *s, const char *key, size_t len, const char *where,
                    struct err *e)
{
    if (len == 0) {
        return err_set_param(e, ERR_INVALID, "api_key",
                             "%s: a key is empty; leave it out to serve without keys", where);
    }
    for (size_t i = 0; i < len; i++) {
        if (!isgraph((unsigned char)key[i])) {
            return err_set_param(e, ERR_INVALID, "api_key",
                                 "%s: a key holds a character that no HTTP header can carry; "
                                 "printable ASCII without "
                                 "spaces is allowed",
                                 where);
        }
    }
    if (len > LIMIT_API_KEY_BYTES) {
        return err_set_param(e, ERR_INVALID, "api_key", "%s: a key may have at most %d bytes",
                             where, (int)LIMIT_API_KEY_BYTES);
    }
    if (s->n_api_keys >= LIMIT_API_KEYS) {
        return err_set_param(e, ERR_INVALID, "api_key", "%s: more than %d keys", where,
                             (int)LIMIT_API_KEYS);
    }
    char **grown = realloc(s->api_key, ((size_t)s->n_api_keys + 1) * sizeof(*grown));
    if (!grown) {
        return err_nomem(e, "api_key");
    }
    s->api_key = grown;
    grown[s->n_api_keys] = strndup(key, len);
    if (!grown[s->n_api_keys]) {
        return err_nomem(e, "api_key");
    }
    s->n_api_keys++;
    return 0;
}

static int set_keys(struct settings *s, const struct setting *row, const char *text,
                    enum setting_origin from, const char *where, struct err *e)
{
    if (setting_origin(s, row) != from) {
        clear_keys(s);
    }
    for (;;) {
        size_t len = from == FROM_ENV ? strcspn(text, ",") : strlen(text);
        int rc = setting_add_key(s, text, len, where, e);
        if (rc < 0 || text[len] == '\0') {
            return rc;
        }
        text += len + 1;
    }
}

int setting_add_prefix(struct settings *s, const char *text, const char *where, struct err *e)
{
    if (text[0] == '\0') {
        return err_set_param(e, ERR_INVALID, "prefixes", "%s: an entry is empty", where);
    }
    if (s->n_prefixes >= LIMIT_PREFIXES) {
        return err_set_param(e, ERR_INVALID, "prefixes", "%s: more than %d entries", where,
                             (int)LIMIT_PREFIXES);
    }
    struct prefix_setting *grown =
        realloc(s->prefixes, ((size_t)s->n_prefixes + 1) * sizeof(*grown));
    if (!grown) {
        return err_nomem(e, "prefixes");
    }
    s->prefixes = grown;
    grown[s->n_prefixes].text = strdup(text);
    if (!grown[s->n_prefixes].text) {
        return err_nomem(e, "prefixes");
    }
    s->n_prefixes++;
    return 0;
}

int setting_set(struct settings *s, const struct setting *row, const char *text,
                enum setting_origin from, const char *where, struct err *e)
{
    int rc = 0;

    switch (row->type) {
    case SETTING_STRING:
        rc = set_string(s, row, text, where, e);
        break;
    case SETTING_INT:
        rc = set_int(s, row, text, where, e);
        break;
    case SETTING_BYTES:
        rc = set_bytes(s, row, text, where, e);
        break;
    case SETTING_FLOAT:
    case SETTING_SECONDS:
        rc = set_float(s, row, text, where, e);
        break;
    case SETTING_BOOL:
    case SETTING_SWITCH:
        rc = set_switch(s, row, text, where, e);
        break;
    case SETTING_CHOICE: {
        const struct setting_choice *c = find_choice(row, text, where, e);
        rc = !c ? ERR_INVALID : 0;
        if (c) {
            *(int *)value_at(s, row) = c->value;
        }
        break;
    }
    case SETTING_KEYS:
        rc = set_keys(s, row, text, from, where, e);
        break;
    case SETTING_PREFIXES:
        return err_set_param(e, ERR_INVALID, row->key,
                             "%s: this list can only be given in the YAML file", where);
    }
    if (rc == 0) {
        *origin_at(s, row) = (uint8_t)from;
    }
    return rc;
}

static void format_string(struct buf *out, const char *text)
{
    if (!text) {
        buf_puts(out, "null");
        return;
    }
    buf_json_puts(out, text);
}

static void format_list(const struct settings *s, const struct setting *row, struct buf *out)
{
    int64_t n = row->type == SETTING_KEYS ? s->n_api_keys : s->n_prefixes;

    buf_putc(out, '[');
    for (int64_t i = 0; i < n; i++) {
        buf_puts(out, i == 0 ? "" : ", ");
        format_string(out, row->type == SETTING_KEYS ? "***" : s->prefixes[i].text);
    }
    buf_putc(out, ']');
}

void setting_format(const struct settings *s, const struct setting *row, struct buf *out)
{
    const void *at = value_at(s, row);

    switch (row->type) {
    case SETTING_STRING:
        format_string(out, *(char *const *)at);
        break;
    case SETTING_INT:
        buf_printf(out, "%" PRId64, *(const int64_t *)at);
        break;
    case SETTING_BYTES:
        format_bytes(out, (double)*(const int64_t *)at);
        break;
    case SETTING_FLOAT:
    case SETTING_SECONDS:
        buf_printf(out, "%.10g", *(const double *)at);
        break;
    case SETTING_BOOL:
        buf_puts(out, *(const bool *)at ? "true" : "false");
        break;
    case SETTING_SWITCH: {
        static const char *const names[] = {
            [SWITCH_OFF] = "false", [SWITCH_ON] = "true", [SWITCH_AUTO] = "auto"};
        buf_puts(out, names[*(const int *)at]);
        break;
    }
    case SETTING_CHOICE:
        for (const struct setting_choice *c = row->choice; c->name != NULL; c++) {
            if (c->value == *(const int *)at) {
                buf_puts(out, c->name);
                break;
            }
        }
        break;
    case SETTING_KEYS:
    case SETTING_PREFIXES:
        format_list(s, row, out);
        break;
    }
}

void settings_release(struct settings *s)
{
    for (int i = 0; i < setting_count; i++) {
        if (setting_table[i].type == SETTING_STRING) {
            free(*(char **)value_at(s, &setting_table[i]));
        }
    }
    clear_keys(s);
    for (int64_t i = 0; i < s->n_prefixes; i++) {
        free(s->prefixes[i].text);
    }
    free(s->prefixes);
    *s = (struct settings){0};
}
