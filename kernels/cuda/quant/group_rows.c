/* Rows of a file as groups of codes (groups.h), which the layouts of them are packed
 * from. */
#include <math.h>
#include <string.h>

#include "kernels/cuda/quant/groups.h"
#include "kernels/weight_pieces.h"

enum {
    TOP_EXPONENT = 15,    /* the greatest scale of a row is below 2^15 */
    LEAST_EXPONENT = -90, /* of a row's greatest scale; lesser ones count as zero */
    Q2_K_SCALE = 80,      /* where a block of Q2_K has those of its nibbles */
    Q2_K_MIN = 82,
};

/* Beyond fp16 the codes of a group are nothing beside its minimum. */
static const float MOST_ZERO = 60000.0f;

/* How the codes of a format lie: `bias` is added to what its blocks unpack to, and
 * makes up most of the zero point. In groups of 16 columns it is all of that, and the
 * kind says which. */
static const struct block_way {
    enum groups_kind kind;
    bool halves;
    int32_t bias;
} BLOCKS[WEIGHT_FORMATS] = {
    [FORMAT_Q4_0] = {GROUPS_4, false, 8},        [FORMAT_Q4_1] = {GROUPS_4, false, 0},
    [FORMAT_Q4_K] = {GROUPS_4, false, 0},        [FORMAT_Q3_K] = {GROUPS_4, true, 0},
    [FORMAT_IQ4_NL] = {GROUPS_LEVELS, false, 0}, [FORMAT_IQ4_XS] = {GROUPS_LEVELS, false, 0},
    [FORMAT_Q5_0] = {GROUPS_8, false, 16},       [FORMAT_Q5_1] = {GROUPS_8, false, 0},
    [FORMAT_Q5_K] = {GROUPS_8, false, 0},        [FORMAT_Q8_0] = {GROUPS_8, false, GROUPS_ZERO_8},
    [FORMAT_MXFP4] = {GROUPS_8, false, 16},      [FORMAT_Q6_K] = {GROUPS_8, true, 0},
    [FORMAT_Q2_K] = {GROUPS_2, true, 0},
};

/* ---- what suits ---- */

/* Columns that share a scale in the file. */
static int32_t columns_of(const struct weight_piece *p)
{
    return p->scales.group_cols > 0 ? MIN(p->scales.group_cols, p->cols) : p->cols;
}

/* Whether integers with scales apart suit; in groups of 16 they have no zero points. */
static const char *integers_suit(const struct weight_piece *p, struct group_form *ret)
{
    int32_t n = columns_of(p);

    ret->kind = p->format->id == FORMAT_INT4 ? (int32_t)GROUPS_4 : (int32_t)GROUPS_8;
    ret->halves = n % GROUP_COLS != 0 && n != p->cols;
    if (n % (GROUP_COLS / 2) != 0 && n != p->cols) {
        return "groups of no multiple of 16 columns";
    }
    return ret->halves && p->scales.zero ? "groups of 16 columns with zero points" : NULL;
}

const char *group_form_of(const struct weight_piece *p, struct group_form *ret)
{
    enum weight_format_id id = p->format->id;

    if (id == FORMAT_INT4 || id == FORMAT_INT8) {
        return integers_suit(p, ret);
    }
    *ret = (struct group_form){.kind = (int32_t)BLOCKS[id].kind, .halves = BLOCKS[id].halves};
    return ret->kind == GROUPS_NONE ? "no kernel multiplies them" : NULL;
}

/* ---- reading ---- */

/* A group whose values are all -min. */
static void set_constant(struct group_cols *g, float min)
{
    memset(g->code, 0, sizeof(g->code));
    g->scale[0] = g->scale[1] = min;
    g->zero = 1;
}

/* What a block of Q2_K multiplies the nibbles of its groups by. */
static void read_nibbles(const uint8_t *block, int32_t col, struct group_cols *g)
{
    g->scale[0] = weight_format_f16(block + Q2_K_SCALE);
    g->scale[1] = weight_format_f16(block + Q2_K_MIN);
    g->nibbles[0] = block[col / FORMAT_GROUP];
    g->nibbles[1] = block[col / FORMAT_GROUP + 1];
}

static int32_t bias_of(const struct weight_format *f, const struct group_form *form)
{
    return form->kind == GROUPS_2   ? 0
           : !form->halves          ? BLOCKS[f->id].bias
           : form->kind == GROUPS_4 ? (int32_t)GROUPS_ZERO_4
                                    : (int32_t)GROUPS_ZERO_8;
}

static void read_blocks(const struct weight_piece *p, int32_t row, const struct group_form *form,
                        struct group_cols *g)
{
    const struct weight_format *f = p->format;
    const uint8_t *block = (const uint8_t *)p->data + row * weight_format_bytes(f, p->stride);
    uint8_t place[256] = {0}; /* of each level, plus 128 */
    struct weight_codes c;
    int32_t bias = bias_of(f, form);

    for (int i = 0; i < 16; i++) {
        place[weight_levels_iq4[i] + 128] = (uint8_t)i;
    }
    for (int32_t at = 0; at < p->cols; at += f->block_values, block += f->block_bytes) {
        f->unpack(block, &c);
        for (int32_t i = 0; i < f->block_values; i += GROUP_COLS, g++) {
            float scale = c.scale[i / FORMAT_GROUP], min = c.min[i / FORMAT_GROUP];
            for (int32_t j = 0; j < GROUP_COLS; j++) {
                g->code[j] = form->kind == GROUPS_LEVELS ? place[c.code[i + j] + 128]
                                                         : (uint8_t)(c.code[i + j] + bias);
            }
            if (form->kind == GROUPS_2) {
                read_nibbles(block, i, g);
                continue;
            }
            g->scale[0] = scale;
            g->scale[1] = c.scale[i / FORMAT_GROUP + 1];
            g->zero = (float)bias + (min != 0 ? min / scale : 0);
            if (min != 0 && !(fabsf(min) < MOST_ZERO * fabsf(scale))) {
                set_constant(g, min);
            }
        }
    }
}

static void read_integers(const struct weight_piece *p, int32_t row, struct group_cols *g)
{
    const struct weight_scales *s = &p->scales;
    bool bytes = p->format->id == FORMAT_INT8;
    const uint8_t *codes =
        (const uint8_t *)p->data + row * weight_format_bytes(p->format, p->stride);
    int32_t n = columns_of(p), bias = bytes ? GROUPS_ZERO_8 : 0;
    int64_t group = s->group_rows > 0 ? row / s->group_rows : 0;

    for (int32_t at = 0; at < p->cols; at += GROUP_COLS, g++) {
        const uint8_t *zero = s->zero ? s->zero + group * s->zero_stride + at / n : NULL;
        for (int32_t j = 0; j < GROUP_COLS; j++) {
            int32_t col = at + j;
            g->code[j] = bytes ? (uint8_t)(codes[col] ^ 0x80)
                               : (uint8_t)(codes[col / 2] >> (col % 2 * 4) & 15);
        }
        for (int h = 0; h < 2; h++) {
            g->scale[h] = s->factor *
                          weight_scale_load(s, group * s->stride + (at + h * (GROUP_COLS / 2)) / n);
        }
        g->zero = (float)(bias + (!zero   ? (bytes ? 0 : GROUPS_ZERO_4)
                                  : bytes ? (int8_t)*zero
                                          : *zero));
    }
}

void group_cols_read(const struct weight_desc *d, int32_t row, const struct group_form *form,
                     struct group_cols *g)
{
    int32_t in_piece;
    const struct weight_piece *p = weight_piece_of(d, row, &in_piece);

    if (weight_format_has_scales(p->format)) {
        read_integers(p, in_piece, g);
    } else {
        read_blocks(p, in_piece, form, g);
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

float group_row_factor(const struct group_cols *g, int32_t n)
{
    float most = 0;
    bool one = true; /* scale, but for its sign */
    int e;

    for (int32_t i = 0; i < n; i++) {
        float first = fabsf(g[i].scale[0]), second = fabsf(g[i].scale[1]);
        one = one && first == second && (i == 0 || first == most);
        most = fmaxf(most, fmaxf(first, second));
    }
    if (most == 0) {
        return 1;
    }
    frexpf(most, &e);
    if (one && e > LEAST_EXPONENT) {
        return ldexpf(most, 1 - TOP_EXPONENT);
    }
    return ldexpf(1, MAX(e, LEAST_EXPONENT) - TOP_EXPONENT);
}

uint32_t group_word(const struct group_cols *g, int32_t i, const struct group_form *form,
                    float factor)
{
    uint32_t upper = f16_of(g->scale[0] / factor);

    if (form->kind == GROUPS_2) {
        upper = f16_of(g->scale[i % 2] / factor);
        return upper << 16 | (uint32_t)g->nibbles[1] << 8 | g->nibbles[0];
    }
    return upper << 16 | f16_of(form->halves ? g->scale[1] / factor : g->zero);
}

/* ---- reading back ---- */

float group_value(const struct group_form *form, const uint32_t word[2], int32_t i, bool second,
                  float code)
{
    const uint8_t *own = (const uint8_t *)&word[i % 2];
    float fixed = form->kind == GROUPS_4 ? GROUPS_ZERO_4 : GROUPS_ZERO_8;

    if (form->kind == GROUPS_2) {
        uint8_t two = own[second];
        return weight_format_f16((const uint8_t *)&word[0] + 2) * (float)(two & 15) * code -
               weight_format_f16((const uint8_t *)&word[1] + 2) * (float)(two >> 4);
    }
    float scale = weight_format_f16(form->halves && second ? own : own + 2);
    float zero = form->halves || form->kind == GROUPS_LEVELS ? fixed : weight_format_f16(own);
    return scale * (code - zero);
}
