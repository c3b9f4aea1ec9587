/* What every file may include: error values, small macros, time.
 *
 * One error convention holds in the whole tree: a function that can fail returns 0 (or
 * a count >= 0) on success and one of the negative `enum err_code` values on failure,
 * with one line of text in the caller's `struct err`. `ret_` outputs are untouched on
 * failure. Libraries return errors; only the caller at the top (main, an HTTP handler)
 * logs or answers with them.
 */
#ifndef QUIRE_CONFIG_BASE_BASE_H
#define QUIRE_CONFIG_BASE_BASE_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum err_code {
    ERR_INVALID = -1,     /* the caller's value is wrong: HTTP 400, exit 1 */
    ERR_NOMEM = -2,       /* an allocation failed */
    ERR_IO = -3,          /* a system call failed: file, socket, disk */
    ERR_NOT_FOUND = -4,   /* no such file or object: HTTP 404 */
    ERR_UNSUPPORTED = -5, /* well formed, but this build, model or device lacks it: HTTP 400 */
    ERR_FULL = -6,        /* a bounded queue or pool is full, try later: HTTP 429 */
    ERR_DRAINING = -7,    /* shutting down: HTTP 503 */
    ERR_DEVICE = -8,      /* the device failed; sticky, the process must end */
    ERR_TIMEOUT = -9,     /* a time limit expired */
};

struct err {
    int code;       /* 0 or an enum err_code */
    char param[48]; /* the request field or setting at fault, or "" */
    /* One line without a newline: what was given and what is allowed. Control
     * characters are replaced by '?'. */
    char text[464];
};

#define PRINTF_LIKE(fmt, args) __attribute__((format(printf, fmt, args)))

/* Fill `e` and return `code`; `param` is cleared. With e NULL the text is dropped. */
int err_set(struct err *e, int code, const char *fmt, ...) PRINTF_LIKE(3, 4);
/* The same, naming the request field or setting at fault. */
int err_set_param(struct err *e, int code, const char *param, const char *fmt, ...)
    PRINTF_LIKE(4, 5);
/* Prepend "context: " to the text; returns e->code, or ERR_INVALID if e is NULL. */
int err_prefix(struct err *e, const char *fmt, ...) PRINTF_LIKE(2, 3);
/* ERR_NOMEM; `what` names the object that was to be allocated. */
int err_nomem(struct err *e, const char *what);

#define ARRAY_LEN(a) (sizeof(a) / sizeof((a)[0]))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
#define CONTAINER_OF(ptr, type, member) ((type *)((char *)(ptr) - offsetof(type, member)))

static inline int64_t div_ceil(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

/* CLOCK_MONOTONIC in microseconds. */
int64_t clock_us(void);

#define QUIRE_VERSION "0.1.0"

#endif
