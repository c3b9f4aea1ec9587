/* linear with weights that are kept in blocks: each run of pieces of one format makes
 * its columns of the result, for so many rows of x at a time that x packed stays within
 * PACKED_BYTES. */
#include "kernels/cpu/cpu.h"

enum {
    PACKED_BYTES = 6 << 20,
    PACKED_STEP = 64,        /* rows of x at a time are a multiple, and at least as many */
    GATED_BYTES = 4 << 20,   /* of the factors of linear_gated at a time, about */
    GATED_THREAD_COLS = 256, /* columns of a factor for each thread, at least */
    GATED_STEP = 64,         /* of which those of all are a multiple */
};

/* Columns [first, first + n), or no matrix. */
static struct mat columns(struct mat m, int32_t first, int32_t n)
{
    return m.data ? mat_cols(m, first, n) : m;
}

/* Rows [first, first + n), or no matrix. */
static struct mat rows(struct mat m, int32_t first, int32_t n)
{
    return m.data ? mat_rows(m, first, n) : m;
}

/* The panels by which a product with a run goes; NULL: by tiles. */
static const struct cpu_code_panels *panels_for(const struct cpu_backend *c,
                                                const struct cpu_weight *run, int32_t n_rows)
{
    if (!run->m.format) {
        return NULL;
    }
    const struct cpu_code_panels *p = &c->k.code_panels[cpu_panels_as(run)];
    bool there =
        weight_format_has_scales(run->m.format) ? p->pack_apart != NULL : p->pack_rows != NULL;
    return there && n_rows * run->planes >= p->from ? p : NULL;
}

/* Rows of x that are multiplied with a run at a time. */
static int32_t rows_at_once(const struct cpu_backend *c, const struct cpu_weight *run,
                            int32_t n_rows)
{
    const struct cpu_code_panels *p = panels_for(c, run, n_rows);
    int64_t row_bytes = div_ceil(run->m.cols, FORMAT_BLOCK_MAX) * (int64_t)sizeof(struct act_block);

    if (!run->m.format) {
        return n_rows;
    }
    if (p) {
        row_bytes = cpu_code_tile_bytes(p, cpu_panels_as(run), run->m.cols) / p->tile_rows;
    }
    int64_t n = PACKED_BYTES / (row_bytes * run->planes) / PACKED_STEP * PACKED_STEP;
    return (int32_t)MIN(MAX(n, PACKED_STEP), n_rows);
}

bool cpu_packed_already(struct cpu_backend *c, struct cpu_packed want)
{
    const struct cpu_packed *has = &c->packed_x;
    bool same = c->keeps_x && has->x == want.x && has->panels == want.panels &&
                has->blocks == want.blocks && has->format == want.format &&
                has->rows == want.rows && has->planes == want.planes;

    c->packed_x = want;
    return same;
}

static void linear_run(struct cpu_backend *c, struct mat out, struct mat x, struct cpu_weight *run,
                       const struct epilogue *ep)
{
    if (panels_for(c, run, x.rows)) {
        cpu_linear_codes(c, out, x, run->m, ep);
    } else if (run->m.format) {
        cpu_linear_tiled(c, out, x, run->m, ep);
    } else {
        c->packed_x.x = NULL;
        cpu_linear(&c->base, out, x, run->m, ep);
    }
}

void cpu_linear_blocks(struct cpu_backend *c, struct mat out, struct mat x, struct mat w,
                       const struct epilogue *ep)
{
    int32_t first = 0;

    for (struct cpu_weight *run = w.priv; run; run = run->below) {
        int32_t n = run->m.rows, each = rows_at_once(c, run, x.rows);
        for (int32_t r = 0; r < x.rows; r += each) {
            int32_t n_x = MIN(each, x.rows - r);
            struct mat taken = cpu_rounded_x(c, mat_rows(x, r, n_x), run);
            struct epilogue part = {.bias = columns(ep->bias, first, n),
                                    .act = ep->act,
                                    .residual = rows(columns(ep->residual, first, n), r, n_x)};
            if (!taken.data) {
                return;
            }
            linear_run(c, mat_rows(mat_cols(out, first, n), r, n_x), taken, run, &part);
        }
        first += n;
    }
}

/* ---- gated ---- */

/* linear with rows [first, first + out.cols) of w. */
static void linear_rows(struct cpu_backend *c, struct mat out, struct mat x, struct mat w,
                        struct mat bias, int32_t first)
{
    struct cpu_view view;
    struct epilogue ep = {.bias = columns(bias, first, out.cols)};

    cpu_linear_blocks(c, out, x, cpu_weight_rows(w, first, out.cols, &view), &ep);
}

/* The fewest rows of x that a run of w takes at once. */
static int32_t rows_of_all(const struct cpu_backend *c, struct mat w, int32_t n_rows)
{
    int32_t n = n_rows;

    for (const struct cpu_weight *run = w.priv; run; run = run->below) {
        n = MIN(n, rows_at_once(c, run, n_rows));
    }
    return n;
}

/* Whether a product may take any rows of w alone: no scale stands for several. */
static bool rows_are_apart(struct mat w)
{
    for (const struct cpu_weight *run = w.priv; run; run = run->below) {
        for (int32_t i = 0; i < run->n_parts; i++) {
            if (run->part[i].scales.group_rows > 1) {
                return false;
            }
        }
    }
    return true;
}

/* Columns of each factor that are made at a time. */
static int32_t gated_cols(const struct cpu_backend *c, struct mat out, struct mat w)
{
    int64_t fit = GATED_BYTES / (2 * (int64_t)sizeof(float) * out.rows);
    int64_t least = GATED_THREAD_COLS * (int64_t)cpu_pool_threads(c->pool);

    if (!rows_are_apart(w)) {
        return out.cols;
    }
    return (int32_t)MIN(div_ceil(MAX(fit, least), GATED_STEP) * GATED_STEP, out.cols);
}

/* [rows, cols] in the memory of a wider matrix, close together, so that little of it is
 * touched. */
static struct mat within(struct mat wide, int32_t rows, int32_t cols)
{
    struct mat m = mat_cols(mat_rows(wide, 0, rows), 0, cols);
    int64_t stride = div_ceil(cols, 16) * 16 | 16; /* as cpu_scratch */

    m.stride = MIN(stride, wide.stride);
    return m;
}

/* The factors of rows of x, `each` columns at a time. */
static void gated_rows(struct cpu_backend *c, struct mat out, struct mat workspace, struct mat x,
                       struct mat w, struct mat bias, int32_t each, const struct cpu_gate *gate)
{
    c->packed_x.x = NULL;
    c->rounded.x = NULL;
    c->keeps_x = true;
    for (int32_t at = 0; at < out.cols; at += each) {
        int32_t n = MIN(each, out.cols - at);
        struct mat factors = within(workspace, x.rows, 2 * n);
        linear_rows(c, mat_cols(factors, 0, n), x, w, bias, at);
        linear_rows(c, mat_cols(factors, n, n), x, w, bias, out.cols + at);
        gate->run(gate, mat_cols(out, at, n), factors);
    }
    c->keeps_x = false;
}

void cpu_linear_gated_blocks(struct cpu_backend *c, struct mat out, struct mat workspace,
                             struct mat x, struct mat w, struct mat bias,
                             const struct cpu_gate *gate)
{
    int32_t each = gated_cols(c, out, w), n = rows_of_all(c, w, x.rows);

    if (each == out.cols) {
        cpu_linear_blocks(c, workspace, x, w, &(struct epilogue){.bias = bias});
        gate->run(gate, out, workspace);
        return;
    }
    for (int32_t r = 0; r < x.rows; r += n) {
        int32_t n_x = MIN(n, x.rows - r);
        gated_rows(c, mat_rows(out, r, n_x), workspace, mat_rows(x, r, n_x), w, bias, each, gate);
    }
}
