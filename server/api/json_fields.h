/* A strict JSON reader for untrusted request bodies.
 *
 * A body is read in one pass into a tree of cJSON nodes. Unlike cJSON's own parser it
 * checks grammar, UTF-8, depth and number of values, and names the offending byte; a
 * string has a length, so that it may hold the character NUL; and a number that a
 * double may not represent keeps its text, so that integers of any size are exact. In a
 * node:
 *
 *     string   valuestring, followed by a NUL; valueint, its length in bytes
 *     number   valuedouble, rounded, may be infinite;
 *              valuestring, its text, or NULL if valuedouble is exact
 */
#ifndef QUIRE_SERVER_API_JSON_FIELDS_H
#define QUIRE_SERVER_API_JSON_FIELDS_H

#include <cjson/cJSON.h>

#include "config/base/buf.h"

/* The size of json_number_text's buffer. */
enum { JSON_NUMBER_BYTES = 80 };

/* Check that the text is one JSON value: 0, or ERR_INVALID naming the byte. */
int json_check(const char *text, size_t len, struct err *e);
/* The same, and make its tree, which the caller frees with cJSON_Delete. Member names
 * with the character NUL are refused. */
int json_parse(cJSON **ret, const char *text, size_t len, struct err *e);
/* Check that no object inside the body's members has a member twice: 0, or ERR_INVALID
 * naming the body's member. Those of the body itself are fields_read's. */
int json_check_names(const cJSON *body, struct err *e);

/* The length of the string `v` in bytes. */
size_t json_string_len(const cJSON *v);
/* Whether `v` is the string `text`. */
bool json_is(const cJSON *v, const char *text);
/* Whether the string `v` holds the character NUL, which would end a C string early. */
bool json_has_nul(const cJSON *v);
/* The exact value of the number `v` as sign and magnitude; 1.0 and 1e3 are integers,
 * too. ERR_INVALID: it has a fraction; ERR_FULL: the magnitude exceeds 64 bits. */
int json_integer(const cJSON *v, bool *ret_minus, uint64_t *ret);
/* The number `v` as the client wrote it, shortened if it is long, for messages. Returns
 * `text`. */
const char *json_number_text(const cJSON *v, char text[JSON_NUMBER_BYTES]);
/* Append `v` as JSON, numbers as they were written. */
void json_put(struct buf *b, const cJSON *v);

/* "a string", "a number" …: for messages. */
const char *json_kind(const cJSON *v);

#endif
