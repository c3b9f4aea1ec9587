/* A backend's operations over ranks: all-reduce, fused and not, the sharded embedding,
 * logits gathered, sampling; compared with one rank.
 *
 * `--device cuda` needs a GPU for each of `--ranks N` (2); `--only NAME` runs one test;
 * QUIRE_TEST_SMALL: fewer rows. The ranks are processes. Every step is taken several
 * times, so that a device that records steps replays what is compared.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "kernels/cpu/simd/convert.h"
#include "tests/unit/operand.h"
#include "tests/unit/rank_rig.h"

enum { MOST_ROWS = 600, MOST_COLS = 4096, REPEATS = 4, N_TYPES = 3 };

static const char *device = "cpu";
static int32_t n_ranks = 3;

/* Small whole numbers, whose sums every type holds exactly, in any order. */
static float summand(int32_t rank, int32_t row, int32_t col)
{
    return (float)((row * 7 + col * 3 + rank * 5) % 9 - 4);
}

static float total(int32_t row, int32_t col)
{
    float sum = 0;

    for (int32_t r = 0; r < n_ranks; r++) {
        sum += summand(r, row, col);
    }
    return sum;
}

static float residual(int32_t row, int32_t col)
{
    return (float)((row * 5 + col) % 17 - 8);
}

static float stream(int32_t row, int32_t col)
{
    return residual(row, col) + total(row, col);
}

static float norm_weight(int32_t col)
{
    return 1 + (float)(col % 8) / 8;
}

/* Every row count once, because it identifies a recorded step. */
struct shape {
    int32_t rows, cols;
};
static const struct shape SHAPES[] = {{2, 8},    {1, 4096}, {3, 64},   {8, 4096},   {5, 72},
                                      {64, 512}, {7, 77},   {200, 64}, {256, 4096}, {600, 64}};

/* Operands of one type: x and out of add_norm, z of add, w of all_reduce; y and v are
 * what the first two add. */
struct operands {
    struct mat x, out, y, z, v, w;
    struct norm norm;
};

struct sums {
    struct operands of[N_TYPES];
    float host[MOST_ROWS * MOST_COLS];
};

static int operands_open(struct rank_rig *r, struct operands *o, enum dtype type, struct err *e)
{
    float weight[MOST_COLS];
    struct weight_piece p = {.data = weight, .rows = 1, .cols = MOST_COLS, .stride = MOST_COLS};
    struct weight_desc d = {.name = "norm",
                            .kind = WEIGHT_VECTOR,
                            .dtype = type,
                            .rows = 1,
                            .cols = MOST_COLS,
                            .piece = &p,
                            .n_pieces = 1};
    struct mat *mat[] = {&o->x, &o->out, &o->y, &o->z, &o->v, &o->w};

    for (int32_t k = 0; k < MOST_COLS; k++) {
        weight[k] = norm_weight(k);
    }
    o->norm = (struct norm){.kind = NORM_RMS, .eps = 1e-5f};
    int rc = r->b->ops->weight(r->b, &d, &o->norm.weight, e);
    if (rc == 0 && r->b->ops->ready) {
        rc = r->b->ops->ready(r->b, e);
    }
    for (size_t i = 0; i < ARRAY_LEN(mat) && rc == 0; i++) {
        rc = r->b->ops->scratch(r->b, MOST_ROWS, MOST_COLS, backend_act_dtype(r->b, type), mat[i],
                                e);
    }
    return rc;
}

static struct mat shape_of(struct mat m, struct shape s)
{
    return mat_rows(mat_cols(m, 0, s.cols), 0, s.rows);
}

static int upload(struct rank_rig *r, struct sums *t, struct mat m, struct shape s, bool mine,
                  struct err *e)
{
    for (int32_t i = 0; i < s.rows; i++) {
        for (int32_t k = 0; k < s.cols; k++) {
            t->host[(int64_t)i * s.cols + k] = mine ? summand(r->rank, i, k) : residual(i, k);
        }
    }
    return r->b->ops->upload(r->b, shape_of(m, s), t->host, e);
}

static int fill(struct rank_rig *r, struct sums *t, struct shape s, struct err *e)
{
    int rc = 0;

    for (int i = 0; i < N_TYPES && rc == 0; i++) {
        struct operands *o = &t->of[i];
        const struct mat mine[] = {o->y, o->v, o->w}, shared[] = {o->x, o->z};
        for (size_t k = 0; k < ARRAY_LEN(mine) && rc == 0; k++) {
            rc = upload(r, t, mine[k], s, true, e);
        }
        for (size_t k = 0; k < ARRAY_LEN(shared) && rc == 0; k++) {
            rc = upload(r, t, shared[k], s, false, e);
        }
    }
    return rc;
}

static int check(struct rank_rig *r, struct sums *t, const char *what, struct mat m, struct shape s,
                 float (*want_at)(int32_t, int32_t), struct err *e)
{
    int rc = r->b->ops->download(r->b, shape_of(m, s), t->host, e);

    for (int32_t i = 0; i < s.rows && rc == 0; i++) {
        for (int32_t k = 0; k < s.cols; k++) {
            float got = t->host[(int64_t)i * s.cols + k], want = want_at(i, k);
            if (!(got == want)) {
                return err_set(e, ERR_INVALID, "%s, %s [%d, %d] at (%d, %d): %g, not %g", what,
                               dtype_name(m.dtype), s.rows, s.cols, i, k, got, want);
            }
        }
    }
    return rc;
}

static int check_norm(struct rank_rig *r, struct sums *t, struct mat m, struct shape s,
                      struct err *e)
{
    double limit = m.dtype == DTYPE_BF16 ? 8e-3 : m.dtype == DTYPE_F16 ? 1e-3 : 1e-5;
    int rc = r->b->ops->download(r->b, shape_of(m, s), t->host, e);

    for (int32_t i = 0; i < s.rows && rc == 0; i++) {
        double squares = 0;
        for (int32_t k = 0; k < s.cols; k++) {
            squares += pow(stream(i, k), 2);
        }
        double scale = 1 / sqrt(squares / s.cols + 1e-5);
        for (int32_t k = 0; k < s.cols; k++) {
            double got = t->host[(int64_t)i * s.cols + k],
                   want = stream(i, k) * scale * norm_weight(k);
            if (!(fabs(got - want) <= limit * (1 + fabs(want)))) {
                return err_set(e, ERR_INVALID, "norm, %s [%d, %d] at (%d, %d): %g, not %g",
                               dtype_name(m.dtype), s.rows, s.cols, i, k, got, want);
            }
        }
    }
    return rc;
}

static int sum_step(struct rank_rig *r, struct sums *t, struct shape s, struct err *e)
{
    const struct backend_ops *ops = r->b->ops;
    bool replayed;
    struct results unused;
    int rc = rank_rig_begin(r, s.rows, &replayed, e);

    for (int i = 0; i < N_TYPES && rc == 0 && !replayed; i++) {
        struct operands *o = &t->of[i];
        ops->add_norm(r->b, shape_of(o->out, s), shape_of(o->x, s), shape_of(o->y, s), &o->norm,
                      true);
        ops->add(r->b, shape_of(o->z, s), shape_of(o->v, s), true);
        ops->all_reduce(r->b, shape_of(o->w, s));
    }
    return rc < 0 ? rc : rank_rig_end(r, &unused, e);
}

static int check_all(struct rank_rig *r, struct sums *t, struct shape s, struct err *e)
{
    int rc = 0;

    for (int i = 0; i < N_TYPES && rc == 0; i++) {
        struct operands *o = &t->of[i];
        rc = check(r, t, "add_norm's sum", o->x, s, stream, e);
        if (rc == 0) {
            rc = check_norm(r, t, o->out, s, e);
        }
        if (rc == 0) {
            rc = check(r, t, "add", o->z, s, stream, e);
        }
        if (rc == 0) {
            rc = check(r, t, "all_reduce", o->w, s, total, e);
        }
    }
    return rc;
}

static int sums(struct rank_rig *r, struct err *e)
{
    static const enum dtype types[N_TYPES] = {DTYPE_F32, DTYPE_F16, DTYPE_BF16};
    static struct sums t;
    int rc = 0;

    for (int i = 0; i < N_TYPES && rc == 0; i++) {
        rc = operands_open(r, &t.of[i], types[i], e);
    }
    for (int i = 0; i < REPEATS * (int)ARRAY_LEN(SHAPES) && rc == 0; i++) {
        struct shape s = SHAPES[i % (int)ARRAY_LEN(SHAPES)];
        rc = fill(r, &t, s, e);
        if (rc == 0) {
            rc = sum_step(r, &t, s, e);
        }
        if (rc == 0) {
            rc = check_all(r, &t, s, e);
        }
        if (rc < 0) {
            err_prefix(e, "round %d", i / (int)ARRAY_LEN(SHAPES));
        }
    }
    return rc;
}

enum { ROW_SUMS = 60, FEW_ROWS = 24, MANY_ROWS = 96, ROW_COLS = 1024 };

/* Every third sum has many rows, which a device may add up in another way than few. */
static int32_t rows_of_sum(int i)
{
    return i % 3 == 2 ? MANY_ROWS : FEW_ROWS;
}

/* Many sums in one step: data in a peer's inbox is not overwritten before it was
 * read. */
static int sums_in_a_row(struct rank_rig *r, struct err *e)
{
    enum { ROWS = ROW_SUMS / 3 * (2 * FEW_ROWS + MANY_ROWS) };
    static float host[ROWS * ROW_COLS];
    struct results unused;
    struct mat all;
    bool replayed;
    int rc = r->b->ops->scratch(r->b, ROWS, ROW_COLS, DTYPE_F32, &all, e);

    for (int step = 0; step < 3 * REPEATS && rc == 0; step++) {
        for (int32_t i = 0; i < ROWS * ROW_COLS; i++) {
            host[i] = summand(r->rank, i / ROW_COLS + step, i % ROW_COLS);
        }
        rc = r->b->ops->upload(r->b, all, host, e);
        if (rc == 0) {
            rc = rank_rig_begin(r, FEW_ROWS, &replayed, e);
        }
        for (int32_t i = 0, first = 0; i < ROW_SUMS && rc == 0 && !replayed; i++) {
            r->b->ops->all_reduce(r->b, mat_rows(all, first, rows_of_sum(i)));
            first += rows_of_sum(i);
        }
        if (rc == 0) {
            rc = rank_rig_end(r, &unused, e);
        }
        if (rc == 0) {
            rc = r->b->ops->download(r->b, all, host, e);
        }
        for (int32_t i = 0; i < ROWS * ROW_COLS && rc == 0; i++) {
            if (host[i] != total(i / ROW_COLS + step, i % ROW_COLS)) {
                return err_set(e, ERR_INVALID, "step %d, row %d of all: %g, not %g", step,
                               i / ROW_COLS, host[i], total(i / ROW_COLS + step, i % ROW_COLS));
            }
        }
    }
    return rc;
}

/* ---- layers of a long prompt ---- */

enum { LAYER_ROWS = 1500, LAYER_COLS = 512, LAYER_DEPTH = 64, LAYERS = 3 };

static float input(int32_t row, int32_t k)
{
    return (float)((row * 5 + k) % 3 - 1);
}

/* Of the first product, a rank's share; the second one's is the identity. */
static float part(int32_t rank, int32_t col, int32_t k)
{
    return k % 8 == 0 ? (float)((col + k + rank) % 3 - 1) : 0;
}

static int matrix_open(struct rank_rig *r, struct mat *ret, int32_t cols, struct err *e)
{
    static float v[LAYER_COLS * LAYER_COLS];
    struct weight_piece p = {.data = v, .rows = LAYER_COLS, .cols = cols, .stride = cols};
    struct weight_desc d = {.name = "weight",
                            .kind = WEIGHT_LINEAR,
                            .dtype = DTYPE_BF16,
                            .rows = LAYER_COLS,
                            .cols = cols,
                            .piece = &p,
                            .n_pieces = 1};

    for (int32_t i = 0; i < LAYER_COLS; i++) {
        for (int32_t k = 0; k < cols; k++) {
            v[i * cols + k] = cols == LAYER_COLS ? (float)(i == k) : part(r->rank, i, k);
        }
    }
    return r->b->ops->weight(r->b, &d, ret, e);
}

struct layers {
    float added[LAYER_ROWS * LAYER_COLS]; /* to the stream by a layer: whole numbers that
                                           * bfloat16 holds */
    struct mat w, same, in, x, y, h[LAYERS], z[LAYERS];
    struct norm norm;
    float host[LAYER_ROWS * LAYER_COLS], other[LAYER_ROWS * LAYER_COLS];
};

static int layers_open(struct rank_rig *r, struct layers *t, struct err *e)
{
    static float ones[LAYER_COLS];
    struct weight_piece p = {.data = ones, .rows = 1, .cols = LAYER_COLS, .stride = LAYER_COLS};
    struct weight_desc d = {.name = "norm",
                            .kind = WEIGHT_VECTOR,
                            .dtype = DTYPE_BF16,
                            .rows = 1,
                            .cols = LAYER_COLS,
                            .piece = &p,
                            .n_pieces = 1};
    enum dtype type = backend_act_dtype(r->b, DTYPE_BF16);

    for (int32_t i = 0; i < LAYER_COLS; i++) {
        ones[i] = 1;
    }
    t->norm = (struct norm){.kind = NORM_RMS, .eps = 1e-5f};
    int rc = r->b->ops->weight(r->b, &d, &t->norm.weight, e);
    rc = rc < 0 ? rc : matrix_open(r, &t->w, LAYER_DEPTH, e);
    rc = rc < 0 ? rc : matrix_open(r, &t->same, LAYER_COLS, e);
    if (rc == 0 && r->b->ops->ready) {
        rc = r->b->ops->ready(r->b, e);
    }
    rc = rc < 0 ? rc : r->b->ops->scratch(r->b, LAYER_ROWS, LAYER_DEPTH, type, &t->in, e);
    rc = rc < 0 ? rc : r->b->ops->scratch(r->b, LAYER_ROWS, LAYER_COLS, type, &t->x, e);
    rc = rc < 0 ? rc : r->b->ops->scratch(r->b, LAYER_ROWS, LAYER_COLS, type, &t->y, e);
    for (int i = 0; i < LAYERS && rc == 0; i++) {
        rc = r->b->ops->scratch(r->b, LAYER_ROWS, LAYER_COLS, type, &t->h[i], e);
        rc = rc < 0 ? rc : r->b->ops->scratch(r->b, LAYER_ROWS, LAYER_COLS, type, &t->z[i], e);
    }
    t->y.transient = true;
    return rc;
}

static void layers_expect(struct layers *t)
{
    for (int32_t i = 0; i < LAYER_ROWS * LAYER_COLS; i++) {
        t->added[i] = 0;
        for (int32_t r = 0; r < n_ranks; r++) {
            for (int32_t k = 0; k < LAYER_DEPTH; k += 8) {
                t->added[i] += input(i / LAYER_COLS, k) * part(r, i % LAYER_COLS, k);
            }
        }
    }
}

static int layers_step(struct rank_rig *r, struct layers *t, struct err *e)
{
    const struct backend_ops *ops = r->b->ops;
    struct results unused;
    bool replayed;

    for (int32_t i = 0; i < LAYER_ROWS * LAYER_DEPTH; i++) {
        t->host[i] = input(i / LAYER_DEPTH, i % LAYER_DEPTH);
    }
    int rc = ops->upload(r->b, t->in, t->host, e);
    for (int32_t i = 0; i < LAYER_ROWS * LAYER_COLS; i++) {
        t->host[i] = residual(i / LAYER_COLS, i % LAYER_COLS);
    }
    rc = rc < 0 ? rc : ops->upload(r->b, t->x, t->host, e);
    rc = rc < 0 ? rc : rank_rig_begin(r, LAYER_ROWS, &replayed, e);
    for (int i = 0; i < LAYERS && rc == 0; i++) {
        ops->linear(r->b, t->y, t->in, t->w, NULL);
        ops->add_norm(r->b, t->h[i], t->x, t->y, &t->norm, true);
        if (i > 0) { /* else other operations follow at once */
            ops->linear(r->b, t->z[i], t->h[i], t->same, NULL);
        }
    }
    return rc < 0 ? rc : rank_rig_end(r, &unused, e);
}

/* The stream after `layers` of them. */
static double after(const struct layers *t, int32_t row, int32_t col, int layers)
{
    return residual(row, col) + layers * t->added[row * LAYER_COLS + col];
}

static int layers_check(struct rank_rig *r, struct layers *t, int i, struct err *e)
{
    bool rounds = operand_type(r->b, DTYPE_BF16) == DTYPE_BF16;
    int rc = r->b->ops->download(r->b, t->h[i], t->host, e);

    rc = rc < 0 || i == 0 ? rc : r->b->ops->download(r->b, t->z[i], t->other, e);
    for (int32_t row = 0; row < LAYER_ROWS && rc == 0; row++) {
        double squares = 0;
        for (int32_t k = 0; k < LAYER_COLS; k++) {
            squares += pow(after(t, row, k, i + 1), 2);
        }
        double scale = 1 / sqrt(squares / LAYER_COLS + 1e-5);
        for (int32_t k = 0; k < LAYER_COLS; k++) {
            int32_t at = row * LAYER_COLS + k;
            double want = after(t, row, k, i + 1) * scale;
            float copied = rounds ? bf16_load(bf16_store(t->host[at])) : t->host[at];
            if (!(fabs(t->host[at] - want) <= 8e-3 * (1 + fabs(want))) ||
                (i > 0 && t->other[at] != copied)) {
                return err_set(e, ERR_INVALID, "layer %d at (%d, %d): %g, copied %g, not %g", i,
                               row, k, t->host[at], i > 0 ? t->other[at] : 0, want);
            }
        }
    }
    return rc;
}

/* Products, sums and norms of more rows than a device sums at a time. */
static int layers_of_a_long_prompt(struct rank_rig *r, struct err *e)
{
    static struct layers t;
    int rc = layers_open(r, &t, e);

    layers_expect(&t);
    for (int step = 0; step < REPEATS / 2 && rc == 0; step++) {
        rc = layers_step(r, &t, e);
        for (int i = 0; i < LAYERS && rc == 0; i++) {
            rc = layers_check(r, &t, i, e);
        }
    }
    return rc;
}

/* ---- the sharded vocabulary ---- */

enum { VOCAB = 4999, WIDTH = 64 }; /* a shard has more tokens than a list of ties */

static float embedding(int32_t id, int32_t col)
{
    return (float)((id * 3 + col) % 200 - 100);
}

static int32_t shard_width(void)
{
    return (int32_t)div_ceil(VOCAB, n_ranks);
}

/* This rank's shard of the embedding. */
static int table_open(struct rank_rig *r, struct mat *ret, struct err *e)
{
    static float rows_of[VOCAB * WIDTH];
    int32_t first = shard_width() * r->rank, n = MIN(shard_width(), VOCAB - first);
    struct weight_piece p = {.data = rows_of, .rows = n, .cols = WIDTH, .stride = WIDTH};
    struct weight_desc d = {.name = "embedding",
                            .kind = WEIGHT_EMBEDDING,
                            .dtype = DTYPE_F32,
                            .rows = n,
                            .cols = WIDTH,
                            .piece = &p,
                            .n_pieces = 1};

    for (int32_t i = 0; i < n * WIDTH; i++) {
        rows_of[i] = embedding(first + i / WIDTH, i % WIDTH);
    }
    int rc = r->b->ops->weight(r->b, &d, ret, e);
    return rc == 0 && r->b->ops->ready ? r->b->ops->ready(r->b, e) : rc;
}

static int embed_shard(struct rank_rig *r, struct mat out, int32_t rows, struct err *e)
{
    static float host[RANK_RIG_TOKENS * WIDTH];
    int32_t first = shard_width() * r->rank;
    struct results unused;
    struct mat table;
    bool replayed;
    int rc = table_open(r, &table, e);

    for (int step = 0; step < REPEATS && rc == 0; step++) {
        rc = rank_rig_begin(r, rows, &replayed, e);
        if (rc == 0 && !replayed) {
            r->b->ops->embed_shard(r->b, mat_rows(out, 0, rows), table, first, 2);
        }
        if (rc == 0) {
            rc = rank_rig_end(r, &unused, e);
        }
        if (rc == 0) {
            rc = r->b->ops->download(r->b, mat_rows(out, 0, rows), host, e);
        }
        for (int32_t i = 0; i < rows * WIDTH && rc == 0; i++) {
            RANK_CHECK(host[i] == 2 * embedding(r->ints[i / WIDTH], i % WIDTH));
        }
    }
    return rc;
}

/* Row i's greatest logit is at `best(i)`; all others are equal, so the log-probability
 * is known too. */
static int32_t best(int32_t row, int32_t step)
{
    return (row * 389 + step * 101) % VOCAB;
}

/* Buffers for all logits, and for this rank's shard of the vocabulary: n ids from
 * `first` on. */
struct shard {
    int32_t first, n;
    struct mat logits, own;
};

static int shard_open(struct rank_rig *r, struct shard *ret, struct err *e)
{
    int32_t first = shard_width() * r->rank;

    *ret = (struct shard){.first = first, .n = MIN(shard_width(), VOCAB - first)};
    int rc = r->b->ops->scratch(r->b, RANK_RIG_TOKENS, VOCAB, DTYPE_F32, &ret->logits, e);
    return rc < 0 ? rc : r->b->ops->scratch(r->b, RANK_RIG_TOKENS, ret->n, DTYPE_F32, &ret->own, e);
}

/* Greedy sampling from the ranks' shards gives the best token of all. */
static int draw(struct rank_rig *r, int32_t rows, struct err *e)
{
    static float host[RANK_RIG_TOKENS * VOCAB];
    struct shard shard;
    struct results res;
    bool replayed;
    int rc = shard_open(r, &shard, e);

    for (int step = 0; step < REPEATS && rc == 0; step++) {
        for (int32_t i = 0; i < rows * shard.n; i++) {
            host[i] = shard.first + i % shard.n == best(i / shard.n, step) ? 3.0f : 1.0f;
        }
        rc = r->b->ops->upload(r->b, mat_rows(shard.own, 0, rows), host, e);
        if (rc == 0) {
            rc = rank_rig_begin(r, rows, &replayed, e);
        }
        if (rc == 0 && !replayed) {
            r->b->ops->gather_logits(r->b, mat_rows(shard.logits, 0, rows),
                                     mat_rows(shard.own, 0, rows));
            r->b->ops->sample(r->b, mat_rows(shard.logits, 0, rows), 0);
        }
        if (rc == 0) {
            rc = rank_rig_end(r, &res, e);
        }
        for (int32_t i = 0; i < rows && rc == 0 && r->rank == 0; i++) {
            RANK_CHECK(res.token[i] == best(i, step));
            RANK_CHECK(fabs(res.logprob[i] - (2 - log(exp(2) + VOCAB - 1))) < 1e-4);
        }
    }
    return rc;
}

/* Rank 0 gets every column. Devices that share the sampling move columns elsewhere;
 * all_draws covers these. */
static int gather_logits(struct rank_rig *r, int32_t rows, struct err *e)
{
    static float host[RANK_RIG_TOKENS * VOCAB];

    for (int32_t i = 0; i < rows; i++) {
        r->sample[i].temperature = 1; /* a greedy step would not gather them */
    }
    struct results unused;
    struct shard shard;
    bool replayed;
    int rc = shard_open(r, &shard, e);
    for (int step = 0; step < REPEATS && rc == 0; step++) {
        for (int32_t i = 0; i < rows * shard.n; i++) {
            host[i] = embedding(shard.first + i % shard.n + step, i / shard.n);
        }
        rc = r->b->ops->upload(r->b, mat_rows(shard.own, 0, rows), host, e);
        if (rc == 0) {
            rc = rank_rig_begin(r, rows, &replayed, e);
        }
        if (rc == 0 && !replayed) {
            r->b->ops->gather_logits(r->b, mat_rows(shard.logits, 0, rows),
                                     mat_rows(shard.own, 0, rows));
        }
        if (rc == 0) {
            rc = rank_rig_end(r, &unused, e);
        }
        if (rc == 0 && r->rank == 0) {
            rc = r->b->ops->download(r->b, mat_rows(shard.logits, 0, rows), host, e);
        }
        for (int32_t i = 0; i < rows * VOCAB && rc == 0 && r->rank == 0; i++) {
            RANK_CHECK(host[i] == embedding(i % VOCAB + step, i / VOCAB));
        }
    }
    return rc;
}

static int sharded_vocabulary(struct rank_rig *r, struct err *e)
{
    struct mat out;
    int rc = r->b->ops->scratch(r->b, RANK_RIG_TOKENS, WIDTH, DTYPE_F32, &out, e);

    if (rc == 0) {
        rc = embed_shard(r, out, 6, e);
    }
    if (rc == 0) {
        rc = embed_shard(r, out, 100, e);
    }
    for (int32_t rows = 1; rows <= 201 && rc == 0; rows += 40) {
        rc = draw(r, rows, e);
    }
    for (int32_t rows = 2; rows <= 202 && rc == 0 && strcmp(r->device, "cpu") == 0; rows += 100) {
        rc = gather_logits(r, rows, e);
    }
    return rc;
}

/* ---- sampling of every kind ---- */

/* Kinds of sampling rows. Earlier tokens and biases are among the first few ids of
 * either rank's shard. `row`: the number of its mask. */
static const struct sample_row KINDS[] = {
    {.temperature = 0.8f, .top_p = 0.9f},
    {.temperature = 1, .top_p = 1, .top_k = 40},
    {.temperature = 0, .top_p = 1},
    {.temperature = 1.3f, .top_p = 0.95f, .top_k = 20, .min_p = 0.02f},
    {.temperature = 1, .top_p = 1, .n_logprobs = 5},
    {.temperature = 0.7f, .top_p = 1, .frequency_penalty = 0.7f, .presence_penalty = 0.3f},
    {.temperature = 0, .top_p = 1, .repetition_penalty = 1.5f, .n_bias = 4},
    {.kind = SAMPLE_CANDIDATES, .top_p = 1, .n_candidates = 8},
    {.kind = SAMPLE_SCORE, .top_p = 1, .target = VOCAB - 3},
    {.temperature = 0, .top_p = 1, .n_logprobs = 20},
    {.temperature = 0.9f, .top_p = 1, .n_bias = 4, .row = 2}, /* some ids are banned */
};
/* Kinds that can be sampled by merging top-k lists. */
static const struct sample_row TOPK_KINDS[] = {
    {.temperature = 1, .top_p = 1, .top_k = 40},
    {.temperature = 0, .top_p = 1},
    {.temperature = 1.3f, .top_p = 0.95f, .top_k = 20, .min_p = 0.02f},
    {.temperature = 4, .top_p = 0.8f, .top_k = 64, .n_logprobs = 5},
    {.temperature = 0.7f,
     .top_p = 1,
     .top_k = 50,
     .frequency_penalty = 0.7f,
     .presence_penalty = 0.3f},
    {.temperature = 0, .top_p = 1, .repetition_penalty = 1.5f, .n_bias = 4, .n_logprobs = 3},
    {.kind = SAMPLE_CANDIDATES, .top_p = 1, .n_candidates = 8, .n_bias = 4},
    {.kind = SAMPLE_CANDIDATES, .top_p = 1, .n_candidates = 64},
    {.kind = SAMPLE_SCORE, .top_p = 1, .target = VOCAB - 3, .n_logprobs = 20},
    {.temperature = 2, .top_p = 1, .top_k = 3, .row = 1},
    {.temperature = 8, .top_p = 0.6f, .top_k = 33, .min_p = 0.1f},
    {.temperature = 1, .top_p = 1, .top_k = 9, .n_bias = 4, .row = 2, .n_logprobs = 3},
    {.kind = SAMPLE_CANDIDATES, .top_p = 1, .n_candidates = 8, .n_bias = 4, .row = 2},
};
/* Every sequence's tokens, the first N_PROMPT of them its prompt; the token sampled in
 * the previous step follows. */
enum { BLOCK = 16, N_PROMPT = 3 };
static const int32_t BEFORE[] = {4, 7, 4998, 3, 3, 4, 4000, 4000, 4000, 4950, 4998, 4998};
static const struct token_bias BIASES[] = {{1, 2.5f}, {2, -INFINITY}, {4990, 3}, {4991, -1}};
static const int32_t ALLOWED[] = {5, 80, 2400, 2600, 4997}, ALONE = 2;

/* The kinds of the rows, used cyclically, and their logits. */
struct asks {
    const struct sample_row *kind;
    int32_t n_kinds;
    float (*logit)(int32_t row, int32_t id, int32_t step);
};

static void ask_for_all(struct rank_rig *r, const struct asks *asks, int32_t rows)
{
    static uint32_t mask[2 * (VOCAB / 32 + 1)];

    for (size_t i = 0; i < ARRAY_LEN(ALLOWED); i++) {
        mask[ALLOWED[i] / 32] |= 1u << ALLOWED[i] % 32;
    }
    mask[mask_words(VOCAB) + ALONE / 32] |= 1u << ALONE % 32;
    r->bias = BIASES;
    r->mask = mask;
    r->n_bias = ARRAY_LEN(BIASES);
    r->n_mask = 2 * mask_words(VOCAB);
    for (int32_t i = 0; i < rows; i++) {
        struct sample_row *s = &r->sample[i];
        *s = asks->kind[i % asks->n_kinds];
        s->logits_row = i;
        s->mask_first = s->row > 0 ? (s->row - 1) * mask_words(VOCAB) : -1;
        s->row = i;
        s->n_prompt = N_PROMPT;
        s->repetition_penalty = s->repetition_penalty > 0 ? s->repetition_penalty : 1;
        s->seed = (uint64_t)i * 77 + 5;
    }
}

/* The first step has no previous one, so no token follows BEFORE. */
static void position_draws(struct rank_rig *r, int32_t rows, int32_t step)
{
    for (int32_t i = 0; i < rows; i++) {
        r->sample[i].position = (int32_t)ARRAY_LEN(BEFORE) + (step > 0);
    }
}

/* A cache of small blocks, one per sequence, filled with the tokens of BEFORE. */
static int context_open(struct rank_rig *r, struct err *e)
{
    enum { N = ARRAY_LEN(BEFORE), AT_ONCE = RANK_RIG_TOKENS / N };
    static int32_t behind[RANK_RIG_TOKENS], token[RANK_RIG_TOKENS], position[RANK_RIG_TOKENS],
        slot[RANK_RIG_TOKENS];
    int32_t q_start[AT_ONCE + 1], len[AT_ONCE], row[AT_ONCE], zero[AT_ONCE] = {0};
    struct table_update update[AT_ONCE];
    struct kv_layout kv;
    struct results res;

    kv_layout_init(&kv, BLOCK, 1, 1, 16, DTYPE_F32);
    int rc = r->b->ops->kv_create(r->b, &kv, RANK_RIG_TOKENS, 0, e);
    for (int32_t first = 0; first < RANK_RIG_TOKENS && rc == 0; first += AT_ONCE) {
        int32_t n = MIN(AT_ONCE, RANK_RIG_TOKENS - first);
        for (int32_t i = 0; i < n * N; i++) {
            token[i] = BEFORE[i % N];
            position[i] = i % N;
            slot[i] = (first + i / N) * BLOCK + i % N;
        }
        for (int32_t i = 0; i < n; i++) {
            q_start[i] = i * N;
            len[i] = N;
            row[i] = first + i;
            update[i] = (struct table_update){.row = first + i, .count = 1, .first = i};
        }
        q_start[n] = n * N;
        struct batch b = {.step = ++r->step,
                          .table_update = update,
                          .n_table_update = n,
                          .table_block = row,
                          .n_table_block = n,
                          .n_tokens = n * N,
                          .token = token,
                          .position = position,
                          .slot = slot,
                          .n_seqs = n,
                          .q_start = q_start,
                          .kv_len = len,
                          .row = row,
                          .lcp_blocks = zero};
        rc = r->b->ops->step_begin(r->b, &b, e);
        rc = rc < 0 ? rc : rank_rig_end(r, &res, e);
    }
    for (int32_t i = 0; i < RANK_RIG_TOKENS; i++) {
        behind[i] = i * BLOCK + N;
    }
    r->slot = behind;
    return rc;
}

/* Between -4 and 4, with a few per row far above the rest. */
static float any_logit(int32_t row, int32_t id, int32_t step)
{
    uint32_t x =
        (uint32_t)row * 2654435761u ^ (uint32_t)id * 2246822519u ^ (uint32_t)step * 3266489917u;

    x = (x ^ x >> 15) * 2246822519u;
    x ^= x >> 13;
    return (float)(x % 8000) / 1000 - 4 + (x >> 16) % 97 / 24;
}

/* By step: any; five levels, so that many tie; one above all others, which tie; one
 * above others that are closer to each other than to it. */
static float tied_logit(int32_t row, int32_t id, int32_t step)
{
    bool top = id == best(row, step);

    switch (step % 4) {
    case 1:
        return floorf(any_logit(row, id, step) / 3);
    case 2:
        return top ? 3.0f : 1.0f;
    case 3:
        return top ? 8.0f : 1 + (float)((id * 7 + row) % VOCAB) * 0x1p-23f;
    default:
        return any_logit(row, id, step);
    }
}

static int fill_logits(struct rank_rig *r, const struct asks *asks, struct mat m, int32_t rows,
                       int32_t first, int32_t step, struct err *e)
{
    static float host[RANK_RIG_TOKENS * VOCAB];

    for (int32_t i = 0; i < rows * m.cols; i++) {
        host[i] = asks->logit(i / m.cols, first + i % m.cols, step);
    }
    return r->b->ops->upload(r->b, mat_rows(m, 0, rows), host, e);
}

struct drawing {
    struct shard shard;
    /* this rank's shard of an embedding, and the embedding of the step's tokens */
    struct mat table, out;
};

/* One step of `rows` samples; over ranks from this one's shard of the logits, and with
 * the embeddings of the previous step's tokens. */
static int draw_step(struct rank_rig *r, const struct asks *asks, struct drawing *d, int32_t rows,
                     int32_t step, struct results *ret, struct err *e)
{
    bool replayed, many = r->n_ranks > 1;
    struct mat logits = mat_rows(d->shard.logits, 0, rows), own = mat_rows(d->shard.own, 0, rows);
    int rc = fill_logits(r, asks, many ? own : logits, rows, many ? d->shard.first : 0, step, e);

    r->token_src = r->ints;
    position_draws(r, rows, step);
    rc = rc < 0 ? rc : rank_rig_begin(r, rows, &replayed, e);
    r->token_src = NULL;
    if (rc == 0 && !replayed && many) {
        r->b->ops->embed_shard(r->b, mat_rows(d->out, 0, rows), d->table, d->shard.first, 2);
        r->b->ops->gather_logits(r->b, logits, own);
    }
    if (rc == 0 && !replayed) {
        r->b->ops->sample(r->b, logits, 0);
    }
    return rc < 0 ? rc : rank_rig_end(r, ret, e);
}

static bool same_logprob(float a, float b)
{
    return a == b || fabsf(a - b) < 1e-4f; /* equal: both -infinity */
}

static int same_answers(const struct sample_row *ask, const struct results *a,
                        const struct results *b, struct err *e)
{
    RANK_CHECK(a->n_samples == b->n_samples && a->top_stride == b->top_stride);
    for (int32_t i = 0; i < a->n_samples; i++) {
        int32_t n = ask[i].kind == SAMPLE_CANDIDATES ? ask[i].n_candidates : ask[i].n_logprobs;
        if (a->token[i] != b->token[i] || !same_logprob(a->logprob[i], b->logprob[i])) {
            return err_set(e, ERR_INVALID, "sample %d: token %d (%g), alone %d (%g)", i,
                           a->token[i], a->logprob[i], b->token[i], b->logprob[i]);
        }
        for (int32_t k = i * a->top_stride; k < i * a->top_stride + n; k++) {
            if (a->top_token[k] != b->top_token[k] ||
                !same_logprob(a->top_logprob[k], b->top_logprob[k])) {
                return err_set(e, ERR_INVALID,
                               "sample %d (token %d): number %d is %d (%g), alone %d (%g)", i,
                               b->token[i], k - i * a->top_stride, a->top_token[k],
                               a->top_logprob[k], b->top_token[k], b->top_logprob[k]);
            }
        }
    }
    return 0;
}

/* Checks that every rank's device had the previous step's tokens. */
static int tokens_were_known(struct rank_rig *r, struct drawing *d, const int32_t *token,
                             int32_t rows, struct err *e)
{
    static float host[RANK_RIG_TOKENS * WIDTH];
    int rc = r->b->ops->download(r->b, mat_rows(d->out, 0, rows), host, e);

    for (int32_t i = 0; i < rows * WIDTH && rc == 0; i++) {
        RANK_CHECK(host[i] == 2 * embedding(MAX(token[i / WIDTH], 0), i % WIDTH));
    }
    return rc;
}

/* Compares with one rank alone on the CPU, whose sampling is the specification. */
static int draws(struct rank_rig *r, struct rank_rig *one, const struct asks *asks,
                 struct drawing *d, struct drawing *whole, int32_t rows, struct err *e)
{
    int32_t before[RANK_RIG_TOKENS] = {0};
    struct results got, want;
    int rc = 0;

    ask_for_all(r, asks, rows);
    ask_for_all(one, asks, rows);
    for (int step = 0; step < REPEATS && rc == 0; step++) {
        rc = draw_step(r, asks, d, rows, step, &got, e);
        rc = rc < 0 ? rc : draw_step(one, asks, whole, rows, step, &want, e);
        rc = rc < 0 || step == 0 ? rc : tokens_were_known(r, d, before, rows, e);
        rc = rc < 0 || r->rank > 0 ? rc : same_answers(r->sample, &got, &want, e);
        if (rc < 0) {
            return err_prefix(e, "%d rows, step %d", rows, step);
        }
        memcpy(before, want.token, (size_t)rows * sizeof(*before));
    }
    return rc;
}

static int all_draws(struct rank_rig *r, const struct asks *asks, struct err *e)
{
    struct rank_rig one = {.device = "cpu", .n_ranks = 1, .max_tokens = r->max_tokens};
    struct drawing d, whole;
    int rc = rank_rig_open(&one, NULL, e);

    rc = rc < 0 ? rc : shard_open(&one, &whole.shard, e);
    rc = rc < 0 ? rc : shard_open(r, &d.shard, e);
    rc = rc < 0 ? rc : table_open(r, &d.table, e);
    rc = rc < 0 ? rc : r->b->ops->scratch(r->b, RANK_RIG_TOKENS, WIDTH, DTYPE_F32, &d.out, e);
    rc = rc < 0 ? rc : context_open(r, e);
    rc = rc < 0 ? rc : context_open(&one, e);
    static const int32_t rows[] = {1, 2, 10, 33, 64, 201};
    /* for tools that slow the device down */
    size_t n = getenv("QUIRE_TEST_SMALL") ? 3 : ARRAY_LEN(rows);
    for (size_t i = 0; i < n && rc == 0; i++) {
        rc = draws(r, &one, asks, &d, &whole, rows[i], e);
    }
    if (one.b) {
        one.b->ops->free(one.b);
    }
    return rc;
}

static int draws_of_every_kind(struct rank_rig *r, struct err *e)
{
    return all_draws(r, &(struct asks){KINDS, ARRAY_LEN(KINDS), any_logit}, e);
}

static int draws_from_topk_lists(struct rank_rig *r, struct err *e)
{
    return all_draws(r, &(struct asks){TOPK_KINDS, ARRAY_LEN(TOPK_KINDS), tied_logit}, e);
}

/* ---- tests ---- */

static void test_sums(void **state)
{
    (void)state;
    assert_int_equal(rank_rig_run(device, n_ranks, 2 * RANK_RIG_TOKENS + 88, sums), 0);
}

static void test_sums_in_a_row(void **state)
{
    (void)state;
    assert_int_equal(rank_rig_run(device, n_ranks, RANK_RIG_TOKENS, sums_in_a_row), 0);
}

static void test_layers_of_a_long_prompt(void **state)
{
    (void)state;
    assert_int_equal(rank_rig_run(device, n_ranks, LAYER_ROWS, layers_of_a_long_prompt), 0);
}

static void test_sharded_vocabulary(void **state)
{
    (void)state;
    assert_int_equal(rank_rig_run(device, n_ranks, RANK_RIG_TOKENS, sharded_vocabulary), 0);
}

static void test_drawn_as_by_one(void **state)
{
    (void)state;
    assert_int_equal(rank_rig_run(device, n_ranks, RANK_RIG_TOKENS, draws_of_every_kind), 0);
}

static void test_drawn_from_topk_lists_as_by_one(void **state)
{
    (void)state;
    assert_int_equal(rank_rig_run(device, n_ranks, RANK_RIG_TOKENS, draws_from_topk_lists), 0);
}

int main(int argc, char **argv)
{
    rank_rig_args(argc, argv, &device, &n_ranks);
    for (int i = 1; i + 1 < argc; i++) {
        if (strcmp(argv[i], "--only") == 0) {
            cmocka_set_test_filter(argv[i + 1]);
        }
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sums),
        cmocka_unit_test(test_sums_in_a_row),
        cmocka_unit_test(test_layers_of_a_long_prompt),
        cmocka_unit_test(test_sharded_vocabulary),
        cmocka_unit_test(test_drawn_as_by_one),
        cmocka_unit_test(test_drawn_from_topk_lists_as_by_one),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
