/* The alphabet in which byte-level tokenizers (GPT-2's) write bytes: each of the 256
 * bytes is one printable character of a token's text.
 *
 * Printable Latin-1 characters stand for themselves; the other 68 bytes, in order, are
 * U+0100 to U+0143. */
#include "models/tokenizer/tokenizer_internal.h"

static bool is_printable(int c)
{
    return (c >= '!' && c <= '~') || (c >= 0xA1 && c <= 0xAC) || (c >= 0xAE && c <= 0xFF);
}

int32_t byte_to_char(uint8_t b)
{
    if (is_printable(b)) {
        return b;
    }
    return b <= 0x20 ? 0x100 + b : b <= 0xA0 ? 0x121 + (b - 0x7F) : 0x143;
}

int char_to_byte(int32_t c)
{
    if (c < 0x100) {
        return is_printable(c) ? c : -1;
    }
    if (c > 0x143) {
        return -1;
    }
    return c <= 0x120 ? c - 0x100 : c == 0x143 ? 0xAD : 0x7F + (c - 0x121);
}
