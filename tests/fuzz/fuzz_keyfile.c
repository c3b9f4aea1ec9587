/* The file of API keys: what is accepted is inside its bounds, with distinct names and
 * keys; a refusal names the line and never a key. A form feed parts the file of the
 * start, the one of a reload and the header that is sent then. covers:
 * server/access/keyfile.c server/access/auth.c */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <unistd.h>

#include "server/access/auth.h"

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
        CHECK(k->limits.weight > 0 && k->limits.requests_per_minute >= 0 &&
              k->limits.tokens_per_minute >= 0);
        CHECK(k->limits.concurrent_requests >= 0 &&
              k->limits.priority_low <= k->limits.priority_high);
        for (int32_t j = 0; j < i; j++) {
            CHECK(strcmp(l->key[j].name, k->name) != 0 &&
                  memcmp(l->key[j].digest, k->digest, KEY_DIGEST_BYTES) != 0);
        }
    }
}

/* Whether some word name=... holds "sk-": names are public, and may be quoted. */
static bool is_in_a_name(const char *text, size_t size)
{
    static const char NAME[] = "name=";

    for (const char *end = text + size, *at; (at = memmem(text, (size_t)(end - text), NAME, 5));
         text = at + 5) {
        size_t n = 0;
        while (at + n < end && !strchr(" \t\r\n", at[n])) {
            n++;
        }
        if (memmem(at, n, "sk-", 3)) {
            return true;
        }
    }
    return false;
}

/* ---- the file at work ---- */

static void write_file(int fd, const char *text, size_t size)
{
    CHECK(ftruncate(fd, 0) == 0 && pwrite(fd, text, size, 0) == (ssize_t)size);
}

static void see(void *n, struct client *c)
{
    CHECK(c->name[0]);
    ++*(int32_t *)n;
}

/* Start with one file, read another, and ask with a header; of two that are bad the
 * last good one holds. */
static void use(struct keys *k, const struct settings *s, int fd, char *first, char *second,
                const char *header)
{
    struct err e = {0};
    struct auth_result g;
    int32_t n = 0;

    write_file(fd, first, strlen(first));
    if (keys_open(k, s, &e) < 0) {
        CHECK(e.text[0] && strcmp(e.param, "api_key_file") == 0);
        return;
    }
    write_file(fd, second, strlen(second));
    int32_t before = keys_count(k);
    if (keys_reload(k, s, &e) < 0) {
        CHECK(keys_count(k) == before && e.text[0]);
    }
    keys_each(k, see, &n);
    CHECK(n == keys_count(k) && n >= 1);
    if (keys_find(k, header, &g)) {
        CHECK(g.client && strncasecmp(header, "Bearer ", 7) == 0);
    }
    CHECK(!keys_find(k, NULL, &g) && !keys_find(k, "Basic x", &g));
    keys_close(k);
}

static void use_input(const uint8_t *data, size_t size)
{
    static char path[40];
    static struct settings s;
    static struct keys keys;
    static int fd;

    if (!s.api_key_file) {
        fd = memfd_create("keys", 0);
        CHECK(fd >= 0);
        snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
        s.api_key_file = path;
    }
    char *text = malloc(size + 1), *rest = text;
    CHECK(text);
    memcpy(text, data, size);
    text[size] = '\0';
    char *first = strsep(&rest, "\f"), *second = strsep(&rest, "\f");
    if (second) {
        use(&keys, &s, fd, first, second, rest ? rest : "");
    }
    free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct key_list l = {0};
    struct err e = {0};

    if (key_list_parse(&l, (const char *)data, size, &e) == 0) {
        check(&l);
    } else {
        CHECK(e.code < 0 && e.text[0] && !strchr(e.text, '\n') &&
              (!strstr(e.text, "sk-") || is_in_a_name((const char *)data, size)));
    }
    key_list_release(&l);
    use_input(data, size);
    return 0;
}
