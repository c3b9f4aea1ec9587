/* Strict JSON for bodies that come from anyone.
 *
 * A body is read in one walk into a tree of cJSON's nodes, which says what cJSON's own
 * reader cannot: grammar, UTF-8, depth and number of values are checked with the byte
 * at fault named; a string has a length, so that it may hold the character NUL; and a
 * number that a double may not hold keeps its text, so that integers are exact whatever
 * their size. In a node:
 *
 *     string   valuestring, a NUL behind it that does not count; valueint, its bytes
 *     number   valuedouble, rounded, may be infinite;
 *              valuestring, its text, NULL where valuedouble is exact
 */
#ifndef QUIRE_SERVER_API_JSON_FIELDS_H
#define QUIRE_SERVER_API_JSON_FIELDS_H

#include <cjson/cJSON.h>

#include "config/base/buf.h"

/* Room for json_number_text. */
enum { JSON_NUMBER_BYTES = 80 };

/* One JSON value and nothing after it: 0, or ERR_INVALID naming the byte. */
int json_check(const char *text, size_t len, struct err *e);
/* The same, and its tree; the caller frees it with cJSON_Delete. No member's name holds
 * the character NUL. */
int json_parse(cJSON **ret, const char *text, size_t len, struct err *e);

/* Bytes of the string `v`. */
size_t json_string_len(const cJSON *v);
/* Whether `v` is the string `text`. */
bool json_is(const cJSON *v, const char *text);
/* Whether the string `v` holds the character NUL, and so ends early as a C string. */
bool json_has_nul(const cJSON *v);
/* The exact value of the number `v`, as sign and magnitude: 1.0 and 1e3 are integers
 * too. ERR_INVALID: it has a fraction; ERR_FULL: its magnitude is beyond 64 bits. */
int json_integer(const cJSON *v, bool *ret_minus, uint64_t *ret);
/* The number `v` as the client wrote it, cut short where it is long: for messages.
 * Returns `room`. */
const char *json_number_text(const cJSON *v, char room[JSON_NUMBER_BYTES]);
/* Append `v` as JSON: numbers as they were written. */
void json_put(struct buf *b, const cJSON *v);
/* Append a string in quotes. */
void json_put_string(struct buf *b, const char *text, size_t len);

/* "a string", "a number" …: for messages. */
const char *json_kind(const cJSON *v);

#endif
