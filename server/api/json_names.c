/* Members that an object of a body has twice. Of two, readers take the first or the
 * last, so what a proxy has checked need not be what is served. */
#include <stdlib.h>
#include <string.h>

#include "server/api/json_fields.h"

enum { FEW = 16 }; /* members that are compared in pairs */

static const char *repeated_of_few(const cJSON *object)
{
    for (const cJSON *m = object->child; m; m = m->next) {
        for (const cJSON *k = m->next; k; k = k->next) {
            if (strcmp(m->string, k->string) == 0) {
                return m->string;
            }
        }
    }
    return NULL;
}

static int compare(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* *ret: a name that the object of n members has twice, or NULL. */
static int repeated_of_many(const char **ret, const cJSON *object, size_t n, struct err *e)
{
    const char **name = malloc(n * sizeof(*name));
    size_t i = 0;

    if (!name) {
        return err_nomem(e, "the request's JSON");
    }
    for (const cJSON *m = object->child; m; m = m->next) {
        name[i++] = m->string;
    }
    qsort(name, n, sizeof(*name), compare);
    *ret = NULL;
    for (i = 1; i < n && !*ret; i++) {
        *ret = strcmp(name[i - 1], name[i]) == 0 ? name[i] : NULL;
    }
    free(name);
    return 0;
}

static int check_object(const cJSON *object, const char *field, struct err *e)
{
    size_t n = (size_t)cJSON_GetArraySize(object);
    const char *name = n <= FEW ? repeated_of_few(object) : NULL;
    int rc = n <= FEW ? 0 : repeated_of_many(&name, object, n, e);

    return rc || !name ? rc
                       : err_set_param(e, ERR_INVALID, field,
                                       "%.64s has an object that gives the member '%.64s' twice",
                                       field, name);
}

/* No deeper than LIMIT_JSON_DEPTH, which the reader has checked. */
static int check_value(const cJSON *v, const char *field, struct err *e)
{
    int rc = cJSON_IsObject(v) ? check_object(v, field, e) : 0;

    for (const cJSON *m = v->child; m && !rc; m = m->next) {
        if (m->child) {
            rc = check_value(m, field, e);
        }
    }
    return rc;
}

int json_check_names(const cJSON *body, struct err *e)
{
    int rc = 0;

    for (const cJSON *m = cJSON_IsObject(body) ? body->child : NULL; m && !rc; m = m->next) {
        rc = check_value(m, m->string, e);
    }
    return rc;
}
