/* See groups.h. */
#include "kernels/cuda/quant/groups.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/weight_pieces.h"

enum {
    GROUP = 32,           /* columns of a word */
    TOP_EXPONENT = 15,    /* the greatest scale of a row is below 2^15 */
    LEAST_EXPONENT = -90, /* of a row's greatest scale; lesser ones count as zero */
};

/* Beyond fp16 the codes of a group are nothing beside its minimum. */
static const float MOST_ZERO = 60000.0f;

/* 32 columns of a row. */
struct group {
    uint8_t code[GROUP];
    float scale[2]; /* of either half */
    float zero;
};

/* How the codes of a format lie: `bias` is added to what its blocks unpack to, and
 * makes up most of the zero point. */
static const struct block_way {
    enum groups_kind kind;
    bool halves;
    int32_t bias;
} BLOCKS[WEIGHT_FORMATS] = {
    [FORMAT_Q4_0] = {GROUPS_4, false, 8},        [FORMAT_Q4_1] = {GROUPS_4, false, 0},
    [FORMAT_Q4_K] = {GROUPS_4, false, 0},        [FORMAT_Q3_K] = {GROUPS_4, true, GROUPS_ZERO_4},
    [FORMAT_IQ4_NL] = {GROUPS_LEVELS, false, 0}, [FORMAT_IQ4_XS] = {GROUPS_LEVELS, false, 0},
    [FORMAT_Q5_0] = {GROUPS_8, false, 16},       [FORMAT_Q5_1] = {GROUPS_8, false, 0},
    [FORMAT_Q5_K] = {GROUPS_8, false, 0},        [FORMAT_Q8_0] = {GROUPS_8, false, GROUPS_ZERO_8},
    [FORMAT_MXFP4] = {GROUPS_8, false, 16},      [FORMAT_Q6_K] = {GROUPS_8, true, GROUPS_ZERO_8},
};

/* ---- what suits ---- */

/* Columns that share a scale in the file. */
static int32_t columns_of(const struct weight_piece *p)
{
    return p->scales.group_cols > 0 ? MIN(p->scales.group_cols, p->cols) : p->cols;
}

/* Whether integers with scales apart suit; in groups of 16 they have no zero points. */
static const char *integers_suit(const struct weight_desc *d, struct groups_layout *ret)
{
    bool zeros = false;

    ret->kind = d->piece[0].format->id == FORMAT_INT4 ? (int32_t)GROUPS_4 : (int32_t)GROUPS_8;
    for (int32_t i = 0; i < d->n_pieces; i++) {
        const struct weight_piece *p = &d->piece[i];
        int32_t n = columns_of(p);
        zeros |= p->scales.zero != NULL;
        ret->halves |= n % GROUP != 0 && n != p->cols;
        if (n % (GROUP / 2) != 0 && n != p->cols) {
            return "groups of no multiple of 16 columns";
        }
    }
    return ret->halves && zeros ? "groups of 16 columns with zero points" : NULL;
}

static const char *why_not(const struct weight_desc *d, struct groups_layout *ret)
{
    const struct weight_format *f = d->n_pieces > 0 ? d->piece[0].format : NULL;

    if (!f || d->experts) {
        return "no kernel multiplies them";
    }
    bool embeds = d->kind == WEIGHT_EMBEDDING && !d->tied_head;
    if (d->kind != WEIGHT_EMBEDDING && d->kind != WEIGHT_LINEAR) {
        return "no product reads them";
    }
    if (d->dtype != DTYPE_BF16) {
        return "activations that are not bfloat16";
    }
    if (d->cols % 64 != 0) {
        return "columns that are no multiple of 64";
    }
    if (d->rows % QUANT_TILE_ROWS != 0 && !embeds) {
        return "rows that are no multiple of 64";
    }
    if (f->id == FORMAT_INT4 || f->id == FORMAT_INT8) {
        return integers_suit(d, ret);
    }
    ret->kind = (int32_t)BLOCKS[f->id].kind;
    ret->halves = BLOCKS[f->id].halves;
    return ret->kind == GROUPS_NONE ? "no kernel multiplies them" : NULL;
}

bool groups_layout_of(const struct weight_desc *d, struct groups_layout *ret, const char **ret_why)
{
    struct groups_layout l = {.rows = d->rows, .cols = d->cols};
    const char *why = why_not(d, &l);

    if (why) {
        *ret_why = why;
        return false;
    }
    bool bytes = l.kind == GROUPS_8;
    l.segments =
        (int32_t)div_ceil(d->cols, GROUPS_COLS) * (bytes ? GROUPS_COLS / GROUPS_COLS_8 : 1);
    l.bytes = bytes ? GROUPS_BYTES_8 : GROUPS_BYTES_4;
    *ret = l;
    return true;
}

/* ---- a row of the file ---- */

/* A group whose values are all -min. */
static void set_constant(struct group *g, float min)
{
    memset(g->code, 0, sizeof(g->code));
    g->scale[0] = g->scale[1] = min;
    g->zero = 1;
}

static void read_blocks(const struct weight_piece *p, int32_t row, struct group *g)
{
    const struct weight_format *f = p->format;
    const struct block_way *way = &BLOCKS[f->id];
    const uint8_t *block = (const uint8_t *)p->data + row * weight_format_bytes(f, p->stride);
    uint8_t place[256] = {0}; /* of each level, plus 128 */
    struct weight_codes c;

    for (int i = 0; i < 16; i++) {
        place[weight_levels_iq4[i] + 128] = (uint8_t)i;
    }
    for (int32_t at = 0; at < p->cols; at += f->block_values, block += f->block_bytes) {
        f->unpack(block, &c);
        for (int32_t i = 0; i < f->block_values; i += GROUP, g++) {
            float scale = c.scale[i / FORMAT_GROUP], min = c.min[i / FORMAT_GROUP];
            for (int32_t j = 0; j < GROUP; j++) {
                g->code[j] = way->kind == GROUPS_LEVELS ? place[c.code[i + j] + 128]
                                                        : (uint8_t)(c.code[i + j] + way->bias);
            }
            g->scale[0] = scale;
            g->scale[1] = c.scale[i / FORMAT_GROUP + 1];
            g->zero = (float)way->bias + (min != 0 ? min / scale : 0);
            if (min != 0 && !(fabsf(min) < MOST_ZERO * fabsf(scale))) {
                set_constant(g, min);
            }
        }
    }
}

static void read_integers(const struct weight_piece *p, int32_t row, struct group *g)
{
    const struct weight_scales *s = &p->scales;
    bool bytes = p->format->id == FORMAT_INT8;
    const uint8_t *codes =
        (const uint8_t *)p->data + row * weight_format_bytes(p->format, p->stride);
    int32_t n = columns_of(p), bias = bytes ? GROUPS_ZERO_8 : 0;
    int64_t group = s->group_rows > 0 ? row / s->group_rows : 0;

    for (int32_t at = 0; at < p->cols; at += GROUP, g++) {
        const uint8_t *zero = s->zero ? s->zero + group * s->zero_stride + at / n : NULL;
        for (int32_t j = 0; j < GROUP; j++) {
            int32_t col = at + j;
            g->code[j] = bytes ? (uint8_t)(codes[col] ^ 0x80)
                               : (uint8_t)(codes[col / 2] >> (col % 2 * 4) & 15);
        }
        for (int h = 0; h < 2; h++) {
            g->scale[h] =
                s->factor * weight_scale_load(s, group * s->stride + (at + h * (GROUP / 2)) / n);
        }
        g->zero = (float)(bias + (!zero   ? (bytes ? 0 : GROUPS_ZERO_4)
                                  : bytes ? (int8_t)*zero
                                          : *zero));
    }
}

/* ---- packing ---- */

/* The nearest fp16, ties to even; not beyond its greatest. */
static uint16_t f16_of(float f)
{
    uint16_t sign = signbit(f) ? 0x8000 : 0;
    float size = fminf(fabsf(f), 65504.0f);
    int e = size > 0 ? ilogbf(size) : -14;

    if (e < -14) {
        e = -14;
    }
    /* in units of the last place; a carry makes the next exponent */
    uint32_t n = (uint32_t)nearbyintf(ldexpf(size, 10 - e));
    return (uint16_t)(sign | (n + ((uint32_t)(e + 14) << 10)));
}

static float row_factor(const struct group *g, int32_t n)
{
    float most = 0;
    int e;

    for (int32_t i = 0; i < n; i++) {
        most = fmaxf(most, fmaxf(fabsf(g[i].scale[0]), fabsf(g[i].scale[1])));
    }
    if (most == 0) {
        return 1;
    }
    frexpf(most, &e);
    return ldexpf(1, MAX(e, LEAST_EXPONENT) - TOP_EXPONENT);
}

/* The words of a chunk, the second one of 32 columns of eight bits. */
static void chunk_words(enum groups_kind kind, const uint8_t *code, uint32_t word[4])
{
    for (int i = 0; i < 4; i++) {
        word[i] = 0;
        for (int j = 0; j < 8; j++) {
            int col = kind == GROUPS_4 ? 2 * i + j % 4 * 8 + j / 4 : 2 * i + j % 2 + j / 2 * 8;
            int bits = kind == GROUPS_8 ? 8 : 4;
            if (j * bits < 32) {
                word[i] |= (uint32_t)code[col] << (j * bits);
            }
        }
    }
}

static void store_group(const struct groups_layout *l, const struct group *g, float factor,
                        int32_t row, int32_t col, uint8_t *tile)
{
    int32_t cols = l->kind == GROUPS_8 ? GROUPS_COLS_8 : GROUPS_COLS_4, in = col % cols,
            each = cols / 16; /* columns of a chunk */
    uint8_t *segment = tile + (int64_t)(col / cols) * QUANT_TILE_ROWS * l->bytes;
    uint32_t lower = f16_of(l->halves ? g->scale[1] / factor : g->zero),
             word = (uint32_t)f16_of(g->scale[0] / factor) << 16 | lower, words[4];

    memcpy(segment + QUANT_TILE_ROWS * GROUPS_CODES + (in / GROUP * QUANT_TILE_ROWS + row) * 4,
           &word, sizeof(word));
    for (int32_t i = 0; i < GROUP; i += each) {
        chunk_words((enum groups_kind)l->kind, g->code + i, words);
        memcpy(segment + row * GROUPS_CODES + (((in + i) / each) ^ (row & 7)) * 16, words,
               sizeof(words));
    }
}

int groups_pack_tile(const struct weight_desc *d, const struct groups_layout *l, int32_t first_row,
                     uint8_t *out, float *factor)
{
    int32_t n = d->cols / GROUP;
    struct group *g = malloc((size_t)n * sizeof(*g));

    if (!g) {
        return ERR_NOMEM;
    }
    memset(out, 0, (size_t)groups_tile_bytes(l));
    for (int32_t i = 0; i < QUANT_TILE_ROWS; i++) {
        int32_t row;
        factor[i] = 1;
        if (first_row + i >= d->rows) {
            continue;
        }
        const struct weight_piece *p = weight_piece_of(d, first_row + i, &row);
        (weight_format_has_scales(p->format) ? read_integers : read_blocks)(p, row, g);
        factor[i] = row_factor(g, n);
        for (int32_t j = 0; j < n; j++) {
            store_group(l, &g[j], factor[i], i, j * GROUP, out);
        }
    }
    free(g);
    return 0;
}

/* ---- unpacking ---- */

/* The code of a column of a segment, without its zero point. */
static float code_at(const struct groups_layout *l, const uint8_t *codes, int32_t row, int32_t in)
{
    int32_t each = l->kind == GROUPS_8 ? 16 : 32, col = in % each;
    int i = col % 8 / 2;
    const uint8_t *chunk = codes + row * GROUPS_CODES + ((in / each) ^ (row & 7)) * 16;
    uint32_t word;

    memcpy(&word, chunk + i * 4, sizeof(word));
    if (l->kind == GROUPS_8) {
        return (float)(word >> (col / 8 * 16 + col % 2 * 8) & 255);
    }
    if (l->kind == GROUPS_4) {
        return (float)(word >> (col / 8 * 4 + col % 2 * 16) & 15);
    }
    return (float)(weight_levels_iq4[word >> (col / 8 * 8 + col % 2 * 4) & 15] + GROUPS_ZERO_8);
}

void groups_unpack_row(const struct groups_layout *l, const uint8_t *tile, float factor,
                       int32_t row_in_tile, float *out)
{
    int32_t cols = l->kind == GROUPS_8 ? GROUPS_COLS_8 : GROUPS_COLS_4;
    float fixed = l->kind == GROUPS_4 ? GROUPS_ZERO_4 : GROUPS_ZERO_8;

    for (int32_t col = 0; col < l->cols; col++) {
        const uint8_t *segment = tile + (int64_t)(col / cols) * QUANT_TILE_ROWS * l->bytes;
        const uint8_t *word = segment + QUANT_TILE_ROWS * GROUPS_CODES +
                              (col % cols / GROUP * QUANT_TILE_ROWS + row_in_tile) * 4;
        bool second = l->halves && col % GROUP >= GROUP / 2;
        float scale = weight_format_f16(second ? word : word + 2);
        float zero = l->halves || l->kind == GROUPS_LEVELS ? fixed : weight_format_f16(word);
        out[col] = factor * scale * (code_at(l, segment, row_in_tile, col % cols) - zero);
    }
}
