/* UTF-8 (RFC 3629): the one decoder and validator of the program.
 *
 * A character is one to four bytes, in its shortest form, from U+0000 to U+10FFFF
 * without the surrogates U+D800 to U+DFFF; everything else is invalid.
 */
#ifndef QUIRE_CONFIG_BASE_UTF8_H
#define QUIRE_CONFIG_BASE_UTF8_H

#include "config/base/base.h"

/* Bytes of the character at `s` (1 to 4); 0: the bytes there are invalid; -1: they end
 * inside a character that is valid so far. On 0, *ret_bad is how many bytes one U+FFFD
 * replaces: the maximal subpart of a character (Unicode 15, section 3.9). `len` > 0. */
int utf8_next(const uint8_t *s, size_t len, int *ret_bad);

/* Bytes of the whole, valid character at `s` (1 to 4); 0: there is none. `len` > 0. */
static inline size_t utf8_char_len(const void *s, size_t len)
{
    const uint8_t *bytes = s;
    int bad;

    if (bytes[0] < 0x80) {
        return 1;
    }
    int n = utf8_next(bytes, len, &bad);
    return n > 0 ? (size_t)n : 0;
}

/* Whether all of a text is whole, valid characters. `text` may be NULL where len is
 * 0. */
bool utf8_valid(const char *text, size_t len);

/* The character at `s`, which is valid UTF-8; its bytes in *ret_len. */
int32_t utf8_get(const uint8_t *s, int *ret_len);

/* Write the character `c`, which is no surrogate and at most U+10FFFF, into ret[4];
 * returns its bytes. */
int utf8_put(char *ret, int32_t c);

#endif
