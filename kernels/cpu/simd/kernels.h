/* The inner loops that differ between instruction sets, as one table of functions. The
 * plain ones are the specification.
 *
 * Row functions work on n floats. `dots` is the mainloop of linear: inner products of
 * stored rows of weights (w) with packed rows of activations (x).
 *
 * Batch invariance: a row is summed in blocks of `k_block` elements, and each block in
 * lanes that are added in one fixed tree. No result depends on what else is in the
 * batch: linear and attention give the same bits for one row as for a thousand.
 */
#ifndef QUIRE_KERNELS_CPU_SIMD_KERNELS_H
#define QUIRE_KERNELS_CPU_SIMD_KERNELS_H

#include "kernels/backend.h"
#include "kernels/cpu/isa.h"

enum {
    TILE_ROWS = 4,   /* rows of x in a tile, at most; see cpu_tiles.rows */
    TILE_X_MAX = 32, /* rows of x in a tile of any instruction set, at most */
    /* elements of a row packed together; stored rows are zero-padded to a multiple of
     * it */
    TILE_CHUNK = 32,
    CODE_PANEL_ROWS = 16, /* stored rows of w in a panel of codes */
    CODE_TILE_ROWS = 16,  /* rows of x in a tile of codes, at most */
    PANEL_MAX_ROWS = 128, /* stored rows of w in a panel, at most */
    PANEL_TILES = 8,      /* tiles of x that one call multiplies with a panel, at most */
    /* floats that a panel, and a block of packed x, may take besides its elements */
    PANEL_SLACK = 256,
    TILE_KEYS = 64,           /* keys in a tile of attention */
    KEY_GROUP = 16,           /* keys of a tile that lie side by side */
    ATTENTION_TILE_ROWS = 64, /* cpu_attention.rows, at most */
};

/* What dots prefetches: bytes at `distance` from the rows that it reads. */
struct prefetch {
    int64_t distance; /* bytes */
    /* 1: of every row, a stream ahead of its reader. More: of the rows whose number is
     * `phase` modulo `period` (at least half a tile's rows apart), so that several
     * passes over the same rows divide the prefetching of the next ones. 0: nothing */
    int32_t period;
    int32_t phase; /* 0 .. period - 1 */
    bool far;      /* of every row: into the second-level cache, not the first */
};

/* The scales of a row of codes whose scales are apart (weight_format.h). */
struct row_scales {
    const struct weight_scales *of; /* the piece that the row belongs to */
    int64_t row;                    /* in the piece */
};

/* Stored rows that dots multiplies. */
struct dot_rows {
    const void *const *row; /* [n] each zero-padded to a multiple of TILE_CHUNK elements */
    int32_t n;              /* rows */
    enum dtype dtype;       /* of the stored elements */
    int64_t first; /* element of the rows where this block begins, a multiple of TILE_CHUNK */
    const struct row_scales *scales; /* [n] of codes whose scales are apart; else NULL */
};

/* Columns of a group of codes whose products are summed as integers: as many as share a
 * scale of activations, or fewer where the weight's scales are of fewer. */
static inline int32_t codes_group(const struct weight_scales *s)
{
    return s->group_cols % 32 == 0 ? 32 : FORMAT_GROUP;
}

/* Whether a weight has minima: int8 codes less a zero point do not fit into int8. */
static inline bool codes_have_minima(enum weight_format_id f, const struct weight_scales *s)
{
    return f == FORMAT_INT8 && s->zero;
}

/* The format whose panels and tiles are those of codes whose scales are apart;
 * FORMAT_F32: there are no panels. */
static inline enum weight_format_id codes_panels_of(enum weight_format_id f,
                                                    const struct weight_scales *s)
{
    bool wide = codes_group(s) == 32;

    return codes_have_minima(f, s) ? FORMAT_F32
           : f == FORMAT_FP8       ? (wide ? FORMAT_FP8 : FORMAT_F32)
           : wide                  ? FORMAT_Q8_0
           : f == FORMAT_INT8      ? FORMAT_F32
                                   : FORMAT_Q6_K; /* whose codes have 6 bits */
}

/* What scan finds in a row. */
struct row_scan {
    float max; /* -infinity when n is 0; not meaningful when `bad` */
    bool bad;  /* the row holds a NaN or +infinity */
};

/* A token that can still be sampled (kernels/noise.h). */
struct cpu_survivor {
    float z;       /* (logit - max) / temperature, <= 0 */
    int32_t token; /* id */
    uint64_t mass; /* sample_mass(z), above 0 */
};

/* Inner products of stored rows with packed rows of x. */
struct cpu_tiles {
    int32_t k_block; /* elements summed before lanes are added; 0: no tiles for this machine */
    int32_t rows;    /* of x in a tile, at most; at most TILE_X_MAX */
    /* How w is read from memory once, for a single tile of x: as so many runs of rows
     * side by side, each in multiples of `step` rows, about task_bytes of all runs in a
     * call of dots, and so many bytes ahead. */
    int32_t streams, step, task_bytes, ahead_bytes;
    /* Bytes of an element of x packed for rows of type t. */
    int32_t (*packed_bytes)(enum dtype t);
    /* Pack n_x <= rows rows of n floats for dots: [chunk][n_x][TILE_CHUNK], a chunk in
     * an order of the instruction set's own, zero-padded. */
    void (*pack)(void *out, const float *const *x, int32_t n_x, int32_t n, enum dtype t);
    /* sum[w * n_x + x] = row w . x over n_chunks chunks, block by block of k_block
     * elements; `add`: added to what is there. One float past the end may be written.
     * With `add`, w->first is a multiple of k_block and n_chunks at most one
     * block's. */
    void (*dots)(float *sum, const struct dot_rows *w, const void *x, int32_t n_x, int32_t n_chunks,
                 bool add, const struct prefetch *ahead);
};

/* FORMAT_BLOCK_MAX activations of a row, quantised for products with weights in blocks
 * (weight_format.h): groups of 32 of codes from -127 to 127 with a scale each. A group
 * whose greatest magnitude is below 1e-30 is zero; one that is not finite has a NaN as
 * its scale. Rows are zero-padded. Members lie at multiples of their size or of 64
 * bytes. */
struct act_block {
    _Alignas(64) int8_t code[256]; /* rounded to nearest, ties to even */
    /* the same in another order: of each 128, the first halves of the four groups, then
     * their last halves; only of instruction sets that read it */
    int8_t turned[256];
    uint8_t magnitude[256]; /* of `turned`; likewise */
    int32_t total16[16];    /* the sum of each 16 codes; likewise */
    float sum16[16];        /* scale times the sum of each 16 codes */
    int32_t total32[8];     /* the sum of each 32 codes; as total16 */
    float scale[8];         /* the greatest magnitude of the group / 127 */
    float sum32[8];         /* scale times the sum of each 32 codes */
    /* the same, of each eight numbers first the even ones, then the odd ones; only of
     * instruction sets that read them */
    int32_t parted_total16[16], parted_total32[8];
    float parted_scale[8], parted_sum32[8];
};

/* A row of x is a row of codes, or the sum of two: its codes, and those of what
 * rounding to them left, 15 bits of each group's greatest value together. */
enum { ACT_PLANES_MAX = 2 };

/* rest[i] = what x[i] has more than its code stands for, of n <= FORMAT_BLOCK_MAX
 * values that `a` was made of. */
static inline void act_rest(float *rest, const struct act_block *a, const float *x, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        rest[i] = x[i] - (float)a->code[i] * a->scale[i / 32];
    }
}

/* Inner products of rows in blocks with quantised rows of x. The order of all sums is
 * fixed, so that every instruction set gives the same bits (blocks/blocks_plain.c). */
enum { OTHER_BLOCKS_256, OTHER_BLOCKS_AVX2, OTHER_BLOCKS }; /* of a newer set's table */

struct cpu_blocks {
    const char *name;       /* for the log: "int8, avx2" */
    const char *codes_name; /* the same of codes whose scales are apart */
    const char *way;        /* among ways with the same sums: "avx2" (ways/block_ways.h) */
    /* Quantise a row of n floats, a multiple of 32, to every n_x-th of
     * out[n_x * div_ceil(n, 256)]. */
    void (*quantise)(struct act_block *out, int32_t n_x, const float *x, int32_t n);
    /* sum[w * n_x + x] = row w . x over n values, x [div_ceil(n, 256)][n_x] with n_x <=
     * TILE_ROWS; w->dtype and w->first do not count. By format; NULL for plain ones.
     * Where scales are apart n is any number, and x is zero-padded. */
    void (*dots[WEIGHT_FORMATS])(float *sum, const struct dot_rows *w, int32_t n,
                                 const struct act_block *x, int32_t n_x,
                                 const struct prefetch *ahead);
};

/* Panels of rows in blocks of one format, unpacked, and tiles of quantised rows of x:
 * the same sums as those of cpu_blocks, bit for bit, faster where rows of x are many.
 * Panels and tiles lie at multiples of 64 bytes; what is in them is the functions'
 * own. */
struct cpu_code_panels {
    int32_t tile_rows; /* rows of x in a tile, at most; up to CODE_TILE_ROWS */
    int32_t from;      /* rows of codes of x, from which panels are faster than cpu_blocks */
    bool wide;         /* codes take two bytes, in panels and in tiles */
    int32_t digits;    /* bytes of a code in panels alone, where they are more than 1; else 0 */
    /* Unpack CODE_PANEL_ROWS rows of n columns; the rows `ahead` bytes behind them are
     * prefetched. NULL: no panels for this machine. */
    void (*pack_rows)(void *panel, const void *const *row, int32_t n, int64_t ahead);
    /* The same of rows of codes of format f whose scales are apart, that share these
     * panels and tiles (codes_panels_of). n is any number. */
    void (*pack_apart)(void *panel, enum weight_format_id f, const void *const *row,
                       const struct row_scales *scales, int32_t n, int64_t ahead);
    /* Quantise rows of n floats: n_x <= tile_rows rows of codes, `planes` one behind
     * the other of each row of x. */
    void (*pack_x)(void *tile, enum weight_format_id f, const float *const *x, int32_t n_x,
                   int32_t n, int32_t planes);
    /* sum[x * stride + w] = row x . row w over n columns, of all rows of the panel and
     * of the tile's n_x. Rows of sum up to a multiple of four, or to tile_rows, may be
     * written. */
    void (*dots)(float *sum, int32_t stride, enum weight_format_id f, const void *panel,
                 const void *tile, int32_t n_x, int32_t n);
};

/* Bytes of a panel that belong to one group of each row, and of a tile of n_x rows. */
static inline int64_t code_panel_entry(int32_t group, bool minima)
{
    return CODE_PANEL_ROWS * (group + 4 + (minima ? 4 : 0));
}

static inline int64_t code_tile_entry(int32_t group, int32_t n_x)
{
    return n_x * (group + 8);
}

/* Bytes of a tile of p->tile_rows rows, and of a panel, of n columns; they are those of
 * format `as`. */
int64_t cpu_code_tile_bytes(const struct cpu_code_panels *p, enum weight_format_id as, int32_t n);
int64_t cpu_code_panel_bytes(const struct cpu_code_panels *p, enum weight_format_id as, int32_t n);

/* Cache lines of the next panel's stored rows, prefetched a few with every tile. */
struct line_prefetch {
    const char *at;    /* the next line */
    int32_t left;      /* lines still to be prefetched */
    int32_t per_tile;  /* lines with every tile */
    int32_t in_row;    /* lines of the current row done */
    int32_t row_lines; /* lines of each row */
    int64_t skip;      /* bytes from the end of a row's last line to the next row */
};

/* The same sums as cpu_tiles takes, bit for bit, faster where rows of x are many. The
 * order of elements in a panel and in packed x is the instruction set's own. */
struct cpu_panels {
    int32_t k_block; /* as in cpu_tiles; 0: no panels for this machine */
    int32_t rows;    /* stored rows of w in a panel */
    int32_t from;    /* rows of x, from which panels are faster than tiles */
    /* Elements [first, first + n) of `rows` rows of type t; n is a multiple of
     * TILE_CHUNK. panel: n * rows + PANEL_SLACK floats. */
    void (*pack_rows)(float *panel, const void *const *row, int64_t first, int32_t n, enum dtype t);
    /* Pack tile `tile` of n_tiles: n_x <= TILE_ROWS rows of n floats, zero-padded to
     * `padded`. out holds all tiles: n_tiles * padded * TILE_ROWS + PANEL_SLACK
     * floats. */
    void (*pack_x)(float *out, int32_t tile, int32_t n_tiles, const float *const *x, int32_t n_x,
                   int32_t n, int32_t padded, enum dtype t);
    /* sum [count][TILE_ROWS][rows] = packed x . panel over n elements of type t, for
     * the `count` <= PANEL_TILES tiles of n_tiles from `tile` on, a multiple of
     * PANEL_TILES; prefetches the next lines of `ahead`. Rows of sum up to
     * PANEL_TILES * TILE_ROWS may be written. */
    void (*dots)(float *sum, const float *panel, const float *x, int32_t tile, int32_t count,
                 int32_t n_tiles, int32_t n, enum dtype t, struct line_prefetch *ahead);
};

/* Keys and values of a tile of attention over a cache of bfloat16, in groups of
 * KEY_GROUP. */
struct attention_tile {
    int32_t first;  /* cache index of its first key */
    int32_t lo, hi; /* groups [lo, hi) are seen by some row */
    /* [KEY_GROUP][dim, zero-padded to a multiple of 32], by group */
    const uint16_t *key[TILE_KEYS / KEY_GROUP];
    const uint16_t *value[TILE_KEYS / KEY_GROUP]; /* likewise; what no row sees is 0 */
};

/* Rows of queries that share a KV head. */
struct attention_rows {
    const void *query; /* packed */
    const int32_t *at; /* [n] cache indices of their tokens, ascending */
    int32_t n;         /* at most cpu_attention.rows */
    int32_t dim;       /* of a head */
    int32_t window;    /* 0: none */
    float softcap;     /* 0: none */
};

/* Attention over a cache of bfloat16 by an instruction set that multiplies tiles. The
 * state of some rows: per row the greatest score in units of ln 2, the sum of weights,
 * and the weighted sum of values in an order of its own; [rows] and [rows] floats and
 * rows * dim. Heads have a multiple of 16 dimensions. */
struct cpu_attention {
    int32_t rows;                         /* of a state, at most; 0: the functions are missing */
    int64_t (*query_floats)(int32_t dim); /* of packed queries */
    /* Pack n rows of queries, times `scale`. `to` lies at a multiple of 64 bytes. */
    void (*pack)(void *to, const float *const *q, int32_t n, int32_t dim, float scale);
    /* Fold a tile into the state. Queries were packed with the scale of scores, times
     * log2(e) where there is no soft cap. */
    void (*fold)(float *state, const struct attention_rows *r, const struct attention_tile *t);
    /* into = the state over the keys of both. */
    void (*merge)(float *into, const float *from, int32_t n, int32_t dim);
    /* out[row] [dim] = scale[row] * the sum of values. */
    void (*put)(float *const *out, const float *state, const float *scale, int32_t n, int32_t dim);
};

struct cpu_kernels {
    /* ---- row functions; `out` may be an input ---- */

    /* out = norm(x). */
    void (*norm)(float *out, const float *x, int32_t n, const struct norm *k);
    void (*add)(float *x, const float *y, int32_t n); /* x += y */
    /* out = act(gate) * up. */
    void (*gate)(float *out, const float *gate, const float *up, int32_t n, enum activation act);
    /* linear's epilogue: out = act(sum + bias) + residual; bias and residual may be
     * NULL. */
    void (*epilogue)(float *out, const float *sum, const float *bias, const float *residual,
                     int32_t n, enum activation act);
    /* n elements of type t to float32, times `scale`. */
    void (*load)(float *out, const void *x, enum dtype t, int32_t n, float scale);
    /* n float32 to elements of type t. */
    void (*store)(void *out, enum dtype t, const float *x, int32_t n);
    /* Rotate the pairs (i, half + i) of a head; cos_sin: `half` cosines, then as many
     * sines. */
    void (*rotate)(float *head, const float *cos_sin, int32_t half);
    struct row_scan (*scan)(const float *x, int32_t n);      /* greatest, and whether valid */
    double (*sum_exp)(const float *x, int32_t n, float max); /* sum of exp(x - max) */
    /* The tokens with z > least and a mass above 0, by ascending id; *ret_total is the
     * mass of all n. The same bits on every machine (kernels/noise.h). */
    int32_t (*survivors)(struct cpu_survivor *out, const float *logits, int32_t n, float max,
                         float inv_temperature, float least, uint64_t *ret_total);
    /* sum [n][n_x], of cpu_tiles' dots, to n_x rows of n, `stride` floats apart. */
    void (*transpose_sums)(float *out, int32_t stride, const float *sum, int32_t n, int32_t n_x);

    /* ---- attention, TILE_KEYS keys at a time; NULL in the plain table ---- */

    /* out [dim][TILE_KEYS] from keys of type t. */
    void (*transpose_keys)(float *out, const void *const *key, int32_t dim, enum dtype t);
    /* score [rows][TILE_KEYS] = scale * q [rows][dim] . keys [dim][TILE_KEYS]. */
    void (*scores)(float *score, const float *const *q, int32_t rows, const float *keys,
                   int32_t dim, float scale);
    /* Online softmax of one row: fold its scores [lo, hi) into the running maximum and
     * sum; s becomes the weights (0 outside [lo, hi)). Returns the factor by which what
     * was accumulated before has to be scaled. */
    float (*softmax)(float *s, int32_t lo, int32_t hi, float *max, float *sum);
    /* acc [rows][dim] = acc * keep[row] + sum over j in [lo, hi) of p[row][j] *
     * value_j, values of type t. */
    void (*accumulate)(float *acc, int32_t dim, const float *keep, const float *p, int32_t rows,
                       const void *const *value, int32_t lo, int32_t hi, enum dtype t);
    struct cpu_attention attention;

    /* ---- linear ---- */

    struct cpu_tiles linear;  /* k_block 0: plain loops */
    struct cpu_panels panels; /* k_block 0: tiles however many rows */
    /* the same of rows of bfloat16 */
    struct cpu_tiles linear_bf16;
    struct cpu_panels panels_bf16;
    struct cpu_blocks blocks;
    /* Others with the same sums, and the ones that formats have in the place of
     * `blocks`, for one row of codes of x and for several: 0: none; i: other[i - 1]. */
    struct cpu_blocks other[OTHER_BLOCKS];
    uint8_t by_other[WEIGHT_FORMATS][2];
    struct cpu_code_panels code_panels[WEIGHT_FORMATS]; /* by format */
};

/* Those of rows of type t. */
static inline const struct cpu_tiles *cpu_tiles_of(const struct cpu_kernels *k, enum dtype t)
{
    return t == DTYPE_BF16 ? &k->linear_bf16 : &k->linear;
}

static inline const struct cpu_panels *cpu_panels_of(const struct cpu_kernels *k, enum dtype t)
{
    return t == DTYPE_BF16 ? &k->panels_bf16 : &k->panels;
}

/* Those that multiply n_x rows of codes of x with weights of format f. */
static inline const struct cpu_blocks *cpu_blocks_of(const struct cpu_kernels *k,
                                                     enum weight_format_id f, int32_t n_x)
{
    uint8_t other = k->by_other[f][n_x > 1];

    return other > 0 ? &k->other[other - 1] : &k->blocks;
}

/* The best functions for an instruction set that the machine has; `way` counts for
 * CPU_AVX512_BF16, few and many rows of x alike: both have the same sums. */
void cpu_kernels_for(struct cpu_kernels *k, enum cpu_isa isa, enum cpu_bf16 way);
/* Each sets the functions it has and leaves the others. */
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
void cpu_tiles_amx(struct cpu_kernels *k);       /* of bfloat16; after the other tiles */
void cpu_panels_amx_bf16(struct cpu_kernels *k); /* after cpu_tiles_amx */
void cpu_attention_amx(struct cpu_kernels *k);
void cpu_blocks_plain(struct cpu_kernels *k);
/* Those of codes whose scales are apart; each after the other formats'. */
void cpu_codes_plain(struct cpu_kernels *k);
void cpu_codes_avx2(struct cpu_kernels *k);
void cpu_codes_avx512vnni(struct cpu_kernels *k);
/* FP8 in the place of the last; needs VBMI. */
void cpu_codes_vbmi_avx512vnni(struct cpu_kernels *k);
void cpu_blocks_avx2(struct cpu_kernels *k);
void cpu_blocks_avx512vnni(struct cpu_kernels *k);
void cpu_blocks_256_avx512vnni(struct cpu_kernels *k); /* to `other` */
/* Q4_K in the place of the last; needs GFNI. */
void cpu_blocks_gfni_avx512vnni(struct cpu_kernels *k);
void cpu_code_panels_avx2(struct cpu_kernels *k);
void cpu_panels_avx512vnni(struct cpu_kernels *k); /* of codes */
void cpu_panels_amx(struct cpu_kernels *k);        /* after cpu_panels_avx512vnni */
void cpu_blocks_neon(struct cpu_kernels *k);

#endif
