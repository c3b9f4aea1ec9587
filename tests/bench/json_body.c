/* Reading a request body: the strict reader (server/api/json_fields.h), which makes the
 * tree in the same pass, against a check followed by cJSON's own parser.
 *
 *     build/tests/bench/json_body [MESSAGES]
 *
 * A chat of so many messages of 200 bytes (1000 by default); prints MB/s of each, the
 * best of nine in turn.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config/base/buf.h"
#include "server/api/json_fields.h"

enum { ROUNDS = 9, MESSAGE_BYTES = 200 };

static void make_body(struct buf *b, int n_messages)
{
    buf_puts(b, "{\"model\":\"m\",\"temperature\":0.7,\"messages\":[");
    for (int i = 0; i < n_messages; i++) {
        buf_puts(b, i ? ",{\"role\":\"user\",\"content\":\"" : "{\"role\":\"user\",\"content\":\"");
        for (int k = 0; k < MESSAGE_BYTES; k += 20) {
            buf_puts(b, k % 60 ? "plain words, some of " : "caf\xc3\xa9 \\u00e9 \\n lines ");
        }
        buf_puts(b, "\"}");
    }
    buf_puts(b, "]}");
}

static double one_pass(const struct buf *b)
{
    struct err e = {0};
    cJSON *tree = NULL;
    int64_t start = clock_us();

    if (json_parse(&tree, b->data, b->len, &e) != 0) {
        fprintf(stderr, "%s\n", e.text);
        exit(1);
    }
    int64_t us = clock_us() - start;
    cJSON_Delete(tree);
    return (double)b->len / (double)MAX(us, 1);
}

static double check_and_parse(const struct buf *b)
{
    struct err e = {0};
    int64_t start = clock_us();

    if (json_check(b->data, b->len, &e) != 0) {
        fprintf(stderr, "%s\n", e.text);
        exit(1);
    }
    cJSON *tree = cJSON_ParseWithLength(b->data, b->len);
    int64_t us = clock_us() - start;
    cJSON_Delete(tree);
    return (double)b->len / (double)MAX(us, 1);
}

int main(int argc, char **argv)
{
    struct buf b;
    double one = 0, two = 0;

    buf_init(&b, (size_t)1 << 30);
    make_body(&b, argc > 1 ? atoi(argv[1]) : 1000);
    for (int i = 0; i < ROUNDS; i++) {
        one = MAX(one, one_pass(&b));
        two = MAX(two, check_and_parse(&b));
    }
    printf("%zu bytes: one pass %.0f MB/s, check and cJSON %.0f MB/s\n", b.len, one, two);
    buf_release(&b);
    return 0;
}
