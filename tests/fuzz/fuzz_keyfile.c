/* The file of API keys: what is accepted is inside its bounds, with distinct names and keys; a refusal names the line and never a
 * key. covers: server/keyfile.c */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/keyfile.h"

#define CHECK(x)                                                     \
    do {                                                             \
        if (!(x)) {                                                  \
            fprintf(stderr, "fuzz_keyfile: %s does not hold\n", #x); \
            abort();                                                 \
        }                                                            \
    } while (0)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(const struct key_list *l)
{
    for (int32_t i = 0; i < l->n; i++) {
        const struct key_entry *k = &l->key[i];
        CHECK(k->name[0] && memchr(k->name, 0, sizeof(k->name)));
        CHECK(k->limits.weight > 0 && k->limits.requests_per_minute >= 0 && k->limits.tokens_per_minute >= 0);
        CHECK(k->limits.concurrent_requests >= 0 && k->limits.priority_low <= k->limits.priority_high);
        for (int32_t j = 0; j < i; j++)
            CHECK(strcmp(l->key[j].name, k->name) != 0 && memcmp(l->key[j].digest, k->digest, KEY_DIGEST_BYTES) != 0);
    }
}

/* Whether some word name=... holds "sk-": names are public, and may be quoted. */
static bool is_in_a_name(const char *text, size_t size)
{
    static const char NAME[] = "name=";
    for (const char *end = text + size, *at; (at = memmem(text, (size_t)(end - text), NAME, 5)); text = at + 5) {
        size_t n = 0;
        while (at + n < end && !strchr(" \t\r\n", at[n]))
            n++;
        if (memmem(at, n, "sk-", 3))
            return true;
    }
    return false;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct key_list l = {0};
    struct err e = {0};
    if (key_list_parse(&l, (const char *)data, size, &e) == 0)
        check(&l);
    else
        CHECK(e.code < 0 && e.text[0] && !strchr(e.text, '\n') &&
              (!strstr(e.text, "sk-") || is_in_a_name((const char *)data, size)));
    key_list_release(&l);
    return 0;
}
