/* A strict pull reader for the JSON files of a model directory: no tree, no allocation,
 * one pass.
 *
 * The caller asks for what it expects, member by member:
 *
 *     json_enter_object(&j);
 *     while (json_next_member(&j)) {       // j.key, j.key_len
 *         if (json_key_is(&j, "dtype")) json_read_string(&j, text, sizeof text);
 *         else json_skip(&j);
 *     }
 *
 * The first error is kept (j.err's text begins with the file's name) and from then on
 * every call answers false, so a caller checks j.failed once, at the end. Python's NaN
 * and Infinity are read as numbers: its writer makes them.
 */
#ifndef QUIRE_CONFIG_BASE_JSON_H
#define QUIRE_CONFIG_BASE_JSON_H

#include "config/base/base.h"
#include "config/base/limits.h"

enum json_type {
    JSON_END,
    JSON_OBJECT,
    JSON_ARRAY,
    JSON_STRING,
    JSON_NUMBER,
    JSON_BOOL,
    JSON_NULL
};
/* vocabularies have runs of hundreds of spaces as keys, three bytes each */
enum { JSON_KEY_BYTES = 8192 };

struct json {
    const char *start, *at, *end;
    const char *file; /* for messages */
    struct err *err;
    bool failed;
    bool takes_nul; /* strings may hold the character NUL */
    bool first;     /* just entered: the next member or element has no comma before it */
    int32_t depth;
    /* of the member json_next_member found; NUL-terminated, escapes resolved */
    char key[JSON_KEY_BYTES];
    size_t key_len;
};

/* `text` and `file` must outlive the reader; `err` takes the first error. */
void json_init(struct json *j, const char *text, size_t len, const char *file, struct err *err);
/* What comes next, without taking it; JSON_END when failed or when nothing a value can
 * begin with is there. */
enum json_type json_peek(struct json *j);
const char *json_type_name(enum json_type t);
bool json_enter_object(struct json *j);
bool json_enter_array(struct json *j);
/* The next member's key, its colon taken; false after the last one (its brace taken) or
 * when failed. */
bool json_next_member(struct json *j);
/* Stand before the next element; false after the last one (its bracket taken) or when
 * failed. */
bool json_next_element(struct json *j);
bool json_key_is(const struct json *j, const char *key);
/* A string into ret[cap], NUL-terminated, escapes resolved; one that is longer, holds a
 * NUL or is no UTF-8 is an error. */
bool json_read_string(struct json *j, char *ret, size_t cap, size_t *ret_len);
/* A number without fraction or exponent that fits 64 bits. */
bool json_read_int(struct json *j, int64_t *ret);
bool json_read_double(struct json *j, double *ret);
bool json_read_bool(struct json *j, bool *ret);
/* Any value, checked as strictly as a read one. */
bool json_skip(struct json *j);
/* Nothing but white space is left. */
bool json_finish(struct json *j);
/* Record an error at the current place (file and byte offset in front). Returns
 * false. */
bool json_fail(struct json *j, const char *fmt, ...) PRINTF_LIKE(2, 3);

#endif
