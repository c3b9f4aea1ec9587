/* The cost of paging in attention and of swapping, by block size: the device side of
 * figures 18 and 19 of the PagedAttention paper.
 *
 *     build/tests/bench/paging [--device cuda] [BLOCK SIZE ...]      8 to 256 where
 *                                                                    none is named
 *
 * Shape: Llama-3.1-8B (32 layers, 32/8 heads of 128, bf16: 128 KiB per token). One line
 * of JSON per block size: one layer's decode attention for 8 and 32 sequences over
 * shuffled blocks, and over contiguous ones (as a cache without pages would have them);
 * and the time per token of swapping 256 tokens out and in.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/backend.h"

enum {
    LAYERS = 32,
    HEADS = 32,
    KV_HEADS = 8,
    DIM = 128,
    MAX_SEQS = 32,
    POOL_TOKENS = 65536,
    /* as many as a recomputed prompt has, and no more than are pinned at start */
    SWAP_TOKENS = 256,
    HOST_TOKENS = SWAP_TOKENS,
    FILL_TOKENS = 8192,
    REPEATS = 9,
    SWAP_REPEATS = 6, /* the best one counts */
    CALLS = 32,
};

struct bench {
    struct backend *b;
    struct mat qkv, out;
    uint64_t step;
    int32_t block_size, n_blocks;
    int32_t *shuffled, *in_order; /* [n_blocks] */
    int32_t *zero, *none;         /* [FILL_TOKENS] 0, -1 */
};

static void check(int rc, const struct err *e)
{
    if (rc < 0) {
        fprintf(stderr, "paging: %s\n", e->text);
        exit(1);
    }
}

static int32_t *ints(int32_t n, int32_t value)
{
    int32_t *p = malloc((size_t)n * sizeof(*p));

    if (!p) {
        exit(1);
    }
    for (int32_t i = 0; i < n; i++) {
        p[i] = value;
    }
    return p;
}

static void shuffle(int32_t *id, int32_t n)
{
    uint64_t rng = 1;

    for (int32_t i = 0; i < n; i++) {
        id[i] = i;
    }
    for (int32_t i = n - 1; i > 0; i--) {
        rng = rng * 6364136223846793005ull + 1442695040888963407ull;
        int32_t j = (int32_t)((rng >> 33) % (uint64_t)(i + 1)), t = id[i];
        id[i] = id[j];
        id[j] = t;
    }
}

static void begin(struct bench *p, struct batch *a)
{
    struct err e;

    a->step = ++p->step;
    check(p->b->ops->step_begin(p->b, a, &e), &e);
}

static void end(struct bench *p)
{
    struct err e;

    check(p->b->ops->step_end(p->b, &e), &e);
}

static int64_t wait_us(struct bench *p)
{
    struct err e;
    struct results r;

    check(p->b->ops->step_wait(p->b, &r, &e), &e);
    return r.device_us;
}

/* Write noise into every slot. */
static void fill_cache(struct bench *p)
{
    struct rope rope = {.rot_dim = 0};
    int32_t *slot = ints(FILL_TOKENS, 0), q_start[2] = {0, FILL_TOKENS}, len = FILL_TOKENS, row = 0,
            lcp = 0;

    for (int32_t first = 0; first < p->n_blocks * p->block_size; first += FILL_TOKENS) {
        for (int32_t i = 0; i < FILL_TOKENS; i++) {
            slot[i] = first + i;
        }
        struct batch a = {.n_tokens = FILL_TOKENS,
                          .token = p->zero,
                          .position = p->zero,
                          .slot = slot,
                          .n_seqs = 1,
                          .q_start = q_start,
                          .kv_len = &len,
                          .row = &row,
                          .lcp_blocks = &lcp};
        begin(p, &a);
        for (int32_t i = 0; i < LAYERS; i++) {
            struct attention at = {
                .layer = i, .n_heads = HEADS, .n_kv_heads = KV_HEADS, .head_dim = DIM};
            p->b->ops->rope_kv(p->b, p->qkv, &rope, &at);
        }
        end(p);
        wait_us(p);
    }
    free(slot);
}

static int by_time(const void *x, const void *y)
{
    int64_t a = *(const int64_t *)x, c = *(const int64_t *)y;

    return (a > c) - (a < c);
}

/* Microseconds of one layer's decode attention, with the layers in turn so that caches
 * do not help. */
static double attention_us(struct bench *p, int32_t n_seqs, int32_t context, const int32_t *block)
{
    struct table_update update[MAX_SEQS];
    int32_t len[MAX_SEQS], row[MAX_SEQS], q_start[MAX_SEQS + 1],
        per = (int32_t)div_ceil(context, p->block_size);
    int64_t us[REPEATS];

    for (int32_t i = 0; i < n_seqs; i++) {
        update[i] = (struct table_update){.row = i, .count = per, .first = i * per};
        len[i] = context;
        row[i] = q_start[i] = i;
    }
    q_start[n_seqs] = n_seqs;
    struct batch a = {.n_tokens = n_seqs,
                      .token = p->zero,
                      .position = p->zero,
                      .slot = p->none,
                      .n_seqs = n_seqs,
                      .n_decode = n_seqs,
                      .q_start = q_start,
                      .kv_len = len,
                      .row = row,
                      .lcp_blocks = p->zero,
                      .table_update = update,
                      .n_table_update = n_seqs,
                      .table_block = block,
                      .n_table_block = n_seqs * per};
    for (int k = -2; k < REPEATS; k++) {
        begin(p, &a);
        for (int32_t i = 0; i < CALLS; i++) {
            struct attention at = {.layer = i % LAYERS,
                                   .n_heads = HEADS,
                                   .n_kv_heads = KV_HEADS,
                                   .head_dim = DIM,
                                   .scale = 0.0883883f};
            p->b->ops->attention(p->b, p->out, p->qkv, &at);
        }
        end(p);
        int64_t t = wait_us(p);
        if (k >= 0) {
            us[k] = t;
        }
    }
    qsort(us, REPEATS, sizeof(us[0]), by_time);
    return (double)us[REPEATS / 2] / CALLS;
}

/* The best time for the blocks of SWAP_TOKENS tokens, shuffled on the device. A step
 * waits for blocks that are swapped in, so the end of swapping out is seen by swapping
 * one block in afterwards; that block's time is included. */
static double swap_us(struct bench *p, bool out)
{
    int32_t n = SWAP_TOKENS / p->block_size;
    struct block_copy *copy = malloc((size_t)n * sizeof(*copy));
    double best = 1e30;

    for (int32_t i = 0; copy != NULL && i < n; i++) {
        copy[i] = out ? (struct block_copy){.src = p->shuffled[i], .dst = i}
                      : (struct block_copy){.src = i, .dst = p->shuffled[i]};
    }
    for (int k = 0; copy != NULL && k < SWAP_REPEATS; k++) {
        struct block_copy last = {.src = 0, .dst = p->shuffled[n]};
        struct batch a = {.swap_out = copy, .n_swap_out = n, .q_start = p->zero};
        struct batch back = {
            .swap_in = out ? &last : copy, .n_swap_in = out ? 1 : n, .q_start = p->zero};
        int64_t begun = clock_us();
        for (int pass = out ? 0 : 1; pass < 2; pass++) {
            begin(p, pass == 0 ? &a : &back);
            end(p);
        }
        for (int pass = out ? 0 : 1; pass < 2; pass++) {
            wait_us(p);
        }
        double us = (double)(clock_us() - begun);
        best = us < best ? us : best;
    }
    free(copy);
    return best;
}

static void open_bench(struct bench *p, const char *device, int32_t block_size)
{
    struct err e;
    struct kv_layout l;
    struct backend_config c = {.max_tokens = FILL_TOKENS,
                               .max_seqs = MAX_SEQS,
                               .max_samples = MAX_SEQS,
                               .max_blocks_per_seq = POOL_TOKENS / block_size};
    struct weight_desc d = {.name = "bench",
                            .kind = WEIGHT_LINEAR,
                            .dtype = DTYPE_BF16,
                            .rows = FILL_TOKENS,
                            .cols = (HEADS + 2 * KV_HEADS) * DIM};

    *p = (struct bench){.block_size = block_size, .n_blocks = POOL_TOKENS / block_size};
    check(backend_open(&p->b, device, &c, &e), &e);
    check(p->b->ops->weight(p->b, &d, &p->qkv, &e), &e); /* noise */
    check(p->b->ops->scratch(p->b, FILL_TOKENS, HEADS * DIM, DTYPE_BF16, &p->out, &e), &e);
    kv_layout_init(&l, block_size, LAYERS, KV_HEADS, DIM, backend_act_dtype(p->b, DTYPE_BF16));
    check(p->b->ops->kv_create(p->b, &l, p->n_blocks, HOST_TOKENS / block_size, &e), &e);
    p->shuffled = ints(p->n_blocks, 0);
    p->in_order = ints(p->n_blocks, 0);
    p->zero = ints(FILL_TOKENS, 0);
    p->none = ints(FILL_TOKENS, -1);
    shuffle(p->shuffled, p->n_blocks);
    for (int32_t i = 0; i < p->n_blocks; i++) {
        p->in_order[i] = i;
    }
}

static void close_bench(struct bench *p)
{
    p->b->ops->free(p->b);
    free(p->shuffled);
    free(p->in_order);
    free(p->zero);
    free(p->none);
}

static void measure(const char *device, int32_t block_size)
{
    static const int32_t contexts[] = {64, 128, 256, 512, 1024, 2048};
    struct bench p;

    open_bench(&p, device, block_size);
    fill_cache(&p);
    printf("{\"device\": \"%s\", \"block_size\": %d, \"attention_us\": {", p.b->device, block_size);
    for (int32_t n = 8; n <= MAX_SEQS; n *= 4) {
        printf("%s\"%d\": {", n > 8 ? ", " : "", n);
        for (size_t i = 0; i < ARRAY_LEN(contexts); i++) {
            printf("%s\"%d\": [%.2f, %.2f]", i > 0 ? ", " : "", contexts[i],
                   attention_us(&p, n, contexts[i], p.shuffled),
                   attention_us(&p, n, contexts[i], p.in_order));
        }
        printf("}");
    }
    double in = swap_us(&p, false), gb = 4e-3 * LAYERS * KV_HEADS * DIM * SWAP_TOKENS;
    /* without the block that is swapped in afterwards */
    double out = swap_us(&p, true) - in * block_size / SWAP_TOKENS;
    printf("}, \"swap_out_us\": %.4f, \"swap_in_us\": %.4f, \"swap_out_gb_s\": %.1f, "
           "\"swap_in_gb_s\": %.1f}\n",
           out / SWAP_TOKENS, in / SWAP_TOKENS, gb / out, gb / in);
    close_bench(&p);
}

int main(int argc, char **argv)
{
    const char *device = "cuda";
    bool named = false;

    setvbuf(stdout, NULL, _IOLBF, 0);
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--device") == 0 && i + 1 < argc) {
            device = argv[++i];
            continue;
        }
        int size = atoi(argv[i]);
        if (size < 1 || size > 1024 || POOL_TOKENS % size != 0) {
            fprintf(stderr, "paging: %s is no block size\n", argv[i]);
            return 2;
        }
        named = true;
        measure(device, size);
    }
    for (int32_t size = 8; !named && size <= 256; size *= 2) {
        measure(device, size);
    }
    return 0;
}
