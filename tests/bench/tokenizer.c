/* Speed of the tokenizer on one thread, and a filter for scripts that compare it:
 *
 *     tokenizer load DIR             milliseconds to open the tokenizer, best of ten
 *     tokenizer speed DIR FILE       encoding and decoding a text file
 *     tokenizer ids DIR              reads frames (uint32 length, bytes) and answers each
 *                                    with a frame of int32 (code, n, ids[n]), a frame of
 *                                    text with all ids decoded at once, and one with the
 *                                    ids decoded as a stream
 */
#include "models/tokenizer/tokenizer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int load(const char *dir)
{
    struct err e = {0};
    int64_t best = INT64_MAX;

    for (int i = 0; i < 10; i++) {
        struct tokenizer *t = NULL;
        int64_t start = clock_us();
        if (tokenizer_open(&t, dir, &e) != 0) {
            fprintf(stderr, "%s\n", e.text);
            return 1;
        }
        best = MIN(best, clock_us() - start);
        if (i == 9) {
            printf("{\"dir\": \"%s\", \"vocab\": %d, \"load_ms\": %.2f}\n", dir,
                   tokenizer_vocab_size(t), (double)best / 1000);
        }
        tokenizer_free(t);
    }
    return 0;
}

static char *read_file(const char *path, size_t *ret_len)
{
    FILE *f = fopen(path, "rb");

    if (!f || fseek(f, 0, SEEK_END) != 0) {
        return NULL;
    }
    long n = ftell(f);
    rewind(f);
    char *text = malloc((size_t)n + 1);
    *ret_len = text ? fread(text, 1, (size_t)n, f) : 0;
    fclose(f);
    return text;
}

static int speed(const char *dir, const char *path)
{
    struct err e = {0};
    struct tokenizer *t = NULL;
    size_t len = 0;
    char *text = read_file(path, &len);

    if (!text || tokenizer_open(&t, dir, &e) != 0) {
        fprintf(stderr, "%s\n", text ? e.text : path);
        return 1;
    }
    struct token_list ids = {0};
    struct buf out;
    buf_init(&out, len * 2 + 1024);
    int64_t encode_us = INT64_MAX, decode_us = INT64_MAX;
    for (int i = 0; i < 10; i++) {
        ids.n = 0;
        int64_t start = clock_us();
        if (tokenizer_encode(t, text, len, false, INT32_MAX, &ids, &e) != 0) {
            fprintf(stderr, "%s\n", e.text);
            return 1;
        }
        encode_us = MIN(encode_us, clock_us() - start);
        struct detokenizer d;
        detokenizer_init(&d, t, true, true);
        buf_clear(&out);
        start = clock_us();
        for (int32_t k = 0; k < ids.n; k++) {
            detokenizer_push(&d, ids.id[k], &out);
        }
        detokenizer_finish(&d, &out);
        decode_us = MIN(decode_us, clock_us() - start);
    }
    printf("{\"dir\": \"%s\", \"bytes\": %zu, \"tokens\": %d, \"encode_mb_s\": %.1f, "
           "\"decode_ns_token\": %.1f}\n",
           dir, len, ids.n, (double)len / (double)encode_us, (double)decode_us * 1000 / ids.n);
    buf_release(&out);
    token_list_release(&ids);
    tokenizer_free(t);
    free(text);
    return 0;
}

static void put_frame(const void *data, size_t len)
{
    uint32_t n = (uint32_t)len;

    fwrite(&n, 4, 1, stdout);
    fwrite(data, 1, len, stdout);
}

static int ids_filter(const char *dir)
{
    struct err e = {0};
    struct tokenizer *t = NULL;

    if (tokenizer_open(&t, dir, &e) != 0) {
        fprintf(stderr, "%s\n", e.text);
        return 1;
    }
    uint32_t len;
    while (fread(&len, 4, 1, stdin) == 1) {
        char *text = malloc(len + 1);
        struct token_list l = {0};
        if (!text || fread(text, 1, len, stdin) != len) {
            return 1;
        }
        int rc = tokenizer_encode(t, text, len, true, INT32_MAX, &l, &e);
        put_frame(&rc, sizeof(rc));
        put_frame(l.id, (size_t)l.n * 4);
        struct buf out;
        for (int skip = 0; skip < 2; skip++) {
            buf_init(&out, 64 << 20);
            tokenizer_decode(t, l.id, l.n, skip, &out, &e);
            put_frame(out.data, out.len);
            buf_release(&out);
        }
        struct detokenizer d;
        buf_init(&out, 64 << 20);
        detokenizer_init(&d, t, false, true);
        for (int32_t i = 0; i < l.n; i++) {
            detokenizer_push(&d, l.id[i], &out);
        }
        detokenizer_finish(&d, &out);
        put_frame(out.data, out.len);
        buf_release(&out);
        token_list_release(&l);
        free(text);
        fflush(stdout);
    }
    tokenizer_free(t);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "load") == 0) {
        return load(argv[2]);
    }
    if (argc == 4 && strcmp(argv[1], "speed") == 0) {
        return speed(argv[2], argv[3]);
    }
    if (argc == 3 && strcmp(argv[1], "ids") == 0) {
        return ids_filter(argv[2]);
    }
    fprintf(stderr, "usage: tokenizer load DIR | speed DIR FILE | ids DIR\n");
    return 2;
}
