/* Attention of sequences in groups with a common prefix, in a pool filled with noise:
 * the results are the same whether or not the step says what they share. If it does, a
 * device may read the prefix once, in a launch of its own.
 *
 *     build/tests/unit/kernels/cuda/test_shared_prefix [--device cpu|cuda]
 */
#include "tests/unit/ops.h"

struct groups {
    const char *name;
    int32_t n_kv_heads, members, shared_blocks, block_size;
};

enum { GROUP_SEQS = RIG_SEQS, GROUP_HEADS = 32, GROUP_DIM = 128 };

static void fill_pool(struct rig *r, int32_t n_slots, const struct attention *at, struct mat qkv)
{
    static int32_t zero[RIG_TOKENS], slot[RIG_TOKENS];
    struct rope none = {0};

    for (int32_t first = 0; first < n_slots; first += RIG_TOKENS) {
        int32_t q_start[2] = {0, RIG_TOKENS}, len = RIG_TOKENS;
        for (int32_t i = 0; i < RIG_TOKENS; i++) {
            slot[i] = first + i < n_slots ? first + i : -1;
        }
        struct batch b = {.n_tokens = RIG_TOKENS,
                          .token = zero,
                          .position = zero,
                          .slot = slot,
                          .n_seqs = 1,
                          .q_start = q_start,
                          .kv_len = &len,
                          .row = zero,
                          .lcp_blocks = zero};
        rig_begin(r, &b);
        r->b->ops->rope_kv(r->b, qkv, &none, at);
        rig_end(r);
    }
}

/* The caller frees what it returns, [GROUP_SEQS, GROUP_HEADS * GROUP_DIM]. */
static float *attend_in_groups(struct rig *r, const struct groups *g, const struct attention *at,
                               struct mat qkv, bool with_lcp)
{
    static int32_t zero[GROUP_SEQS], minus[GROUP_SEQS], block[GROUP_SEQS * RIG_BLOCKS_PER_SEQ];
    struct table_update update[GROUP_SEQS];
    int32_t len[GROUP_SEQS], row[GROUP_SEQS], lcp[GROUP_SEQS],
        q_start[GROUP_SEQS + 1] = {0}, n = g->shared_blocks + 1;

    for (int32_t i = 0; i < GROUP_SEQS; i++) {
        update[i] = (struct table_update){.row = i, .count = n, .first = i * n};
        for (int32_t k = 0; k < n; k++) {
            block[i * n + k] = k + 1 < n ? i / g->members * g->shared_blocks + k
                                         : GROUP_SEQS / g->members * (n - 1) + i;
        }
        len[i] = (n - 1) * g->block_size + 1 + i % g->block_size;
        row[i] = i;
        minus[i] = -1;
        lcp[i] = with_lcp && i % g->members != 0 ? n - 1 : 0;
        q_start[i + 1] = i + 1;
    }
    struct batch b = {.n_tokens = GROUP_SEQS,
                      .token = zero,
                      .position = zero,
                      .slot = minus,
                      .n_seqs = GROUP_SEQS,
                      .n_decode = GROUP_SEQS,
                      .q_start = q_start,
                      .kv_len = len,
                      .row = row,
                      .lcp_blocks = lcp,
                      .table_update = update,
                      .n_table_update = GROUP_SEQS,
                      .table_block = block,
                      .n_table_block = GROUP_SEQS * n};
    struct mat out = rig_mat(r, GROUP_SEQS, GROUP_HEADS * GROUP_DIM, qkv.dtype, NULL);
    rig_begin(r, &b);
    r->b->ops->attention(r->b, out, mat_rows(qkv, 0, GROUP_SEQS), at);
    float *got = rig_download(r, out);
    rig_end(r);
    return got;
}

static void run_groups(const struct groups *g)
{
    struct rig r;
    struct err e = {0};
    struct kv_layout l;

    rig_open(&r);
    struct attention at = {.n_heads = GROUP_HEADS,
                           .n_kv_heads = g->n_kv_heads,
                           .head_dim = GROUP_DIM,
                           /* large, so that few tokens dominate and a missing one shows
                            * up */
                           .scale = 8 / sqrtf(GROUP_DIM)};
    int32_t n_blocks = GROUP_SEQS / g->members * g->shared_blocks + GROUP_SEQS;
    int32_t width = (GROUP_HEADS + 2 * g->n_kv_heads) * GROUP_DIM;
    enum dtype t = act_of(&r, DTYPE_BF16);
    kv_layout_init(&l, g->block_size, 1, g->n_kv_heads, GROUP_DIM, t);
    assert_int_equal(r.b->ops->kv_create(r.b, &l, n_blocks, 0, &e), 0);
    float *x = rig_floats(&r, (int64_t)RIG_TOKENS * width, 1, t);
    struct mat qkv = rig_mat(&r, RIG_TOKENS, width, t, x);
    fill_pool(&r, n_blocks * g->block_size, &at, qkv);
    float *want = attend_in_groups(&r, g, &at, qkv, false),
          *got = attend_in_groups(&r, g, &at, qkv, true);
    for (int32_t i = 0; i < GROUP_SEQS; i++) {
        double off = 0;
        double of = 0;
        for (int32_t k = i * GROUP_HEADS * GROUP_DIM; k < (i + 1) * GROUP_HEADS * GROUP_DIM; k++) {
            off += ((double)got[k] - want[k]) * ((double)got[k] - want[k]);
            of += (double)want[k] * want[k];
        }
        /* several times the error of two roundings to bfloat16 */
        if (!(of > 0 && off <= 2e-5 * of)) {
            fail_msg("%s: sequence %d is off by %g of its square", g->name, i, off / of);
        }
    }
    free(want);
    free(got);
    free(x);
    rig_close(&r);
}

/* Enough of it that a device uses a launch of its own (kernels/cuda/heuristics.c). */
static void much_that_is_shared_is_read_once(void **state)
{
    (void)state;
    static const struct groups g[] = {{"16 with 672 tokens", 32, 16, 42, 16},
                                      {"4 with 3200 tokens", 8, 4, 100, 32}};
    for (size_t i = 0; i < (rig_small() || strcmp(rig_device, "cpu") == 0 ? 1 : ARRAY_LEN(g));
         i++) {
        run_groups(&g[i]);
    }
}

static int group(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(much_that_is_shared_is_read_once),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

int main(int argc, char **argv)
{
    return rig_main(argc, argv, group);
}
