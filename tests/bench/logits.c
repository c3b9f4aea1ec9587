/* The logits of a model for given tokens, on the CPU, without a server.
 *
 *     build/tests/bench/logits MODEL OUT [--quantization WAY] < TOKENS > LOG
 *
 * TOKENS: windows, each an int32 count (1 to 512) and as many int32 ids. OUT gets the
 * logits of every token, float32 [tokens, vocab]. WAY as in the setting of that name.
 * The standard error output has the line of the log that says which kernel serves which
 * format. tests/bench/quantised.py compares them with those of the decoded weights.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "models/quantise/scorer.h"

static const struct way {
    const char *name;
    enum weight_format_id format;
    int32_t group;
    bool zeros;
} WAYS[] = {{"fp8", FORMAT_FP8, 0, false},
            {"int8", FORMAT_INT8, 0, false},
            {"int8-g128", FORMAT_INT8, 128, false},
            {"int8-asymmetric", FORMAT_INT8, 0, true},
            {"int8-g128-asymmetric", FORMAT_INT8, 128, true},
            {"int4", FORMAT_INT4, 128, true},
            {"mxfp4", FORMAT_FP4, 32, false}};

static void check(int rc, const struct err *e)
{
    if (rc < 0) {
        fprintf(stderr, "logits: %s\n", e->text);
        exit(1);
    }
}

struct output {
    FILE *file;
    int32_t vocab;
};

static int write_rows(void *ctx, int32_t first, int32_t rows, const float *logits, struct err *e)
{
    const struct output *o = ctx;
    size_t n = (size_t)rows * (size_t)o->vocab;

    (void)first;
    return fwrite(logits, sizeof(*logits), n, o->file) == n ? 0 : err_set(e, ERR_IO, "no room");
}

static const struct way *way_named(const char *name)
{
    for (size_t i = 0; i < ARRAY_LEN(WAYS); i++) {
        if (strcmp(name, WAYS[i].name) == 0) {
            return &WAYS[i];
        }
    }
    fprintf(stderr, "logits: quantization %s is not known\n", name);
    exit(2);
}

int main(int argc, char **argv)
{
    struct model_options how = {0};
    struct scorer s;
    struct err e = {0};
    int32_t n, token[SCORER_WINDOW];

    if (argc != 3 && (argc != 5 || strcmp(argv[3], "--quantization") != 0)) {
        fprintf(stderr, "usage: logits MODEL OUT [--quantization WAY] < TOKENS\n");
        return 2;
    }
    if (argc == 5) {
        const struct way *way = way_named(argv[4]);
        how.quantise = weight_format_of(way->format);
        how.quantise_group = way->group;
        how.quantise_zeros = way->zeros;
    }
    check(scorer_init(&s, argv[1], &how, 0, &e), &e);
    model_log_formats(s.model);
    struct output o = {.file = fopen(argv[2], "wbe"), .vocab = s.config.vocab};
    if (!o.file) {
        perror(argv[2]);
        return 1;
    }
    while (fread(&n, sizeof(n), 1, stdin) == 1) {
        if (n < 1 || n > SCORER_WINDOW ||
            fread(token, sizeof(*token), (size_t)n, stdin) != (size_t)n) {
            fprintf(stderr, "logits: a window of 1 to %d tokens is needed\n", SCORER_WINDOW);
            return 1;
        }
        check(scorer_window(&s, token, n, write_rows, &o, &e), &e);
    }
    scorer_release(&s);
    return fclose(o.file) == 0 ? 0 : 1;
}
