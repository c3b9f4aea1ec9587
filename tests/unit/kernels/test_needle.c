/* One key that matters among 128k that do not: sums over so many keys must lose no
 * digits to a cache of 8 bits. The error against float64 over the stored values may be
 * twice that of a bfloat16 cache, for a decoded token and for a chunk of a prompt.
 *
 *     build/tests/unit/kernels/test_needle [--device cpu|cuda]
 */
#include "tests/unit/ops.h"

enum {
    KEYS = 131072,
    BLOCK = 1024,
    BLOCKS = KEYS / BLOCK,
    NEEDLE = 48611,
    DIM = 128,
    HEADS = 2,
    WIDTH = (HEADS + 2) * DIM,
    CHUNK = 16
};

struct hay {
    struct rig r;
    enum dtype at, cache;
    struct attention att;
    struct mat qkv, out; /* of RIG_TOKENS rows */
    float query[DIM];
};

/* Uniform in [-1, 1), by place. */
static float noise(int32_t token, int32_t i)
{
    struct rig r = {.rng = (uint64_t)token * WIDTH + (uint64_t)i};

    return rig_uniform(&r);
}

/* A token's row of q, k and v, as activations hold it. */
static void make_row(const struct hay *h, int32_t token, float *row)
{
    for (int32_t i = 0; i < DIM; i++) {
        row[i] = h->query[i];
        row[DIM + i] = 0.9f * h->query[i];
        row[2 * DIM + i] = token == NEEDLE ? 3 * h->query[i] : noise(token, i);
        row[3 * DIM + i] = noise(token, DIM + i);
    }
    for (int32_t i = 0; i < WIDTH; i++) {
        row[i] = round_to(h->at, row[i]);
    }
}

static void hay_open(struct hay *h, enum dtype cache)
{
    struct err e = {0};
    struct kv_layout l;

    *h = (struct hay){.cache = cache};
    rig_open(&h->r);
    h->at = act_of(&h->r, DTYPE_BF16);
    h->att = (struct attention){.n_heads = HEADS,
                                .n_kv_heads = 1,
                                .head_dim = DIM,
                                .scale = 1 / sqrtf(DIM),
                                .k_scale = cache == DTYPE_F8 ? 0.0625f : 0,
                                .v_scale = cache == DTYPE_F8 ? 0.125f : 0};
    for (int32_t i = 0; i < DIM; i++) {
        h->query[i] = round_to(DTYPE_BF16, noise(-1, i));
    }
    kv_layout_init(&l, BLOCK, 1, 1, DIM, cache);
    assert_int_equal(h->r.b->ops->kv_create(h->r.b, &l, BLOCKS, 0, &e), 0);
    h->qkv = rig_mat(&h->r, RIG_TOKENS, WIDTH, h->at, NULL);
    h->out = rig_mat(&h->r, RIG_TOKENS, HEADS * DIM, h->at, NULL);
}

/* Computes tokens [first, first + n); ret [n, HEADS * DIM]: what they attend to, or
 * NULL. */
static void hay_step(struct hay *h, int32_t first, int32_t n, float *ret)
{
    static int32_t zero[RIG_TOKENS], none[RIG_TOKENS], place[RIG_TOKENS], block[BLOCKS];
    struct rope plain = {0};
    int32_t q_start[2] = {0, n}, len = first + n;
    struct table_update update = {.count = BLOCKS};
    struct batch b = {.n_tokens = n,
                      .token = zero,
                      .token_src = none,
                      .position = place,
                      .slot = place, /* block i is the sequence's i-th */
                      .n_seqs = 1,
                      .n_decode = n == 1,
                      .q_start = q_start,
                      .kv_len = &len,
                      .row = zero,
                      .lcp_blocks = zero,
                      .table_update = &update,
                      .table_block = block,
                      .n_table_update = first == 0,
                      .n_table_block = first == 0 ? BLOCKS : 0};
    float *x = rig_alloc((size_t)n * WIDTH * sizeof(*x));

    for (int32_t i = 0; i < BLOCKS; i++) {
        block[i] = i;
    }
    for (int32_t i = 0; i < n; i++) {
        none[i] = -1;
        place[i] = first + i;
        make_row(h, first + i, x + (int64_t)i * WIDTH);
    }
    struct mat qkv = mat_rows(h->qkv, 0, n), out = mat_rows(h->out, 0, n);
    rig_upload(&h->r, qkv, x);
    rig_begin(&h->r, &b);
    h->r.b->ops->rope_kv(h->r.b, qkv, &plain, &h->att);
    if (ret) {
        h->r.b->ops->attention(h->r.b, out, qkv, &h->att);
        float *got = rig_download(&h->r, out);
        memcpy(ret, got, (size_t)n * HEADS * DIM * sizeof(*ret));
        free(got);
    }
    rig_end(&h->r);
    free(x);
}

/* The same in float64 over what is stored, for tokens from `first` to the last one. A
 * head's query is the same for all tokens, and so are the sums over keys before
 * them. */
static void reference(const struct hay *h, int32_t first, double *ret)
{
    double sum[CHUNK * HEADS] = {0}, query[HEADS][DIM];
    float row[WIDTH], k[DIM], v[DIM];

    memset(ret, 0, CHUNK * HEADS * DIM * sizeof(*ret));
    for (int32_t j = 0; j < KEYS; j++) {
        for (int32_t t = first + 1; t < KEYS && j == first; t++) {
            memcpy(ret + (t - first) * HEADS * DIM, ret, HEADS * DIM * sizeof(*ret));
            memcpy(sum + (t - first) * HEADS, sum, HEADS * sizeof(*sum));
        }
        make_row(h, j, row);
        rig_cached_head(row + 2 * DIM, DIM, h->cache, attention_k_scale(&h->att), k);
        rig_cached_head(row + 3 * DIM, DIM, h->cache, attention_v_scale(&h->att), v);
        for (int32_t head = 0; head < HEADS; head++) {
            double dot = 0;
            for (int32_t i = 0; i < DIM; i++) {
                query[head][i] = row[head * DIM + i];
                dot += query[head][i] * k[i];
            }
            double p = exp(dot * (double)h->att.scale);
            for (int32_t t = MAX(first, j); t < (j < first ? first + 1 : KEYS); t++) {
                int32_t at = (t - first) * HEADS + head;
                sum[at] += p;
                add_scaled(ret + at * DIM, p, v, DIM);
            }
        }
    }
    for (int32_t i = 0; i < (KEYS - first) * HEADS * DIM; i++) {
        ret[i] /= sum[i / DIM];
    }
}

/* Errors of the last tokens as a chunk, and of the last one decoded. */
static void errors_of(enum dtype cache, double ret[2])
{
    struct hay h;
    float got[CHUNK * HEADS * DIM], last[HEADS * DIM];
    double *ref = rig_alloc(CHUNK * HEADS * DIM * sizeof(*ref));
    const int32_t first = KEYS - CHUNK;

    hay_open(&h, cache);
    for (int32_t at = 0; at < first; at += RIG_TOKENS) {
        hay_step(&h, at, MIN(RIG_TOKENS, first - at), NULL);
    }
    hay_step(&h, first, CHUNK, got);
    hay_step(&h, KEYS - 1, 1, last);
    reference(&h, first, ref);
    ret[0] = sqrt(nmse(got, ref, CHUNK * HEADS * DIM));
    ret[1] = sqrt(nmse(last, ref + (int64_t)(CHUNK - 1) * HEADS * DIM, HEADS * DIM));
    print_message("%s: chunk %.3g, decode %.3g\n", dtype_name(cache), ret[0], ret[1]);
    free(ref);
    rig_close(&h.r);
}

static void a_needle_among_128k_keys_keeps_its_digits(void **state)
{
    (void)state;
    double wide[2], narrow[2];
    static const enum dtype types[] = {DTYPE_F8, DTYPE_I8};

    errors_of(DTYPE_BF16, wide);
    assert_true(wide[0] < 0.01 && wide[1] < 0.01);
    for (size_t i = 0; i < ARRAY_LEN(types); i++) {
        if (!whole_takes(i, ARRAY_LEN(types))) {
            continue;
        }
        errors_of(types[i], narrow);
        assert_true(narrow[0] <= 2 * wide[0] + 1e-6);
        assert_true(narrow[1] <= 2 * wide[1] + 1e-6);
    }
}

static int group(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_needle_among_128k_keys_keeps_its_digits),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

int main(int argc, char **argv)
{
    return rig_main(argc, argv, group);
}
