/* Strict JSON for bodies that come from anyone.
 *
 * cJSON reads more than RFC 8259 allows (leading zeros, raw control characters, bytes that are no UTF-8), turns 1e999 into
 * infinity, nests deeply and keeps numbers as doubles. So a body is walked once before cJSON sees it: grammar, UTF-8,
 * depth, number of values and finite numbers are checked here, with the byte at fault named; and the text of a top-level
 * value can be had back, for integers that a double cannot hold.
 */
#ifndef QUIRE_SERVER_JSON_H
#define QUIRE_SERVER_JSON_H

#include <cjson/cJSON.h>

#include "config/base.h"

/* One JSON value and nothing after it: 0, or ERR_INVALID naming the byte. */
int json_check(const char *text, size_t len, struct err *e);
/* json_check, then a tree; the caller frees it with cJSON_Delete. */
int json_parse(cJSON **ret, const char *text, size_t len, struct err *e);
/* The text of the value of member `k` (0-based, in order) of the object that `text` is, which json_check has passed.
 * Returns its length, 0 when there is no such member. */
size_t json_member_text(const char *text, size_t len, int k, const char **ret);
/* Length of the UTF-8 character that begins at `s` (`left` bytes), 0 where it is invalid: overlong, surrogate, cut short. */
size_t utf8_char_len(const unsigned char *s, size_t left);
/* "a string", "a number" …: for messages. */
const char *json_kind(const cJSON *v);

#endif
