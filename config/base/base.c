/* Error values and time. */
#include "config/base/base.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

static int err_fill(struct err *e, int rc, const char *param, const char *fmt, va_list args)
{
    if (!e) {
        return rc;
    }
    e->code = rc;
    snprintf(e->param, sizeof(e->param), "%s", param);
    vsnprintf(e->text, sizeof(e->text), fmt, args);
    /* One line, even if a quoted name from a file or a client holds control
     * characters. */
    for (char *p = e->text; *p; p++) {
        if ((unsigned char)*p < 0x20 || *p == 0x7F) {
            *p = '?';
        }
    }
    return rc;
}

int err_set(struct err *e, int rc, const char *fmt, ...)
{
    va_list args;

    va_start(args, fmt);
    err_fill(e, rc, "", fmt, args);
    va_end(args);
    return rc;
}

int err_set_param(struct err *e, int rc, const char *param, const char *fmt, ...)
{
    va_list args;

    va_start(args, fmt);
    err_fill(e, rc, param, fmt, args);
    va_end(args);
    return rc;
}

int err_prefix(struct err *e, const char *fmt, ...)
{
    if (!e) {
        return ERR_INVALID;
    }

    char context[sizeof(e->text)];
    va_list args;
    va_start(args, fmt);
    vsnprintf(context, sizeof(context), fmt, args);
    va_end(args);

    /* A text that is too long loses its end, not the context, which says where to
     * look. */
    char tail[sizeof(e->text)];
    memcpy(tail, e->text, sizeof(tail));
    size_t used = strlen(context);
    memcpy(e->text, context, used + 1);
    const char *part[] = {": ", tail};
    for (size_t i = 0; i < ARRAY_LEN(part); i++) {
        size_t room = sizeof(e->text) - 1 - used;
        size_t len = strnlen(part[i], sizeof(tail));
        size_t take = MIN(len, room);
        memcpy(e->text + used, part[i], take);
        used += take;
    }
    e->text[used] = '\0';
    return e->code;
}

int err_nomem(struct err *e, const char *what)
{
    return err_set(e, ERR_NOMEM, "out of memory: %s", what);
}

int64_t clock_us(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}
