/* The slices of weights that tensor-parallel ranks hold: goldens divided among 2 and 4
 * ranks, with a backend that only keeps weights. */
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "models/families/layers.h"

enum { MAX_KEPT = 256 };

/* A backend whose weights are plain float32 matrices. */
struct keeper {
    struct backend base;
    float *kept[MAX_KEPT];
    int n_kept;
};

static float value_of(const struct weight_piece *p, int64_t at)
{
    if (p->dtype == DTYPE_F32) {
        return ((const float *)p->data)[at];
    }
    /* the goldens used here are float32 or bfloat16 */
    uint32_t bits = (uint32_t)((const uint16_t *)p->data)[at] << 16;
    float f;
    memcpy(&f, &bits, sizeof(f));
    return f;
}

static int keep_weight(struct backend *b, const struct weight_desc *d, struct mat *ret,
                       struct err *e)
{
    struct keeper *k = (struct keeper *)b;
    float *out = calloc((size_t)d->rows * (size_t)d->cols, sizeof(*out));

    if (!out || k->n_kept == MAX_KEPT) {
        return err_nomem(e, d->name);
    }
    k->kept[k->n_kept++] = out;
    int32_t row = 0, col = 0;
    for (int32_t i = 0; i < d->n_pieces; i++) {
        const struct weight_piece *p = &d->piece[i];
        int32_t rows = p->transposed ? p->cols : p->rows, cols = p->transposed ? p->rows : p->cols;
        for (int32_t r = 0; r < rows; r++) {
            for (int32_t c = 0; c < cols; c++) {
                out[(int64_t)(row + r) * d->cols + col + c] =
                    value_of(p, p->transposed ? c * p->stride + r : r * p->stride + c);
            }
        }
        if (d->kind == WEIGHT_VECTOR) {
            col += cols; /* stacked along their only axis */
        } else {
            row += rows;
        }
    }
    assert_int_equal(d->kind == WEIGHT_VECTOR ? col : row,
                     d->kind == WEIGHT_VECTOR ? d->cols : d->rows);
    *ret = (struct mat){
        .data = out, .stride = d->cols, .rows = d->rows, .cols = d->cols, .dtype = DTYPE_F32};
    return 0;
}

static int keep_scratch(struct backend *b, int32_t rows, int32_t cols, enum dtype t,
                        struct mat *ret, struct err *e)
{
    (void)b, (void)e;
    *ret = (struct mat){.stride = cols, .rows = rows, .cols = cols, .dtype = t};
    return 0;
}

static void no_experts(struct backend *b, struct mat y, struct mat x, const struct experts *e,
                       const struct expert_scratch *s)
{
    (void)b, (void)y, (void)x, (void)e, (void)s;
}

static void no_latents(struct backend *b, struct mat out, struct mat q,
                       const struct latent_attention *a, const struct latent_scratch *s)
{
    (void)b, (void)out, (void)q, (void)a, (void)s;
}

static struct weight_support keep_supports(const struct backend *b, const struct weight_format *f)
{
    (void)b;
    return (struct weight_support){
        .as_stored = weight_format_is_plain(f), .act = DTYPE_F32, .kernel = ""};
}

static const struct backend_ops KEEPER_OPS = {.supports = keep_supports,
                                              .weight = keep_weight,
                                              .scratch = keep_scratch,
                                              .experts = no_experts,
                                              .latent_attention = no_latents};

static int open_rank(struct keeper *k, struct model **ret, const char *dir, int32_t rank,
                     int32_t n_ranks, struct err *e)
{
    struct model_config c;
    struct generation_defaults gen;

    *k = (struct keeper){.base = {.ops = &KEEPER_OPS, .name = "keeper"}};
    int rc = model_config_read(&c, &gen, dir, e);
    struct model_options o = {.dtype = DTYPE_F32,
                              .max_tokens = 4,
                              .max_logits = 2,
                              .max_len = 8,
                              .rank = rank,
                              .n_ranks = n_ranks};
    return rc < 0 ? rc : model_open(ret, dir, &c, &o, &k->base, e);
}

static void close_rank(struct keeper *k, struct model *m)
{
    for (int i = 0; i < k->n_kept; i++) {
        free(k->kept[i]);
    }
    model_free(m);
}

/* part[r][c] == whole[row + r][col + c] */
static void same(struct mat part, int32_t part_row, int32_t rows, struct mat whole, int32_t row,
                 int32_t col, const char *what)
{
    for (int32_t r = 0; r < rows; r++) {
        const float *p = (const float *)part.data + (part_row + r) * part.stride;
        const float *w = (const float *)whole.data + (row + r) * whole.stride + col;
        if (memcmp(p, w, (size_t)part.cols * sizeof(float)) != 0) {
            fail_msg("%s: row %d is not row %d of the whole", what, part_row + r, row + r);
        }
    }
}

/* A vector as a column, so that rows may be compared. */
static struct mat upright(struct mat v)
{
    return (struct mat){.data = v.data, .stride = 1, .rows = v.cols, .cols = 1, .dtype = v.dtype};
}

/* The rank's slice of a gated MLP's three matrices: `width` of the `whole` rows of gate
 * and of up, and of down's columns. */
static void same_mlp(struct mat up, struct mat down, struct mat all_up, struct mat all_down,
                     int32_t rank, int32_t width, int32_t whole)
{
    same(up, 0, width, all_up, rank * width, 0, "gate");
    if (all_up.rows == 2 * whole) {
        same(up, width, width, all_up, whole + rank * width, 0, "up");
    }
    same(down, 0, down.rows, all_down, 0, rank * width, "down");
}

/* A bias that rank 0 adds: the others have zeros, so that a backend takes the same way
 * on all. */
static void added_once(struct mat part, struct mat whole, int32_t rank)
{
    assert_non_null(part.data);
    assert_int_equal(part.cols, whole.cols);
    for (int32_t i = 0; i < part.cols; i++) {
        float want = rank == 0 ? ((const float *)whole.data)[i] : 0;
        assert_true(((const float *)part.data)[i] == want);
    }
}

static void check_experts(const struct experts *p, const struct experts *l, int32_t rank)
{
    int32_t hidden = l->router.cols, n = p->width, all = l->width;

    same(p->router, 0, p->n, l->router, 0, 0, "router");
    assert_true(p->router.alike); /* all ranks choose by it, so it has the same bits on them */
    assert_false(p->up.alike || p->down.alike || p->shared_up.alike || p->shared_down.alike);
    assert_false(l->router.alike); /* of one rank */
    for (int32_t i = 0; i < l->n; i++) {
        same_mlp(mat_rows(p->up, i * 2 * n, 2 * n), mat_rows(p->down, i * hidden, hidden),
                 mat_rows(l->up, i * 2 * all, 2 * all), mat_rows(l->down, i * hidden, hidden), rank,
                 n, all);
    }
    assert_true((p->shared_up.data != NULL) == (l->shared_up.data != NULL));
    if (l->shared_up.data) {
        same_mlp(p->shared_up, p->shared_down, l->shared_up, l->shared_down, rank,
                 p->shared_up.rows / 2, l->shared_up.rows / 2);
    }
}

static void check_rank(const char *dir, int32_t rank, int32_t n_ranks)
{
    struct keeper one, many;
    struct model *whole, *part;
    struct err e = {0};

    if (open_rank(&one, &whole, dir, 0, 1, &e) < 0 ||
        open_rank(&many, &part, dir, rank, n_ranks, &e) < 0) {
        fail_msg("%s", e.text);
    }
    const struct model_config *c = &whole->config;
    const struct transformer *t = part->weights, *w = whole->weights;
    int32_t d = c->head_dim, nq = c->n_heads / n_ranks, nk = model_n_kv_heads(c, n_ranks),
            mlp = c->intermediate / n_ranks;
    /* first of this rank */
    int32_t kv = c->n_kv_heads >= n_ranks ? rank * nk : rank * c->n_kv_heads / n_ranks;
    assert_int_equal(t->n_heads, nq);
    assert_int_equal(t->n_kv_heads, nk);
    int32_t ids = (int32_t)div_ceil(c->vocab, n_ranks);
    assert_int_equal(t->embed.rows, MIN(ids, c->vocab - rank * ids));
    same(t->embed, 0, t->embed.rows, w->embed, rank * ids, 0, "embedding");
    if (!c->tied) {
        same(t->head, 0, t->head.rows, w->head, rank * ids, 0, "head");
    }
    for (int32_t i = 0; i < c->n_layers; i++) {
        const struct layer *p = &t->layer[i], *l = &w->layer[i];
        assert_int_equal(p->qkv.rows, (nq + 2 * nk) * d);
        same(p->qkv, 0, nq * d, l->qkv, rank * nq * d, 0, "q");
        same(p->qkv, nq * d, nk * d, l->qkv, (c->n_heads + kv) * d, 0, "k");
        same(p->qkv, (nq + nk) * d, nk * d, l->qkv, (c->n_heads + c->n_kv_heads + kv) * d, 0, "v");
        if (c->qkv_bias) {
            same(upright(p->qkv_bias), (nq + nk) * d, nk * d, upright(l->qkv_bias),
                 (c->n_heads + c->n_kv_heads + kv) * d, 0, "v's bias");
        }
        assert_int_equal(p->o.cols, nq * d);
        same(p->o, 0, c->hidden, l->o, 0, rank * nq * d, "o");
        assert_false(p->qkv.alike || p->o.alike);
        if (l->experts.n > 0) {
            check_experts(&p->experts, &l->experts, rank);
        } else {
            same_mlp(p->up, p->down, l->up, l->down, rank, mlp, c->intermediate);
        }
        if (c->o_bias) {
            added_once(p->o_bias, l->o_bias, rank);
        }
        if (l->down_bias.data) {
            added_once(p->down_bias, l->down_bias, rank);
        }
    }
    close_rank(&many, part);
    close_rank(&one, whole);
}

static void ranks_hold_their_heads_and_slices(void **state)
{
    (void)state;
    static const char *const DIRS[] = {"tests/golden/qwen2-tied",       "tests/golden/llama-mha24",
                                       "tests/golden/opt-postnorm",     "tests/golden/gpt2-scaled",
                                       "tests/golden/phi3-longrope",    "tests/golden/qwen3-moe",
                                       "tests/golden/qwen2-moe-shared", "tests/golden/mixtral"};
    for (size_t i = 0; i < ARRAY_LEN(DIRS); i++) {
        for (int32_t rank = 0; rank < 2; rank++) {
            check_rank(DIRS[i], rank, 2);
        }
    }
    for (int32_t rank = 0; rank < 4; rank++) { /* more ranks than key/value heads */
        check_rank("tests/golden/qwen2-tied", rank, 4);
    }
}

static void a_model_that_cannot_be_cut_is_refused(void **state)
{
    (void)state;
    struct keeper k;
    struct model *m;
    struct err e = {0};
    assert_int_equal(open_rank(&k, &m, "tests/golden/gpt2", 0, 2, &e), ERR_INVALID); /* 3 heads */
    assert_non_null(strstr(e.text, "tensor_parallel_size 2 does not divide the model: 3 heads"));
    assert_int_equal(k.n_kept, 0);
}

/* Loading the model is refused with `why`, and no weight was made. */
static void refuses(const struct backend_ops *ops, const char *dir, const char *why)
{
    struct keeper k = {.base = {.ops = ops, .name = "keeper"}};
    struct model_config c;
    struct generation_defaults gen;
    struct model *m;
    struct err e = {0};

    assert_int_equal(model_config_read(&c, &gen, dir, &e), 0);
    struct model_options o = {.dtype = DTYPE_F32, .max_tokens = 4, .max_logits = 2, .max_len = 8};
    assert_int_equal(model_open(&m, dir, &c, &o, &k.base, &e), ERR_UNSUPPORTED);
    assert_non_null(strstr(e.text, why));
    assert_int_equal(k.n_kept, 0);
}

static void layers_need_a_backend_that_has_them(void **state)
{
    static const struct backend_ops PLAIN = {
        .supports = keep_supports, .weight = keep_weight, .scratch = keep_scratch};
    static const struct backend_ops EXPERTS = {.supports = keep_supports,
                                               .weight = keep_weight,
                                               .scratch = keep_scratch,
                                               .experts = no_experts};

    (void)state;
    refuses(&PLAIN, "tests/golden/mixtral",
            "layers of experts, which the backend keeper does not compute");
    refuses(&EXPERTS, "tests/golden/deepseek-v3",
            "attention over latents, which the backend keeper does not compute");
}

/* Element [row, col] of a weight of float32. */
static float at(struct mat m, int64_t row, int64_t col)
{
    return ((const float *)m.data)[row * m.stride + col];
}

/* With latents a rank has the rows of kv_b_proj that belong to its heads, those of keys
 * transposed; the product that makes latents is whole on every rank. */
static void ranks_hold_the_weights_of_their_heads_of_latents(void **state)
{
    static const char DIR[] = "tests/golden/deepseek-v3",
                      B[] = "layers.1.self_attn.kv_b_proj.weight";
    struct keeper k;
    struct model *m;
    struct err e = {0};

    (void)state;
    for (int32_t rank = 0; rank < 2; rank++) {
        if (open_rank(&k, &m, DIR, rank, 2, &e) < 0) {
            fail_msg("%s", e.text);
        }
        const struct layer *l = &m->weights->layer[1];
        const struct latent_attention *a = &l->latent;
        const struct tensor *t = checkpoint_find(m->checkpoint, B);
        t = t ? t : checkpoint_find(m->checkpoint, "model.layers.1.self_attn.kv_b_proj.weight");
        const float *stored = (const float *)t->data;
        assert_int_equal(a->n_heads, 2);
        assert_int_equal(l->qkv.rows, m->config.latent.q_rank + a->latent + a->rot_dim);
        assert_int_equal(l->q_up.rows, a->n_heads * (a->nope_dim + a->rot_dim));
        for (int32_t h = 0; h < a->n_heads; h++) {
            int32_t first = (rank * a->n_heads + h) * (a->nope_dim + a->v_dim);
            for (int32_t d = 0; d < a->latent; d++) {
                for (int32_t i = 0; i < a->nope_dim; i++) {
                    assert_true(at(a->k_up, h * a->latent + d, i) ==
                                stored[(first + i) * a->latent + d]);
                }
                for (int32_t i = 0; i < a->v_dim; i++) {
                    assert_true(at(a->v_up, h * a->v_dim + i, d) ==
                                stored[(first + a->nope_dim + i) * a->latent + d]);
                }
            }
        }
        close_rank(&k, m);
    }
}

static void parameters_are_counted(void **state)
{
    (void)state;
    struct keeper k;
    struct model *m;
    struct err e = {0};
    if (open_rank(&k, &m, "tests/golden/llama-mha24", 0, 1, &e) < 0) {
        fail_msg("%s", e.text);
    }
    /* embedding and head 67 x 24, two layers of 4 x 48 x 24 + 3 x 40 x 24 + 2 x 24, a
     * norm of 24 */
    assert_int_equal(m->config.n_parameters,
                     2 * 67 * 24 + 2 * (4 * 48 * 24 + 3 * 40 * 24 + 2 * 24) + 24);
    close_rank(&k, m);
}

enum { FINE_LAYERS = 6, MAX_FINE = 32 };

/* A backend that keeps no weights, but the names of those with fine inputs. */
struct noter {
    struct backend base;
    char fine[MAX_FINE][64];
    int n_fine;
};

static int note_weight(struct backend *b, const struct weight_desc *d, struct mat *ret,
                       struct err *e)
{
    struct noter *n = (struct noter *)b;

    (void)e;
    if (d->fine_inputs && d->kind == WEIGHT_LINEAR) {
        assert_true(n->n_fine < MAX_FINE);
        snprintf(n->fine[n->n_fine++], sizeof(n->fine[0]), "%s", d->name);
    }
    *ret = (struct mat){.data = n, .rows = d->rows, .cols = d->cols, .dtype = DTYPE_F32};
    return 0;
}

static int much_memory(struct backend *b, struct backend_memory *ret, struct err *e)
{
    (void)b;
    (void)e;
    *ret = (struct backend_memory){.total_bytes = 1 << 30, .free_bytes = 1 << 30};
    return 0;
}

static bool is_noted(const struct noter *n, int32_t layer, const char *name)
{
    char whole[64];
    bool is = false;

    snprintf(whole, sizeof(whole), "model.layers.%d.%s.weight", layer, name);
    for (int i = 0; i < n->n_fine; i++) {
        is = is || strcmp(n->fine[i], whole) == 0;
    }
    return is;
}

/* Queries, keys and values of all layers, and the whole layers at the ends, on every
 * stage of a pipeline alike. */
static void inputs_that_weigh_much_are_named_to_the_backend(void **state)
{
    static const struct backend_ops OPS = {.memory = much_memory,
                                           .supports = keep_supports,
                                           .weight = note_weight,
                                           .scratch = keep_scratch};
    static const bool ENDS[FINE_LAYERS] = {true, false, false, false, true, true};
    struct noter n = {.base = {.ops = &OPS, .name = "noter"}};
    struct model_config c;
    struct generation_defaults gen;
    struct err e = {0};

    (void)state;
    assert_int_equal(model_config_read(&c, &gen, "tests/golden/llama-mha24", &e), 0);
    c.n_layers = c.sharing_from = FINE_LAYERS;
    for (int32_t stage = 0; stage < 2; stage++) {
        struct model_options o = {.dtype = DTYPE_F32,
                                  .dummy = true,
                                  .max_tokens = 4,
                                  .max_logits = 2,
                                  .max_len = 8,
                                  .n_ranks = 1,
                                  .stage = stage,
                                  .n_stages = 2};
        struct model *m;
        if (model_open(&m, "tests/golden/llama-mha24", &c, &o, &n.base, &e) < 0) {
            fail_msg("%s", e.text);
        }
        model_free(m);
    }
    for (int32_t i = 0; i < FINE_LAYERS; i++) {
        assert_true(is_noted(&n, i, "self_attn.q_proj"));
        assert_true(is_noted(&n, i, "self_attn.o_proj") == ENDS[i]);
        assert_true(is_noted(&n, i, "mlp.gate_proj") == ENDS[i]);
        assert_true(is_noted(&n, i, "mlp.down_proj") == ENDS[i]);
    }
    assert_int_equal(n.n_fine, FINE_LAYERS + 3 * 3);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_hold_their_heads_and_slices),
        cmocka_unit_test(a_model_that_cannot_be_cut_is_refused),
        cmocka_unit_test(layers_need_a_backend_that_has_them),
        cmocka_unit_test(ranks_hold_the_weights_of_their_heads_of_latents),
        cmocka_unit_test(parameters_are_counted),
        cmocka_unit_test(inputs_that_weigh_much_are_named_to_the_backend),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
