/* The inner loops that differ between instruction sets, as one table. The plain ones
 * are the specification.
 *
 * Row functions work on n floats. `dots` is the heart of linear: inner products of
 * stored rows of weights with packed rows of activations. Rows are summed in blocks of
 * `k_block` elements, each block in lanes that are added in one fixed tree, so a
 * product does not depend on what else is in the batch: linear and attention give the
 * same bits for one row as for a thousand.
 */
#ifndef QUIRE_KERNELS_CPU_SIMD_KERNELS_H
#define QUIRE_KERNELS_CPU_SIMD_KERNELS_H

#include "kernels/backend.h"
#include "kernels/cpu/simd/isa.h"

enum {
    TILE_ROWS = 4, /* rows of x packed together, at most */
    /* elements of a row packed together; stored rows are zero-padded to a multiple of
     * it */
    TILE_CHUNK = 32,
    PANEL_ROWS = 24, /* stored rows that make a panel */
    PANEL_TILES = 8, /* tiles that meet a panel together, at most */
    /* floats that a panel, and a block of packed x, may take besides its elements */
    PANEL_SLACK = 256,
    PART_KEYS = 64 /* keys of attention taken together */
};

/* What to fetch while computing: the bytes at `distance` from the rows read. period 1:
 * of every row, a stream ahead of its reader; more: of the rows whose number is `phase`
 * modulo `period` (at least half a tile's rows apart), so that several passes over the
 * same rows share the work of fetching the next ones; 0: nothing. */
struct prefetch {
    int64_t distance;
    int32_t period, phase;
};

/* Stored rows seen by dots. */
struct dot_rows {
    const void *const *row; /* [n] each zero-padded to a multiple of TILE_CHUNK elements */
    int32_t n;
    enum dtype dtype;
    int64_t first; /* element of the rows where this block begins, a multiple of TILE_CHUNK */
};

struct row_scan {
    float max; /* -infinity when n is 0 */
    bool bad;  /* a NaN or +infinity */
};

/* A token that can still be drawn: z = (logit - max) / temperature, mass =
 * sample_mass(z) > 0 (kernels/noise.h). */
struct cpu_survivor {
    float z;
    int32_t token;
    uint64_t mass;
};

/* Inner products of stored rows with packed rows of x. */
struct cpu_tiles {
    int32_t k_block; /* elements summed before lanes are added; 0: no tiles here */
    /* Bytes of one packed element of x against rows of type t. */
    int32_t (*packed_bytes)(enum dtype t);
    /* Pack n_x <= TILE_ROWS rows of n floats as dots reads them:
     * [chunk][n_x][TILE_CHUNK], zero-padded. */
    void (*pack)(void *out, const float *const *x, int32_t n_x, int32_t n, enum dtype t);
    /* sum[w * n_x + x] (+)= row w . x over n_chunks chunks, k_block elements after
     * k_block elements; one float past the end may be written. With `add`, w->first is
     * a multiple of k_block and n_chunks at most one block's. */
    void (*dots)(float *sum, const struct dot_rows *w, const void *x, int32_t n_x, int32_t n_chunks,
                 bool add, const struct prefetch *ahead);
};

/* Cache lines to be fetched meanwhile, some with every tile: row_lines of a row, then
 * `skip` bytes further those of the next. */
struct line_walk {
    const char *at;
    int32_t left, a_tile; /* lines */
    int32_t in_row, row_lines;
    int64_t skip;
};

/* The same sums, bit for bit, where rows of x are many. Floats of a panel and of packed
 * x lie as the instruction set likes. */
struct cpu_panels {
    int32_t k_block; /* as in cpu_tiles; 0: no panels here */
    /* Elements [first, first + n) of PANEL_ROWS rows of type t; n is a multiple of
     * TILE_CHUNK. panel: n * PANEL_ROWS + PANEL_SLACK floats. */
    void (*pack_rows)(float *panel, const void *const *row, int64_t first, int32_t n, enum dtype t);
    /* Tile `tile` of n_tiles: rows of n floats, n_x <= TILE_ROWS of them, with zeros up
     * to `padded`. out: those of all tiles, n_tiles * padded * TILE_ROWS + PANEL_SLACK
     * floats. */
    void (*pack_x)(float *out, int32_t tile, int32_t n_tiles, const float *const *x, int32_t n_x,
                   int32_t n, int32_t padded, enum dtype t);
    /* sum [tile][TILE_ROWS][PANEL_ROWS] = packed x . panel over n elements, for `count`
     * <= PANEL_TILES tiles of n_tiles from `tile` on; walks on through `ahead`. */
    void (*dots)(float *sum, const float *panel, const float *x, int32_t tile, int32_t count,
                 int32_t n_tiles, int32_t n, struct line_walk *ahead);
};

struct cpu_kernels {
    /* Row functions. `out` may be an input. */
    void (*norm)(float *out, const float *x, int32_t n, const struct norm *k);
    void (*add)(float *x, const float *y, int32_t n);
    void (*gate)(float *out, const float *gate, const float *up, int32_t n, enum activation act);
    /* linear's epilogue: out = act(sum + bias) + residual; bias and residual may be
     * NULL. */
    void (*finish)(float *out, const float *sum, const float *bias, const float *residual,
                   int32_t n, enum activation act);
    void (*load)(float *out, const void *x, enum dtype t, int32_t n, float scale);
    void (*store)(void *out, enum dtype t, const float *x, int32_t n);
    /* First half and second half of a head turned against each other; cos_sin: half
     * cosines, half sines. */
    void (*rotate)(float *head, const float *cos_sin, int32_t half);
    struct row_scan (*scan)(const float *x, int32_t n);
    double (*sum_exp)(const float *x, int32_t n, float max); /* sum of exp(x - max) */
    /* The tokens with z > least and a mass, ascending; *ret_total is the mass of all n.
     * Exact, as kernels/noise.h says. */
    int32_t (*survivors)(struct cpu_survivor *out, const float *logits, int32_t n, float max,
                         float inv_temperature, float least, uint64_t *ret_total);
    /* sum [n][n_x] to n_x rows of n, `stride` floats apart. */
    void (*spread)(float *out, int32_t stride, const float *sum, int32_t n, int32_t n_x);

    /* Attention, a part of PART_KEYS keys at a time; NULL in the plain table, whose
     * attention is plain loops. */
    /* out [dim][PART_KEYS] from keys of type t. */
    void (*transpose_keys)(float *out, const void *const *key, int32_t dim, enum dtype t);
    /* score [rows][PART_KEYS] = scale * q[row] [dim] . keys [dim][PART_KEYS]. */
    void (*scores)(float *score, const float *const *q, int32_t rows, const float *keys,
                   int32_t dim, float scale);
    /* Fold one row's scores, of which [lo, hi) count, into its running maximum and sum;
     * s becomes the weights (0 outside). Returns the factor for what was accumulated
     * before. */
    float (*softmax)(float *s, int32_t lo, int32_t hi, float *max, float *sum);
    /* acc [rows][dim] = acc * keep[row] + sum over j in [lo, hi) of p[row][j] *
     * value_j, values of type t. */
    void (*weigh)(float *acc, int32_t dim, const float *keep, const float *p, int32_t rows,
                  const void *const *value, int32_t lo, int32_t hi, enum dtype t);

    struct cpu_tiles linear;
    struct cpu_panels panels;
};

/* The best functions for an instruction set the machine has. */
void cpu_kernels_for(struct cpu_kernels *k, enum cpu_isa isa);
/* Each fills in what it has, over what is there. */
void cpu_kernels_plain(struct cpu_kernels *k);
void cpu_kernels_avx2(struct cpu_kernels *k);
void cpu_tiles_avx2(struct cpu_kernels *k);
void cpu_panels_avx2(struct cpu_kernels *k); /* after cpu_tiles_avx2 */
void cpu_attention_avx2(struct cpu_kernels *k);
void cpu_kernels_neon(struct cpu_kernels *k);
void cpu_tiles_neon(struct cpu_kernels *k);
void cpu_attention_neon(struct cpu_kernels *k);
void cpu_tiles_avx512(struct cpu_kernels *k);
void cpu_tiles_avx512bf16(struct cpu_kernels *k);

#endif
