/* Blocks that are swapped out and in while steps overwrite, write and read other
 * blocks: a sequence's attention gives the same bits before and after. On a device
 * whose copies overlap with steps, this fails if a step or a copy misses a dependency.
 *
 *     build/tests/unit/kernels/test_swap [--device cpu|cuda]
 */
#include "tests/unit/ops.h"

enum {
    HEADS = 8,
    N_KV_HEADS = 4,
    DIM = 128,
    LAYERS = 8,
    BLOCK = 16,
    LEN = 256, /* tokens of a sequence */
    PER_SEQ = LEN / BLOCK,
    N_SEQS = 4,
    BLOCKS = 2 * N_SEQS * PER_SEQ,
    WIDTH = (HEADS + 2 * N_KV_HEADS) * DIM,
};

struct scene {
    struct rig r;
    struct mat qkv, noise, out;
    int32_t *zero;
};

static void open_scene(struct scene *s)
{
    struct err e = {0};
    struct kv_layout kv;

    rig_open(&s->r);
    enum dtype t = act_of(&s->r, DTYPE_BF16);
    kv_layout_init(&kv, BLOCK, LAYERS, N_KV_HEADS, DIM, t);
    assert_int_equal(s->r.b->ops->kv_create(s->r.b, &kv, BLOCKS, N_SEQS * PER_SEQ, &e), 0);
    float *v = rig_floats(&s->r, (int64_t)LEN * WIDTH, 1, t),
          *w = rig_floats(&s->r, (int64_t)LEN * WIDTH, 1, t);
    s->qkv = rig_mat(&s->r, LEN, WIDTH, t, v);
    s->noise = rig_mat(&s->r, LEN, WIDTH, t, w);
    s->out = rig_mat(&s->r, N_SEQS, HEADS * DIM, t, NULL);
    s->zero = rig_alloc(RIG_TOKENS * sizeof(*s->zero));
    free(v);
    free(w);
}

static void close_scene(struct scene *s)
{
    rig_close(&s->r);
    free(s->zero);
}

/* A step that copies blocks, and writes `rows` into the blocks [first, first + PER_SEQ)
 * unless first < 0. */
static void write_step(struct scene *s, int32_t first, struct mat rows,
                       const struct block_copy *out, int32_t n_out, const struct block_copy *in,
                       int32_t n_in)
{
    struct err e = {0};
    struct rope rope = {.rot_dim = 0};
    int32_t slot[LEN], q_start[2] = {0, LEN}, len = LEN, row = 0;

    for (int32_t i = 0; i < LEN; i++) {
        slot[i] = first * BLOCK + i;
    }
    struct batch b = {
        .swap_out = out, .n_swap_out = n_out, .swap_in = in, .n_swap_in = n_in, .q_start = s->zero};
    if (first >= 0) {
        b.n_tokens = LEN;
        b.token = b.position = s->zero;
        b.slot = slot;
        b.n_seqs = 1;
        b.q_start = q_start;
        b.kv_len = &len;
        b.row = &row;
        b.lcp_blocks = s->zero;
    }
    rig_begin(&s->r, &b);
    for (int32_t i = 0; i < LAYERS && first >= 0; i++) {
        struct attention a = {
            .layer = i, .n_heads = HEADS, .n_kv_heads = N_KV_HEADS, .head_dim = DIM};
        s->r.b->ops->rope_kv(s->r.b, rows, &rope, &a);
    }
    assert_int_equal(s->r.b->ops->step_end(s->r.b, &e), 0);
}

static void wait_steps(struct scene *s, int32_t n)
{
    struct err e = {0};
    struct results res;

    for (int32_t i = 0; i < n; i++) {
        assert_int_equal(s->r.b->ops->step_wait(s->r.b, &res, &e), 0);
    }
}

/* Attention of one query over each run of blocks, in the last layer. */
static float *look(struct scene *s, const int32_t *first)
{
    struct table_update update[N_SEQS];
    int32_t block[N_SEQS * PER_SEQ], q_start[N_SEQS + 1], len[N_SEQS], row[N_SEQS], slot[N_SEQS];

    for (int32_t i = 0; i < N_SEQS; i++) {
        update[i] = (struct table_update){.row = i, .count = PER_SEQ, .first = i * PER_SEQ};
        q_start[i] = row[i] = i;
        len[i] = LEN;
        slot[i] = -1;
        for (int32_t k = 0; k < PER_SEQ; k++) {
            block[i * PER_SEQ + k] = first[i] + k;
        }
    }
    q_start[N_SEQS] = N_SEQS;
    struct batch b = {.n_tokens = N_SEQS,
                      .token = s->zero,
                      .position = s->zero,
                      .slot = slot,
                      .n_seqs = N_SEQS,
                      .n_decode = N_SEQS,
                      .q_start = q_start,
                      .kv_len = len,
                      .row = row,
                      .lcp_blocks = s->zero,
                      .table_update = update,
                      .n_table_update = N_SEQS,
                      .table_block = block,
                      .n_table_block = N_SEQS * PER_SEQ};
    struct attention a = {.layer = LAYERS - 1,
                          .n_heads = HEADS,
                          .n_kv_heads = N_KV_HEADS,
                          .head_dim = DIM,
                          .scale = 0.0883883f};
    rig_begin(&s->r, &b);
    s->r.b->ops->attention(s->r.b, s->out, mat_rows(s->qkv, 0, N_SEQS), &a);
    rig_end(&s->r);
    return rig_download(&s->r, s->out);
}

static void moves(struct block_copy *copy, int32_t src, int32_t dst)
{
    for (int32_t i = 0; i < PER_SEQ; i++) {
        copy[i] = (struct block_copy){.src = src + i, .dst = dst + i};
    }
}

/* Sequence i has the blocks from i * PER_SEQ on, is swapped out, and comes back to
 * blocks N_SEQS * PER_SEQ further on. */
static void what_leaves_comes_back(void **state)
{
    (void)state;
    struct scene s;
    struct block_copy out[PER_SEQ], in[PER_SEQ];
    const int32_t half = N_SEQS * PER_SEQ;
    open_scene(&s);
    for (int round = 0; round < 6; round++) {
        int32_t here[N_SEQS], there[N_SEQS];
        for (int32_t i = 0; i < N_SEQS; i++) {
            here[i] = i * PER_SEQ;
            there[i] = half + i * PER_SEQ;
            write_step(&s, here[i], i % 2 == 0 ? s.qkv : s.noise, NULL, 0, NULL, 0);
            wait_steps(&s, 1);
        }
        float *before = look(&s, here);
        for (int32_t i = 0; i < N_SEQS; i++) {
            /* Swapped out while the step in flight writes it; then overwritten by the
             * step that swaps it out, or by the next. */
            bool at_once = (round + i) % 2 == 0;
            moves(out, here[i], i * PER_SEQ);
            moves(in, i * PER_SEQ, there[i]);
            write_step(&s, there[i], s.noise, NULL, 0, NULL, 0);
            write_step(&s, here[i], i % 2 == 0 ? s.qkv : s.noise, NULL, 0, NULL, 0);
            wait_steps(&s, 1);
            write_step(&s, at_once ? here[i] : -1, i % 2 == 0 ? s.noise : s.qkv, out, PER_SEQ, NULL,
                       0);
            wait_steps(&s, 1);
            if (!at_once) {
                write_step(&s, here[i], i % 2 == 0 ? s.noise : s.qkv, NULL, 0, NULL, 0);
                wait_steps(&s, 1);
            }
            /* Back into blocks that a step in flight still writes. */
            write_step(&s, there[i], s.noise, NULL, 0, NULL, 0);
            wait_steps(&s, 1);
            write_step(&s, -1, s.noise, NULL, 0, in, PER_SEQ);
            wait_steps(&s, 2);
        }
        float *after = look(&s, there);
        assert_memory_equal(before, after, (size_t)N_SEQS * HEADS * DIM * sizeof(*before));
        free(before);
        free(after);
    }
    close_scene(&s);
}

int main(int argc, char **argv)
{
    for (int i = 1; i + 1 < argc; i++) {
        if (strcmp(argv[i], "--device") == 0) {
            rig_device = argv[i + 1];
        }
    }
    const struct CMUnitTest tests[] = {cmocka_unit_test(what_leaves_comes_back)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
