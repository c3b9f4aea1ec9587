/* The table of bench's flags, parsed and printed. */
#include "server/bench/bench.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum kind { KIND_INT, KIND_REAL, KIND_TEXT, KIND_FLAG };

struct option {
    const char *flag;
    enum kind kind;
    size_t at;          /* offset in struct bench_options */
    double least, most; /* bounds of numbers */
    const char *help;
};

#define AT(field) offsetof(struct bench_options, field)

static const struct option options[] = {
    {"--requests", KIND_INT, AT(requests), 1, 1e7,
     "number of requests (all of the workload; else 64 offline, 4 x concurrency with serve)"},
    {"--input-len", KIND_INT, AT(input_len), 1, 1 << 20, "prompt tokens per request (512)"},
    {"--output-len", KIND_INT, AT(output_len), 1, 1 << 20, "tokens to generate per request (128)"},
    {"--workload", KIND_TEXT, AT(workload), 0, 0,
     "file with one line \"PROMPT OUTPUT\" of lengths per request (scripts/make-workload)"},
    {"--script", KIND_TEXT, AT(script), 0, 0,
     "offline: file with one line \"ID ID … | ID ID …\" of a prompt and its answer per request, "
     "which "
     "the model is made to give (tests/bench/edits)"},
    {"--vocab", KIND_INT, AT(vocab), 2, 1 << 22,
     "prompts are random token ids below this (the model's; serve: 256)"},
    {"--bench-seed", KIND_INT, AT(seed), 0, 9e15,
     "seed of prompts and arrival times (offline: 0; serve: a new one for each run, so that no "
     "prompt is cached)"},
    {"--temperature", KIND_REAL, AT(temperature), 0, 2, "sampling temperature (0: greedy)"},
    {"--top-p", KIND_REAL, AT(top_p), 1e-9, 1,
     "keep the likeliest tokens whose probabilities sum to this (1)"},
    {"--top-k", KIND_INT, AT(top_k), 0, 1 << 22, "keep the k likeliest tokens (0: all)"},
    {"--n", KIND_INT, AT(n), 1, 128, "samples per prompt (1)"},
    {"--beam-width", KIND_INT, AT(beam_width), 0, 128, "width of a beam search (0: off)"},
    {"--stop-at-eos", KIND_FLAG, AT(stop_at_eos), 0, 0,
     "end outputs at the model's end token (else all have their full length)"},
    {"--url", KIND_TEXT, AT(url), 0, 0, "serve: http://HOST:PORT (http://127.0.0.1:8000)"},
    {"--api-key", KIND_TEXT, AT(api_key), 0, 0, "serve: sent as a bearer token"},
    {"--served-model", KIND_TEXT, AT(model), 0, 0,
     "serve: the field \"model\" of the requests (not sent)"},
    {"--concurrency", KIND_INT, AT(concurrency), 1, 65536,
     "serve: concurrent streams (64); with --request-rate the maximum"},
    {"--request-rate", KIND_REAL, AT(request_rate), 0, 1e6,
     "serve: requests per second, Poisson arrivals (0: a closed loop)"},
    {"--acceptance", KIND_REAL, AT(acceptance), 0, 1,
     "offline, with drafts: run twice, the second time with drafts of which each "
     "token holds with this chance"},
    {"--schemas", KIND_TEXT, AT(schemas), 0, 0,
     "offline: file with a JSON Schema a line; the requests run free, then each under one of them"},
    {"--warmup", KIND_INT, AT(warmup), 0, 1 << 20,
     "offline: before measuring, generate this many tokens per request (8)"},
    {"--settle", KIND_INT, AT(settle), 0, 3600,
     "offline: seconds to wait before that; on a CPU, weights move into large pages meanwhile (0)"},
    {"--json", KIND_TEXT, AT(json), 0, 0,
     "append the figures to this file, one JSON object per line (-: standard output)"},
    {"--name", KIND_TEXT, AT(name), 0, 0, "name of the run in the JSON"},
};

static const struct option *find(const char *arg, size_t len)
{
    for (size_t i = 0; i < ARRAY_LEN(options); i++) {
        if (strlen(options[i].flag) == len && memcmp(options[i].flag, arg, len) == 0) {
            return &options[i];
        }
    }
    return NULL;
}

static int set_number(struct bench_options *o, const struct option *k, const char *text,
                      struct err *e)
{
    char *end;

    errno = 0;
    double v = strtod(text, &end);
    if (*text == '\0' || *end != '\0' || errno || !(v >= k->least && v <= k->most) ||
        (k->kind == KIND_INT && v != (double)(int64_t)v)) {
        return err_set(e, ERR_INVALID, "%s %s: must be %s from %g to %g", k->flag, text,
                       k->kind == KIND_INT ? "a whole number" : "a number", k->least, k->most);
    }
    if (k->kind == KIND_INT) {
        *(int64_t *)((char *)o + k->at) = (int64_t)v;
    } else {
        *(double *)((char *)o + k->at) = v;
    }
    return 0;
}

static int set(struct bench_options *o, const struct option *k, char *value, struct err *e)
{
    switch (k->kind) {
    case KIND_FLAG:
        *(bool *)((char *)o + k->at) = true;
        return 0;
    case KIND_TEXT:
        *(char **)((char *)o + k->at) = value;
        return 0;
    default:
        return set_number(o, k, value, e);
    }
}

int bench_options_read(struct bench_options *ret, int argc, char **argv, int *ret_argc,
                       struct err *e)
{
    struct bench_options o = {.input_len = 512,
                              .output_len = 128,
                              .top_p = 1,
                              .n = 1,
                              .seed = -1,
                              .concurrency = 64,
                              .acceptance = -1,
                              .warmup = 8};
    int left = 0;

    for (int i = 0; i < argc; i++) {
        char *equals = strchr(argv[i], '=');
        size_t len = equals ? (size_t)(equals - argv[i]) : strlen(argv[i]);
        const struct option *k = find(argv[i], len);
        if (!k) {
            argv[left++] = argv[i];
            continue;
        }
        char *value = equals ? equals + 1 : NULL;
        if (k->kind != KIND_FLAG && !value) {
            if (i + 1 == argc) {
                return err_set(e, ERR_INVALID, "%s needs a value", k->flag);
            }
            value = argv[++i];
        }
        int rc = set(&o, k, value, e);
        if (rc < 0) {
            return rc;
        }
    }
    *ret = o;
    *ret_argc = left;
    return 0;
}

void bench_options_help(FILE *out)
{
    fprintf(
        out,
        "usage: quire bench offline [MODEL] [flags] [settings of quire serve]\n"
        "       quire bench serve [--url http://HOST:PORT] [flags]\n"
        "       quire bench kernels [--device cuda] [linear|decode|prefill|glue|sample ...]\n\n"
        "offline runs the engine in this process, all requests at once: prefill, decode, "
        "whole-job figures.\n"
        "serve streams /v1/completions from a server: TTFT, ITL, end to end, tokens per second.\n"
        "kernels times a device's operations on the shapes of an 8B model and compares them with "
        "its\nrates of reading, copying and multiplying.\n\n");
    for (size_t i = 0; i < ARRAY_LEN(options); i++) {
        fprintf(out, "  %-16s %s\n", options[i].flag, options[i].help);
    }
}
