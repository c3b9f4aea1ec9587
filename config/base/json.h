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
 * The first error is kept (j.err's text begins with the file's name), and after it
 * every call returns false, so the caller checks j.failed once, at the end. NaN and
 * Infinity are read as numbers, because Python's json module writes them.
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
/* Vocabularies have keys of hundreds of spaces, each encoded in three bytes. */
enum { JSON_KEY_BYTES = 8192 };

struct json {
    const char *start, *at, *end; /* the text, and the position in it */
    const char *file;             /* for messages */
    struct err *err;              /* takes the first error; the caller's */
    bool failed;                  /* an error was found; sticky */
    bool takes_nul;               /* strings may hold the character NUL */
    bool first;                   /* an object or array was just entered: no comma comes next */
    int32_t depth;                /* objects and arrays that are open */
    /* The key of the last json_next_member, NUL-terminated, escapes resolved. */
    char key[JSON_KEY_BYTES];
    size_t key_len;
};

/* `text` and `file` must outlive the reader; `err` takes the first error. */
void json_init(struct json *j, const char *text, size_t len, const char *file, struct err *err);
/* The type of the next value, without consuming it; JSON_END on failure or if no value
 * follows. */
enum json_type json_peek(struct json *j);
const char *json_type_name(enum json_type t);
bool json_enter_object(struct json *j);
bool json_enter_array(struct json *j);
/* Read the next member's key and colon; false after the last one, with the brace
 * consumed, or on failure. */
bool json_next_member(struct json *j);
/* Step to the next element; false after the last one, with the bracket consumed, or on
 * failure. */
bool json_next_element(struct json *j);
bool json_key_is(const struct json *j, const char *key);
/* Read a string into ret[cap], NUL-terminated, escapes resolved. A longer one, a NUL
 * character (unless takes_nul) and invalid UTF-8 are errors. */
bool json_read_string(struct json *j, char *ret, size_t cap, size_t *ret_len);
/* Read a number without fraction or exponent that fits into 64 bits. */
bool json_read_int(struct json *j, int64_t *ret);
bool json_read_double(struct json *j, double *ret);
bool json_read_bool(struct json *j, bool *ret);
/* Skip any value, checking it as strictly as when reading. */
bool json_skip(struct json *j);
/* Check that only white space follows. */
bool json_finish(struct json *j);
/* Record an error at the current position, with file and byte offset. Returns false. */
bool json_fail(struct json *j, const char *fmt, ...) PRINTF_LIKE(2, 3);

#endif
