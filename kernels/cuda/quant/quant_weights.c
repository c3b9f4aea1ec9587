/* Weights whose scales are a tensor of their own: copied to the device and repacked
 * into the layout that the kernels read (quant.h), or dummies made there. */
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/experts/experts.h"
#include "kernels/cuda/gemm/linear.h"
#include "kernels/cuda/quant/fp4_scales.h"
#include "kernels/cuda/quant/groups.h"
#include "kernels/cuda/quant/panels.h"
#include "kernels/weight_pieces.h"

enum { CODE_ALIGN = 16 };

const char *cuda_quant_kernel(const struct cuda_backend *c, const struct weight_format *f)
{
    bool fast = c->capability == 90 && !c->config.deterministic;

    if (!fast) {
        return "products of bf16, widened for each (slow)";
    }
    return f->id == FORMAT_FP4
               ? "bf16 tensor cores up to 256 rows (groups of 16 or 32), widened above"
           : f->id == FORMAT_FP8
               ? "bf16 tensor cores up to 8 rows and e4m3 above (blocks of 128x128 and scales of "
                 "weights alone: bf16 up to 256 rows, widened above)"
           : f->id == FORMAT_INT8
               ? "bf16 tensor cores up to 256 rows, widened above"
               : "bf16 tensor cores up to 256 rows (groups of 128 and more), widened above";
}

/* ---- what the pieces have in common ---- */

/* Columns that share a scale. */
static int32_t group_cols(const struct weight_desc *d)
{
    int32_t n = d->n_pieces > 0 ? d->piece[0].scales.group_cols
                : d->dummy_format->id == FORMAT_FP8 || d->dummy_format->id == FORMAT_INT8 ? 0
                : d->dummy_format->id == FORMAT_FP4                                       ? 32
                                                    : QUANT_GROUP;

    return n > 0 ? MIN(n, d->cols) : d->cols;
}

static bool pieces_agree(const struct weight_desc *d)
{
    const struct weight_piece *first = d->piece;

    for (int32_t i = 0; i < d->n_pieces; i++) {
        const struct weight_piece *p = &d->piece[i];
        int32_t cols = p->scales.group_cols > 0 ? MIN(p->scales.group_cols, p->cols) : p->cols;
        if (!p->format || p->format != first->format || !p->scales.data ||
            !weight_format_has_scales(p->format) || cols != group_cols(d)) {
            return false;
        }
    }
    return true;
}

static bool any_zero(const struct weight_desc *d)
{
    for (int32_t i = 0; i < d->n_pieces; i++) {
        if (d->piece[i].scales.zero) {
            return true;
        }
    }
    return false;
}

/* The panels that hold the weight exactly and that the device packs, or dummies of
 * FORMAT_INT8; PANELS_NONE: there are none. */
static int32_t panels_of(const struct weight_desc *d, const struct quant_weight *q)
{
    bool suits = d->experts && q->rows % PANEL_ROWS == 0 && q->cols % (2 * PANEL_GROUP) == 0;

    if (suits && q->format == FORMAT_FP4 && fp4_scales_fit(d, q->group_cols)) {
        return q->group_cols == PANEL_GROUP ? (int32_t)PANELS_FP4 : (int32_t)PANELS_NVFP4;
    }
    if (suits && q->format == FORMAT_INT8 && d->n_pieces == 0) {
        return PANELS_GROUPS_8;
    }
    bool int4 = q->format == FORMAT_INT4 && q->group_cols % PANEL_GROUP == 0;
    return suits && int4 ? (int32_t)PANELS_INT4 : (int32_t)PANELS_NONE;
}

/* Whether segments hold the weight exactly. */
static bool fits_segments(const struct weight_desc *d, const struct quant_weight *q)
{
    bool one = q->group_cols == q->cols; /* a group a row: repeated */

    if (q->cols % QUANT_SEGMENT != 0) {
        return false;
    }
    if (q->format == FORMAT_FP4) {
        return !d->experts && fp4_scales_fit(d, q->group_cols);
    }
    if (q->format != FORMAT_INT4 || (q->group_cols % QUANT_GROUP != 0 && !one)) {
        return false;
    }
    for (int32_t i = 0; i < d->n_pieces; i++) {
        const struct weight_scales *s = &d->piece[i].scales;
        if ((s->type != SCALE_F16 && s->type != SCALE_BF16) || s->type != d->piece[0].scales.type ||
            s->factor != 1.0f) {
            return false;
        }
    }
    return true;
}

static bool activations_quantised(const struct weight_desc *d)
{
    for (int32_t i = 0; i < d->n_pieces; i++) {
        if (d->piece[i].scales.act == ACT_AS_THEY_ARE) {
            return false;
        }
    }
    return true;
}

/* Rows that there is memory for. */
static int32_t stored_rows(const struct quant_weight *q)
{
    return q->layout == QUANT_SEGMENTS
               ? (int32_t)div_ceil(q->rows, QUANT_TILE_ROWS) * QUANT_TILE_ROWS
               : q->rows;
}

/* ---- scales and zero points, by row ---- */

/* The zero point's code where a piece has none. */
static uint8_t no_zero(const struct quant_weight *q)
{
    return q->format == FORMAT_INT4 ? 8 : 0;
}

static int64_t group_row(const struct weight_scales *s, int32_t row)
{
    return s->group_rows > 0 ? row / s->group_rows : 0;
}

/* Fills scales [rows, n_groups], of 16 bits as stored for segments, else of floats; and
 * zero [rows, n_groups], unless NULL. Segments may have several groups of one in the
 * file. */
static void fill_groups(const struct weight_desc *d, const struct quant_weight *q, void *scale,
                        uint8_t *zero)
{
    int64_t at = 0;

    for (int32_t i = 0; i < d->n_pieces; i++) {
        const struct weight_scales *s = &d->piece[i].scales;
        int32_t alike = group_cols(d) / q->group_cols;
        for (int32_t row = 0; row < d->piece[i].rows; row++) {
            int64_t group = group_row(s, row);
            for (int32_t j = 0; j < q->n_groups; j++, at++) {
                int64_t from = group * s->stride + j / alike;
                if (q->layout == QUANT_SEGMENTS) {
                    memcpy((uint16_t *)scale + at, (const char *)s->data + from * 2, 2);
                } else {
                    ((float *)scale)[at] = weight_scale_load(s, from) * s->factor;
                }
                if (zero) {
                    zero[at] = s->zero ? s->zero[group * s->zero_stride + j / alike] : no_zero(q);
                }
            }
        }
    }
}

static int to_device(void **ret, struct cuda_backend *c, const void *host, size_t n_bytes,
                     const char *name, struct err *e)
{
    *ret = cuda_alloc(c, n_bytes, name, e);
    if (!*ret) {
        return ERR_NOMEM;
    }
    cudaError_t rc = cudaMemcpyAsync(*ret, host, n_bytes, cudaMemcpyHostToDevice, c->stream);
    rc = rc == cudaSuccess ? cudaStreamSynchronize(c->stream) : rc;
    return rc == cudaSuccess ? 0 : cuda_error(e, rc, name);
}

/* Scales and zero points of the pieces, on the device. Those of segments are packed and
 * not needed afterwards, but stay: they are small. */
static int send_groups(struct cuda_backend *c, const struct weight_desc *d,
                       const struct quant_weight *q, void **ret_scale, void **ret_zero,
                       struct err *e)
{
    size_t n = (size_t)q->rows * (size_t)q->n_groups,
           width = q->layout == QUANT_SEGMENTS ? sizeof(uint16_t) : sizeof(float);
    void *scale = malloc(n * width);
    uint8_t *zero = any_zero(d) ? malloc(n) : NULL;
    int rc = !scale || (any_zero(d) && !zero) ? err_nomem(e, d->name) : 0;

    if (rc == 0) {
        fill_groups(d, q, scale, zero);
        rc = to_device(ret_scale, c, scale, n * width, d->name, e);
    }
    if (rc == 0 && zero) {
        rc = to_device(ret_zero, c, zero, n, d->name, e);
    }
    free(scale);
    free(zero);
    return rc;
}

/* ---- codes ---- */

/* Sends rows of codes to `to`, row_bytes apart. */
static int send_codes(struct cuda_backend *c, const struct weight_desc *d, char *to,
                      int64_t row_bytes, struct err *e)
{
    for (int32_t i = 0; i < d->n_pieces; i++) {
        const struct weight_piece *p = &d->piece[i];
        int64_t bytes = weight_format_bytes(p->format, p->cols),
                stride = weight_format_bytes(p->format, p->stride);
        int rc = 0;
        if (bytes == row_bytes && bytes % 2 == 0 && stride % 2 == 0) { /* as if bf16 */
            struct weight_piece raw = {.data = p->data,
                                       .dtype = DTYPE_BF16,
                                       .rows = p->rows,
                                       .cols = (int32_t)(bytes / 2),
                                       .stride = stride / 2};
            struct mat out = {.data = to, .stride = bytes / 2, .dtype = DTYPE_BF16};
            rc = upload_send(c, &raw, out, 0, d->mapped, e);
        } else {
            cudaError_t status =
                cudaMemcpy2DAsync(to, (size_t)row_bytes, p->data, (size_t)stride, (size_t)bytes,
                                  (size_t)p->rows, cudaMemcpyHostToDevice, c->stream);
            status = status == cudaSuccess ? cudaStreamSynchronize(c->stream) : status;
            rc = status == cudaSuccess ? 0 : cuda_error(e, status, d->name);
        }
        if (rc < 0) {
            return rc;
        }
        to += p->rows * row_bytes;
    }
    return 0;
}

/* Sends codes of four bits through a buffer and packs them into segments or panels. */
static int send_segments(struct cuda_backend *c, const struct weight_desc *d,
                         const struct quant_weight *q, const void *scale, const void *zero,
                         struct err *e)
{
    struct weight_desc read_now = *d;
    int64_t pitch = q->cols / 2;
    void *buffer = NULL;
    cudaError_t status = cudaMalloc(&buffer, (size_t)(pitch * q->rows));

    if (status != cudaSuccess) {
        return cuda_error(e, status, d->name);
    }
    read_now.mapped = false;
    int rc = send_codes(c, &read_now, buffer, pitch, e);
    if (rc == 0) {
        if (panel_kind(q) == PANELS_INT4) {
            launch_pack_int4_panels((void *)q->codes, buffer, pitch, scale, zero, q->group_cols,
                                    q->rows, q->cols, c->stream);
        } else if (q->layout == QUANT_PANELS) {
            launch_pack_panels((void *)q->codes, buffer, pitch, scale, q->group_cols, q->rows,
                               q->cols, c->stream);
        } else if (q->format == FORMAT_FP4) {
            launch_pack_fp4((void *)q->codes, buffer, pitch, scale, q->rows, q->cols, q->group_cols,
                            c->stream);
        } else {
            launch_pack_segments((void *)q->codes, buffer, pitch, scale, zero, q->rows, q->cols,
                                 c->stream);
        }
        status = cudaStreamSynchronize(c->stream);
        rc = status == cudaSuccess ? 0 : cuda_error(e, status, d->name);
    }
    cudaFree(buffer);
    return rc;
}

/* Segments or panels of FORMAT_FP4. */
static int fill_fp4(struct cuda_backend *c, const struct weight_desc *d, struct quant_weight *q,
                    struct err *e)
{
    size_t rows = (size_t)q->rows, n = rows * (size_t)q->n_groups;
    uint8_t *byte = malloc(n);
    float *factor = malloc(rows * sizeof(*factor));
    void *scale = NULL;
    void *factors = NULL;
    int rc = !byte || !factor ? err_nomem(e, d->name) : 0;

    if (rc == 0) {
        fp4_scales_fill(d, q->n_groups, byte, factor);
        rc = to_device(&factors, c, factor, rows * sizeof(*factor), d->name, e);
    }
    rc = rc < 0 ? rc : to_device(&scale, c, byte, n, d->name, e);
    rc = rc < 0 ? rc : send_segments(c, d, q, scale, NULL, e);
    q->scale = factors;
    free(byte);
    free(factor);
    return rc;
}

/* Factors of 1 for the rows of panels whose groups' scales are all there is. */
static int unit_factors(struct cuda_backend *c, struct quant_weight *q, const char *name,
                        struct err *e)
{
    float *factor = cuda_alloc(c, (size_t)q->rows * sizeof(*factor), name, e);

    if (!factor) {
        return ERR_NOMEM;
    }
    launch_fill(factor, q->rows, 1, c->stream);
    q->scale = factor;
    return 0;
}

static int fill_weight(struct cuda_backend *c, const struct weight_desc *d, struct quant_weight *q,
                       struct err *e)
{
    void *scale = NULL;
    void *zero = NULL;

    if (q->layout != QUANT_ROWS && q->format == FORMAT_FP4) {
        return fill_fp4(c, d, q, e);
    }
    int rc = send_groups(c, d, q, &scale, &zero, e);
    if (rc < 0) {
        return rc;
    }
    if (q->layout == QUANT_SEGMENTS) {
        return send_segments(c, d, q, scale, zero, e);
    }
    if (q->layout == QUANT_PANELS) {
        rc = unit_factors(c, q, d->name, e);
        rc = rc < 0 ? rc : send_segments(c, d, q, scale, zero, e);
        cuda_release(c, scale); /* packed, and not small */
        cuda_release(c, zero);
        return rc;
    }
    q->scale = scale;
    q->zero = zero;
    return send_codes(c, d, (char *)q->codes, q->row_bytes, e);
}

/* Values of about +-1e-3, as those of other dummies. */
static int fill_dummy(struct cuda_backend *c, struct quant_weight *q, const char *name,
                      struct err *e)
{
    const uint16_t segment_scale = 0x3903; /* bf16, 1.25e-4 */
    float most = q->format == FORMAT_FP8    ? 448.0f
                 : q->format == FORMAT_INT8 ? 128.0f
                 : q->format == FORMAT_FP4  ? 6.0f
                                            : 8.0f;
    bool of_rows = q->layout != QUANT_ROWS; /* the floats of FORMAT_FP4, of panels */
    int64_t n = (int64_t)q->rows * (of_rows ? 1 : q->n_groups);

    if (q->layout == QUANT_PANELS) {
        launch_dummy_panels((void *)q->codes, q->rows, q->cols, panel_kind(q), 1e-3f / most,
                            ++c->n_dummies << 40, c->stream);
    } else {
        launch_dummy_codes((void *)q->codes, q->row_bytes, stored_rows(q), q->format, q->segment,
                           segment_scale, ++c->n_dummies << 40, c->stream);
    }
    if (panel_kind(q) == PANELS_INT4) {
        int rc = unit_factors(c, q, name, e);
        if (rc < 0) {
            return rc;
        }
    } else if (q->layout != QUANT_SEGMENTS || q->format == FORMAT_FP4) {
        float *scale = cuda_alloc(c, (size_t)n * sizeof(*scale), name, e);
        if (!scale) {
            return ERR_NOMEM;
        }
        launch_fill(scale, n, 1e-3f / most, c->stream);
        q->scale = scale;
    }
    cudaError_t rc = cudaGetLastError();
    return rc == cudaSuccess ? 0 : cuda_error(e, rc, "dummy weights");
}

/* ---- buffers of products ---- */

static int grow(struct cuda_backend *c, void **at, int64_t *n_bytes, int64_t need, struct err *e)
{
    if (need > *n_bytes) {
        *n_bytes = 0;
        *at = cuda_alloc(c, (size_t)need, "products of quantised weights", e);
        *n_bytes = *at ? need : 0;
    }
    return *at ? 0 : ERR_NOMEM;
}

bool cuda_quant_reserve(struct cuda_backend *c, const struct quant_weight *q, enum dtype act,
                        struct err *e)
{
    return grow(c, &c->widened, &c->widened_bytes, (int64_t)q->rows * q->cols * dtype_bytes(act),
                e) == 0;
}

/* What products with the weight need besides it. */
static int make_buffers(struct cuda_backend *c, const struct weight_desc *d,
                        const struct quant_weight *q, struct err *e)
{
    enum dtype act = d->dtype;
    void *codes = c->quantised;
    void *scale = c->quantised_scale;
    int64_t scale_bytes = scale ? c->config.max_tokens * (int64_t)sizeof(float) : 0;
    int rc;

    if (d->experts || !q->quantises) {
        return cuda_quant_reserve(c, q, act, e) ? 0 : ERR_NOMEM;
    }
    rc = grow(c, &codes, &c->quantised_bytes, (int64_t)c->config.max_tokens * q->cols, e);
    c->quantised = codes;
    if (rc == 0) {
        rc = grow(c, &scale, &scale_bytes, c->config.max_tokens * (int64_t)sizeof(float), e);
        c->quantised_scale = scale;
    }
    c->fused.codes = c->quantised;
    c->fused.code_scale = c->quantised_scale;
    return rc;
}

/* Bytes of a segment; 0: there are none. */
static int32_t segment_bytes(const struct quant_weight *q)
{
    return q->layout != QUANT_SEGMENTS ? 0
           : q->format != FORMAT_FP4   ? QUANT_SEGMENT_BYTES
           : q->group_cols == 16       ? QUANT_NVFP4_BYTES
                                       : QUANT_MXFP4_BYTES;
}

static int64_t code_row_bytes(const struct quant_weight *q, const struct weight_format *f)
{
    return q->layout == QUANT_SEGMENTS ? q->cols / QUANT_SEGMENT * (int64_t)q->segment
           : q->layout == QUANT_PANELS ? panel_bytes(q->cols, panel_kind(q)) / PANEL_ROWS
                                       : weight_format_bytes(f, q->cols);
}

/* One scale serves all pieces: the greatest clips none of their inputs, which are the
 * same. */
static float fixed_scale(const struct weight_desc *d)
{
    float most = 0;

    for (int32_t i = 0; i < d->n_pieces; i++) {
        const struct weight_scales *s = &d->piece[i].scales;
        most = s->act == ACT_SCALE_TENSOR ? MAX(most, s->act_scale) : most;
    }
    return most;
}

/* What is known of the weight before its codes are there. */
static void describe(struct cuda_backend *c, const struct weight_desc *d, struct quant_weight *q)
{
    const struct weight_format *f = d->n_pieces > 0 ? d->piece[0].format : d->dummy_format;

    q->format = (int32_t)f->id;
    q->rows = d->rows;
    q->cols = d->cols;
    q->group_cols = group_cols(d);
    q->kind = panels_of(d, q);
    q->layout = q->kind != PANELS_NONE ? (int32_t)QUANT_PANELS
                : fits_segments(d, q)  ? (int32_t)QUANT_SEGMENTS
                                       : (int32_t)QUANT_ROWS;
    if (q->layout == QUANT_SEGMENTS && q->format == FORMAT_INT4) {
        q->group_cols = QUANT_GROUP;
    }
    q->n_groups = (int32_t)div_ceil(q->cols, q->group_cols);
    q->segment = segment_bytes(q);
    q->f16_scales = d->n_pieces > 0 && d->piece[0].scales.type == SCALE_F16;
    q->row_bytes = code_row_bytes(q, f);
    q->logits = d->logits;
    q->act_scale = fixed_scale(d);
    q->quantises = q->format == FORMAT_FP8 && activations_quantised(d) &&
                   !c->config.deterministic && d->dtype == DTYPE_BF16 &&
                   (d->experts ? expert_e4m3_fits(q->cols, q->group_cols)
                               : q->n_groups == 1 && q->cols % CODE_ALIGN == 0 &&
                                     q->rows % CODE_ALIGN == 0 && lt_has_e4m3(c, q->rows, q->cols));
}

/* Whether the weight is better in groups than as described: its codes have other
 * groups, columns or scales than the kernels of segments and rows. */
static bool better_in_groups(const struct cuda_backend *c, const struct weight_desc *d,
                             const struct quant_weight *q, struct groups_layout *ret)
{
    bool by_rows = q->format == FORMAT_INT8 && q->cols % QUANT_GROUP == 0 &&
                   (q->n_groups == 1 || q->group_cols == QUANT_GROUP);
    const char *why;

    bool others = q->layout == QUANT_ROWS && !by_rows;

    return (q->format == FORMAT_INT4 || q->format == FORMAT_INT8) && (others || d->logits) &&
           d->n_pieces > 0 && cuda_group_fits(c, d, ret, &why);
}

/* A weight whose codes have their scales apart. */
static int make_codes(struct cuda_backend *c, const struct weight_desc *d, struct quant_weight *q,
                      struct err *e)
{
    struct groups_layout groups;
    struct panels_layout panels;
    const char *why = "groups or scales that no kernel takes";

    describe(c, d, q);
    if (d->experts && q->format != FORMAT_FP8 && q->layout != QUANT_PANELS) {
        if (q->format == FORMAT_INT8 && panels_layout_of(d, &panels, &why)) {
            return cuda_panel_weight(c, d, &panels, q, e);
        }
        return err_set(e, ERR_UNSUPPORTED,
                       "cuda: weight %s: experts stored as %s are not multiplied: %s", d->name,
                       weight_format_of((enum weight_format_id)q->format)->name, why);
    }
    if (better_in_groups(c, d, q, &groups)) {
        return cuda_group_weight(c, d, &groups, q, e);
    }
    q->codes = cuda_alloc(c, (size_t)(q->row_bytes * stored_rows(q)), d->name, e);
    int rc = !q->codes          ? ERR_NOMEM
             : d->n_pieces == 0 ? fill_dummy(c, q, d->name, e)
                                : fill_weight(c, d, q, e);
    return rc < 0 ? rc : make_buffers(c, d, q, e);
}

/* Whether all pieces are blocks or floats, which can be decoded. */
static bool blocks_or_floats(const struct weight_desc *d)
{
    for (int32_t i = 0; i < d->n_pieces; i++) {
        const struct weight_piece *p = &d->piece[i];
        if (p->format ? weight_format_has_scales(p->format) : p->transposed) {
            return false;
        }
    }
    return d->n_pieces > 0;
}

int cuda_quant_weight(struct cuda_backend *c, const struct weight_desc *d, struct mat *ret,
                      struct err *e)
{
    const struct weight_format *f = d->n_pieces > 0 ? d->piece[0].format : d->dummy_format;
    bool blocks = blocks_or_floats(d);
    struct groups_layout groups;
    struct panels_layout panels;
    const char *why = NULL;

    if (blocks &&
        !(d->experts ? panels_layout_of(d, &panels, &why) : cuda_group_fits(c, d, &groups, &why))) {
        return cuda_decoded_weight(c, d, why, ret, e);
    }
    if (!blocks && (d->kind != WEIGHT_LINEAR || !pieces_agree(d))) {
        return err_set(e, ERR_UNSUPPORTED,
                       "cuda: weight %s: experts stored in different formats or groups, or an "
                       "embedding of codes",
                       d->name);
    }
    if (d->experts && d->dtype != DTYPE_BF16) {
        return err_set(e, ERR_UNSUPPORTED,
                       "cuda: weight %s: experts stored as %s are multiplied with bfloat16 alone, "
                       "not with %s",
                       d->name, f->name, dtype_name(d->dtype));
    }
    struct quant_weight *q = calloc(1, sizeof(*q));
    void **grown = realloc(c->quant, (size_t)(c->n_quant + 1) * sizeof(*grown));
    if (!q || !grown) {
        free(q);
        c->quant = grown ? grown : c->quant;
        return err_nomem(e, d->name);
    }
    c->quant = grown;
    c->quant[c->n_quant++] = q;
    int rc = !blocks      ? make_codes(c, d, q, e)
             : d->experts ? cuda_panel_weight(c, d, &panels, q, e)
                          : cuda_group_weight(c, d, &groups, q, e);
    if (rc < 0) {
        return rc;
    }
    *ret = (struct mat){.data = (void *)q->codes,
                        .stride = d->cols,
                        .rows = d->rows,
                        .cols = d->cols,
                        .dtype = d->dtype,
                        .format = weight_format_of((enum weight_format_id)q->format),
                        .priv = q};
    return 0;
}
