/* Whole steps of a model with dummy weights on a backend, without the engine: decodes
 * of a fixed batch and context, prefills, and both in one step.
 *
 *     build/tests/bench/steps [--device cuda] --model DIR
 *         [[rs]BATCHxCONTEXT ... | pTOKENSxCONTEXT ... | mBATCHxCONTEXT+TOKENS ...]
 *
 * BxC: a decode step of B sequences of C tokens, sampled greedily. sBxC: sampled at
 * temperature 0.8; rBxC: with penalties too, where half of each context is prompt.
 * pTxC: one chunk of T prompt tokens that ends at length C. mBxC+T: B decodes and T
 * tokens of prompts in one step.
 *
 * Step N + 1 is launched before step N is waited for, as the engine does. Prints the
 * mean interval of 64 steps, the device's own time, `host`, the time of handing a step
 * to the device, and tokens per second.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "models/model.h"

enum {
    MAX_TOKENS = 8192,
    MAX_SEQS = 320,
    BLOCK = 16,
    WARM = 8,
    TIMED = 64,
    BLOCKS = 32768,
    PER_SEQ = 8320
};

static struct backend *b;
static struct model *model;
static uint64_t n_steps;

static void check(int rc, const struct err *e)
{
    if (rc < 0) {
        fprintf(stderr, "steps: %s\n", e->text);
        exit(1);
    }
}

struct lists {
    int32_t token[MAX_TOKENS], src[MAX_TOKENS], position[MAX_TOKENS], slot[MAX_TOKENS];
    int32_t q_start[MAX_SEQS + 1], kv_len[MAX_SEQS], row[MAX_SEQS], lcp[MAX_SEQS], logits[MAX_SEQS];
    struct table_update update[MAX_SEQS];
    struct sample_row sample[MAX_SEQS];
};

static struct lists l;
static int32_t *block; /* shuffled ids; sequence s owns [s * own, (s + 1) * own) */

/* Set block tables for n_seqs sequences of `own` blocks each. */
static void set_tables(struct batch *a, int32_t n_seqs, int32_t own)
{
    for (int32_t s = 0; s < n_seqs; s++) {
        l.update[s] = (struct table_update){.row = s, .count = own, .first = s * own};
    }
    a->table_update = l.update;
    a->table_block = block;
    a->n_table_update = n_seqs;
    a->n_table_block = n_seqs * own;
}

static struct batch lists_batch(void)
{
    return (struct batch){.token = l.token,
                          .token_src = l.src,
                          .position = l.position,
                          .slot = l.slot,
                          .q_start = l.q_start,
                          .kv_len = l.kv_len,
                          .row = l.row,
                          .lcp_blocks = l.lcp,
                          .logits_token = l.logits,
                          .sample = l.sample};
}

static void launch(struct batch *a)
{
    struct err e;

    a->step = ++n_steps;
    check(b->ops->step_begin(b, a, &e), &e);
    if (!b->ops->replay || !b->ops->replay(b, a)) {
        model_step(model, a);
    }
    check(b->ops->step_end(b, &e), &e);
}

static int64_t wait_us(void)
{
    struct err e;
    struct results r;

    check(b->ops->step_wait(b, &r, &e), &e);
    return r.device_us;
}

/* Sampling parameters of a decode step. */
struct asked {
    float temperature;
    bool penalties;
};

static struct sample_row row_of(int32_t i, float temperature)
{
    return (struct sample_row){.logits_row = i,
                               .temperature = temperature,
                               .top_p = temperature > 0 ? 0.95f : 1,
                               .repetition_penalty = 1,
                               .n_logprobs = -1,
                               .seed = (uint64_t)i,
                               .position = i,
                               .mask_first = -1};
}

/* Write varied token ids to every slot, as a model's output would be. */
static void note_tokens(void)
{
    for (int32_t first = 0; first < BLOCKS * BLOCK; first += MAX_TOKENS) {
        struct batch a = lists_batch();
        for (int32_t t = 0; t < MAX_TOKENS; t++) {
            l.token[t] = (int32_t)((uint32_t)(first + t) * 2654435761u >> 8) % 32000;
            l.src[t] = -1;
            l.position[t] = t;
            l.slot[t] = first + t;
        }
        l.q_start[1] = l.kv_len[0] = MAX_TOKENS;
        l.row[0] = 0;
        a.n_tokens = MAX_TOKENS;
        a.n_seqs = 1;
        a.step = ++n_steps;
        struct err e;
        check(b->ops->step_begin(b, &a, &e), &e);
        check(b->ops->step_end(b, &e), &e);
        wait_us();
    }
}

static void decode(int32_t n, int32_t context, struct asked ask)
{
    int32_t own = (int32_t)div_ceil(context + WARM + TIMED, BLOCK);

    if (n > MAX_SEQS || (int64_t)n * own > BLOCKS || own > PER_SEQ) {
        printf("%d x %d does not fit\n", n, context);
        return;
    }
    int64_t begun = 0;
    int64_t device = 0;
    int64_t host = 0;
    if (ask.penalties) {
        note_tokens();
    }
    for (int32_t i = 0; i < WARM + TIMED; i++) {
        struct batch a = lists_batch();
        if (i == 0) {
            set_tables(&a, n, own);
        }
        a.n_tokens = a.n_seqs = a.n_decode = a.n_logits = a.n_samples = n;
        for (int32_t s = 0; s < n; s++) {
            int32_t at = context - WARM + i;
            l.token[s] = 7 + s;
            l.src[s] = i == 0 ? -1 : s;
            l.position[s] = at;
            l.slot[s] = block[s * own + at / BLOCK] * BLOCK + at % BLOCK;
            l.q_start[s + 1] = s + 1;
            l.kv_len[s] = at + 1;
            l.row[s] = l.logits[s] = s;
            l.sample[s] = row_of(s, ask.temperature);
            l.sample[s].row = s;
            if (ask.penalties) {
                l.sample[s].position = at + 1;
                l.sample[s].n_prompt = context / 2;
                l.sample[s].repetition_penalty = 1.1f;
                l.sample[s].frequency_penalty = 0.1f;
            }
        }
        int64_t launched = clock_us();
        launch(&a);
        host += (clock_us() - launched) * (i > WARM);
        if (i > 0) {
            device += wait_us() * (i > WARM);
        }
        begun = i == WARM ? clock_us() : begun;
    }
    double us = (double)(clock_us() - begun) / (TIMED - 1);
    wait_us();
    printf("decode %3d x %6d, temperature %.1f%s: %8.1f us a step (device %8.1f, host %6.1f), "
           "%8.1f tok/s\n",
           n, context, (double)ask.temperature, ask.penalties ? ", penalties" : "", us,
           (double)device / (TIMED - 1), (double)host / (TIMED - 1), n * 1e6 / us);
}

static void prefill(int32_t n, int32_t context)
{
    int32_t own = (int32_t)div_ceil(context, BLOCK);

    if (n > MAX_TOKENS || own > PER_SEQ || n > context) {
        printf("p%d x %d does not fit\n", n, context);
        return;
    }
    double best = INFINITY;
    for (int32_t i = 0; i < 4; i++) {
        struct batch a = lists_batch();
        set_tables(&a, 1, own);
        a.n_tokens = n;
        a.n_seqs = a.n_logits = a.n_samples = 1;
        for (int32_t t = 0; t < n; t++) {
            int32_t at = context - n + t;
            l.token[t] = (t * 7919 + i) % 32000;
            l.src[t] = -1;
            l.position[t] = at;
            l.slot[t] = block[at / BLOCK] * BLOCK + at % BLOCK;
        }
        l.q_start[1] = n;
        l.kv_len[0] = context;
        l.row[0] = 0;
        l.logits[0] = n - 1;
        l.sample[0] = row_of(0, 0);
        int64_t begun = clock_us();
        launch(&a);
        wait_us();
        best = fmin(best, (double)(clock_us() - begun));
    }
    printf("prefill %5d of %6d: %9.1f us, %8.1f tok/s\n", n, context, best, n * 1e6 / best);
}

/* Steps of n decodes at `context` with `chunk` tokens of prompts of PROMPT tokens, the
 * last one cut off. The interval between steps is the inter-token latency of the
 * decodes. */
static void mixed(int32_t n, int32_t context, int32_t chunk)
{
    enum { PROMPT = 512, REPEATS = 12 };
    int32_t own = (int32_t)div_ceil(MAX(context, PROMPT), BLOCK),
            n_prompts = (int32_t)div_ceil(chunk, PROMPT);
    int32_t n_seqs = n + n_prompts;

    if (n_seqs > MAX_SEQS || n + chunk > MAX_TOKENS || (int64_t)n_seqs * own > BLOCKS ||
        own > PER_SEQ) {
        printf("m%dx%d+%d does not fit\n", n, context, chunk);
        return;
    }
    int64_t begun = 0;
    int64_t device = 0;
    for (int32_t i = 0; i < REPEATS; i++) {
        struct batch a = lists_batch();
        set_tables(&a, n_seqs, own);
        a.n_tokens = n + chunk;
        a.n_seqs = a.n_logits = a.n_samples = n_seqs;
        a.n_decode = n;
        for (int32_t s = 0, t = 0; s < n_seqs; s++) {
            int32_t length = s < n ? context : MIN(PROMPT, n + chunk - t);
            int32_t from = s < n ? context - 1 : 0;
            l.q_start[s] = t;
            for (int32_t at = from; at < length; at++, t++) {
                l.token[t] = (t * 7919 + i) % 32000;
                l.src[t] = -1;
                l.position[t] = at;
                l.slot[t] = block[s * own + at / BLOCK] * BLOCK + at % BLOCK;
            }
            l.q_start[s + 1] = t;
            l.kv_len[s] = length;
            l.row[s] = s;
            l.logits[s] = t - 1;
            l.sample[s] = row_of(s, 0);
        }
        launch(&a);
        if (i > 0) {
            device += wait_us() * (i > 3);
        }
        begun = i == 3 ? clock_us() : begun;
    }
    double us = (double)(clock_us() - begun) / (REPEATS - 4);
    wait_us();
    printf("mixed %3d x %5d + %4d: %8.1f us a step (device %8.1f), %.2f us a token\n", n, context,
           chunk, us, (double)device / (REPEATS - 4), us / (n + chunk));
}

static void open_all(const char *device, const char *dir)
{
    struct err e;
    struct model_config c;
    struct generation_defaults gen;
    int64_t begun = clock_us();

    check(model_config_read(&c, &gen, dir, &e), &e);
    struct backend_config k = {.max_tokens = MAX_TOKENS,
                               .max_seqs = MAX_SEQS,
                               .max_samples = MAX_SEQS,
                               .max_blocks_per_seq = PER_SEQ};
    check(backend_open(&b, device, &k, &e), &e);
    int64_t opened = clock_us();
    struct model_options o = {.dtype = DTYPE_BF16,
                              .dummy = true,
                              .max_tokens = MAX_TOKENS,
                              .max_logits = MAX_SEQS,
                              .max_len = MIN(c.max_positions, PER_SEQ * BLOCK),
                              .one_kv_group = true};
    check(model_open(&model, dir, &c, &o, b, &e), &e);
    struct kv_layout kv;
    kv_layout_init(&kv, BLOCK, c.n_layers, c.n_kv_heads, c.head_dim,
                   backend_act_dtype(b, DTYPE_BF16));
    check(b->ops->kv_create(b, &kv, BLOCKS, 0, &e), &e);
    if (b->ops->ready) {
        check(b->ops->ready(b, &e), &e);
    }
    printf("%s; device open %.2f s, weights and cache %.2f s\n", b->device,
           (double)(opened - begun) * 1e-6, (double)(clock_us() - opened) * 1e-6);
    block = malloc(BLOCKS * sizeof(*block));
    uint64_t rng = 1;
    for (int32_t i = 0; block != NULL && i < BLOCKS; i++) {
        int32_t j = (int32_t)((rng = rng * 6364136223846793005ull + 1442695040888963407ull) >> 33) %
                    (i + 1);
        block[i] = block[j];
        block[j] = i;
    }
}

int main(int argc, char **argv)
{
    const char *device = "cuda";
    const char *dir = NULL;
    static const char *const usual[] = {"1x1024",  "8x1024",   "64x1024",    "256x1024",
                                        "64x4096", "s64x1024", "p8192x8192", "p2048x16384"};

    const char *const *job = usual;
    int n_jobs = ARRAY_LEN(usual);
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--device") == 0 && i + 1 < argc) {
            device = argv[++i];
        } else if (strcmp(argv[i], "--model") == 0 && i + 1 < argc) {
            dir = argv[++i];
        } else {
            job = (const char *const *)argv + i;
            n_jobs = argc - i;
            break;
        }
    }
    if (!dir) {
        fprintf(stderr, "steps: --model DIR with a config.json is needed\n");
        return 2;
    }
    open_all(device, dir);
    for (int i = 0; i < n_jobs; i++) {
        int n = 0;
        int context = 0;
        int chunk = 0;
        if (sscanf(job[i], "m%dx%d+%d", &n, &context, &chunk) == 3) {
            mixed(n, context, chunk);
        } else if (sscanf(job[i], "p%dx%d", &n, &context) == 2) {
            prefill(n, context);
        } else if (sscanf(job[i], "s%dx%d", &n, &context) == 2) {
            decode(n, context, (struct asked){.temperature = 0.8f});
        } else if (sscanf(job[i], "r%dx%d", &n, &context) == 2) {
            decode(n, context, (struct asked){.temperature = 0.8f, .penalties = true});
        } else if (sscanf(job[i], "%dx%d", &n, &context) == 2) {
            decode(n, context, (struct asked){0});
        }
    }
    b->ops->free(b);
    model_free(model);
    return 0;
}
