/* See utf8.h. */
#include "config/base/utf8.h"

#include <string.h>

int utf8_next(const uint8_t *s, size_t len, int *ret_bad)
{
    uint8_t c = s[0];

    if (c < 0x80) {
        return 1;
    }
    *ret_bad = 1;
    int need = c >= 0xC2 && c <= 0xDF ? 2 : (c & 0xF0) == 0xE0 ? 3 : c >= 0xF0 && c <= 0xF4 ? 4 : 0;
    if (need == 0) {
        return 0;
    }
    /* The second byte's range shuts out overlong forms, surrogates and code points over
     * U+10FFFF. */
    uint8_t lo = c == 0xE0 ? 0xA0 : c == 0xF0 ? 0x90 : 0x80;
    uint8_t hi = c == 0xED ? 0x9F : c == 0xF4 ? 0x8F : 0xBF;
    for (int i = 1; i < need; i++) {
        if ((size_t)i >= len) {
            return -1;
        }
        if (s[i] < lo || s[i] > hi) {
            *ret_bad = i;
            return 0;
        }
        lo = 0x80;
        hi = 0xBF;
    }
    return need;
}

bool utf8_valid(const char *text, size_t len)
{
    if (len == 0) { /* and text may be NULL */
        return true;
    }
    const uint8_t *p = (const uint8_t *)text, *end = p + len;
    int bad;
    while (p < end) {
        if (end - p >= 8) { /* eight ASCII characters at once */
            uint64_t w;
            memcpy(&w, p, 8);
            if (!(w & 0x8080808080808080u)) {
                p += 8;
                continue;
            }
        }
        int n = utf8_next(p, (size_t)(end - p), &bad);
        if (n <= 0) {
            return false;
        }
        p += n;
    }
    return true;
}

int32_t utf8_get(const uint8_t *s, int *ret_len)
{
    if (s[0] < 0x80) {
        *ret_len = 1;
        return s[0];
    }
    if (s[0] < 0xE0) {
        *ret_len = 2;
        return (s[0] & 0x1F) << 6 | (s[1] & 0x3F);
    }
    if (s[0] < 0xF0) {
        *ret_len = 3;
        return (s[0] & 0x0F) << 12 | (s[1] & 0x3F) << 6 | (s[2] & 0x3F);
    }
    *ret_len = 4;
    return (s[0] & 0x07) << 18 | (s[1] & 0x3F) << 12 | (s[2] & 0x3F) << 6 | (s[3] & 0x3F);
}

int utf8_put(char *ret, int32_t c)
{
    if (c < 0x80) {
        ret[0] = (char)c;
        return 1;
    }
    int n = c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    for (int i = n - 1; i > 0; i--, c >>= 6) {
        ret[i] = (char)(0x80 | (c & 0x3F));
    }
    ret[0] = (char)((0xF0 << (4 - n)) | c);
    return n;
}
