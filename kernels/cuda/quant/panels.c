/* Panels of groups (panels.h), packed by the host. */
#include "kernels/cuda/quant/panels.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/quant/fp4_order.h"
#include "kernels/cuda/quant/groups.h"
#include "kernels/weight_pieces.h"

enum {
    FP4_TOP = 253, /* the byte of the greatest power of two of a row (fp4_scales.h) */
};

/* ---- what suits ---- */

/* The kind that has the groups of two forms; PANELS_NONE: none has. */
static int32_t kind_of_both(const struct group_form *a, const struct group_form *b)
{
    bool whole = a->kind != GROUPS_LEVELS && a->kind != GROUPS_2 && b->kind != GROUPS_LEVELS &&
                 b->kind != GROUPS_2;

    return a->halves != b->halves                       ? (int32_t)GROUPS_NONE
           : a->kind == b->kind                         ? a->kind
           : whole /* four bits are eight with zeros */ ? (int32_t)GROUPS_8
                                                        : (int32_t)GROUPS_NONE;
}

static int32_t panels_of(int32_t groups)
{
    switch (groups) {
    case GROUPS_4:
        return PANELS_GROUPS_4;
    case GROUPS_8:
        return PANELS_GROUPS_8;
    case GROUPS_LEVELS:
        return PANELS_LEVELS;
    default:
        return PANELS_GROUPS_2;
    }
}

/* Whether all pieces are in blocks of MXFP4. */
static bool is_fp4(const struct weight_desc *d)
{
    for (int32_t i = 0; i < d->n_pieces; i++) {
        if (d->piece[i].format->id != FORMAT_MXFP4) {
            return false;
        }
    }
    return true;
}

static const char *pieces_suit(const struct weight_desc *d, struct panels_layout *ret)
{
    for (int32_t i = 0; i < d->n_pieces; i++) {
        const struct weight_piece *p = &d->piece[i];
        struct group_form form;
        if (!p->format) {
            return "experts of which some are no codes";
        }
        const char *why = group_form_of(p, &form);
        if (why) {
            return why;
        }
        if (i == 0) {
            ret->form = form;
        }
        ret->form.kind = kind_of_both(&ret->form, &form);
        if (ret->form.kind == GROUPS_NONE) {
            return "experts of formats whose groups differ";
        }
    }
    return NULL;
}

bool panels_layout_of(const struct weight_desc *d, struct panels_layout *ret, const char **ret_why)
{
    struct panels_layout l = {.cols = d->cols};
    const char *why = d->dtype != DTYPE_BF16             ? "activations that are not bfloat16"
                      : d->rows % (2 * PANEL_ROWS) != 0  ? "rows that are no multiple of 16"
                      : d->cols % (2 * PANEL_GROUP) != 0 ? "columns that are no multiple of 64"
                                                         : pieces_suit(d, &l);

    if (why) {
        *ret_why = why;
        return false;
    }
    l.kind = is_fp4(d) ? (int32_t)PANELS_FP4 : panels_of(l.form.kind);
    *ret = l;
    return true;
}

/* ---- where things lie ---- */

/* The codes of a row's group in a panel, and its word or byte. */
struct panel_at {
    int64_t codes, scale;
};

static struct panel_at place_of(const struct panels_layout *l, int32_t row, int32_t group)
{
    int32_t first = group * PANEL_GROUP / PANEL_COLS * PANEL_COLS, in = group - first / PANEL_GROUP,
            groups = MIN(PANEL_COLS, l->cols - first) / PANEL_GROUP;
    int64_t segment = panel_bytes(first, l->kind), codes = panel_code_bytes(l->kind);

    return (struct panel_at){segment + in * codes + row * (codes / PANEL_ROWS),
                             segment + groups * codes +
                                 (in * PANEL_ROWS + row) * panel_scale_bytes(l->kind)};
}

/* ---- packing ---- */

/* Where column j of eight lies in a word, in bits. */
static int32_t nibble_at(int32_t kind, int32_t j)
{
    return kind == PANELS_LEVELS ? 4 * j : j / 2 * 4 + j % 2 * 16;
}

static void store_codes(int32_t kind, const uint8_t *code, uint8_t *out)
{
    if (kind == PANELS_GROUPS_8) {
        memcpy(out, code, GROUP_COLS);
        return;
    }
    for (int32_t i = 0; i < GROUP_COLS; i += 8, out += 4) {
        uint32_t word = 0;
        for (int32_t j = 0; j < 8; j++) {
            word |= (uint32_t)code[i + j] << nibble_at(kind, j);
        }
        memcpy(out, &word, sizeof(word));
    }
}

static void pack_groups(const struct weight_desc *d, const struct panels_layout *l, int32_t row,
                        struct group_cols *g, uint8_t *panel, int32_t in_panel, float *factor)
{
    int32_t n = l->cols / GROUP_COLS;

    group_cols_read(d, row, &l->form, g);
    *factor = group_row_factor(g, n);
    for (int32_t i = 0; i < n; i++) {
        struct panel_at at = place_of(l, in_panel, i);
        uint32_t word = group_word(&g[i], i, &l->form, *factor);
        store_codes(l->kind, g[i].code, panel + at.codes);
        memcpy(panel + at.scale, &word, sizeof(word));
    }
}

/* ---- blocks of MXFP4 ---- */

/* Codes of two levels' blocks, whose scale is `byte`; that of zero makes them zero. */
static void store_fp4(const struct weight_codes *c, uint8_t byte, uint8_t *out)
{
    uint8_t place[32] = {0}; /* of each level, plus 16 */

    for (int i = 0; i < 16; i++) {
        place[weight_levels_mxfp4[i] + 16] = (uint8_t)i;
    }
    for (int32_t i = 0; i < PANEL_GROUP; i += 8, out += 4) {
        uint32_t word = 0;
        for (int32_t j = 0; j < 8 && byte > 0; j++) {
            word |= fp4_placed(place[c->code[i + j] + 16], j / 2, j % 2 == 1);
        }
        memcpy(out, &word, sizeof(word));
    }
}

static void pack_fp4(const struct weight_desc *d, const struct panels_layout *l, int32_t row,
                     uint8_t *panel, int32_t in_panel, float *factor)
{
    int32_t in_piece, most = 0, n = l->cols / PANEL_GROUP;
    const struct weight_piece *p = weight_piece_of(d, row, &in_piece);
    const struct weight_format *f = p->format;
    const uint8_t *block = (const uint8_t *)p->data + in_piece * weight_format_bytes(f, p->stride);
    struct weight_codes c;

    for (int32_t i = 0; i < n; i++) { /* a block begins with its exponent */
        most = MAX(most, block[(int64_t)i * f->block_bytes]);
    }
    for (int32_t i = 0; i < n; i++, block += f->block_bytes) {
        struct panel_at at = place_of(l, in_panel, i);
        uint8_t byte = (uint8_t)MAX(block[0] - most + FP4_TOP, 0);
        f->unpack(block, &c);
        store_fp4(&c, byte, panel + at.codes);
        panel[at.scale] = byte;
    }
    *factor = ldexpf(1, most - 127);
}

int panels_pack(const struct weight_desc *d, const struct panels_layout *l, int32_t first_row,
                uint8_t *out, float *factor)
{
    struct group_cols *g = malloc((size_t)(l->cols / GROUP_COLS) * sizeof(*g));

    if (!g) {
        return ERR_NOMEM;
    }
    for (int32_t i = 0; i < PANEL_ROWS; i++) {
        if (l->kind == PANELS_FP4) {
            pack_fp4(d, l, first_row + i, out, i, &factor[i]);
        } else {
            pack_groups(d, l, first_row + i, g, out, i, &factor[i]);
        }
    }
    free(g);
    return 0;
}

/* ---- unpacking ---- */

static float fp4_value(const uint8_t *codes, uint8_t byte, int32_t col)
{
    static const float VALUES[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    uint32_t word;

    memcpy(&word, codes + col / 8 * 4, sizeof(word));
    word &= fp4_placed(15, col % 8 / 2, col % 2 == 1);
    for (uint32_t code = 0; code < 16; code++) {
        if (word == fp4_placed(code, col % 8 / 2, col % 2 == 1)) {
            return ldexpf(code & 8 ? -VALUES[code & 7] : VALUES[code & 7], byte - FP4_TOP);
        }
    }
    return 0;
}

static float code_at(int32_t kind, const uint8_t *codes, int32_t col)
{
    uint32_t word;

    if (kind == PANELS_GROUPS_8) {
        return codes[col];
    }
    memcpy(&word, codes + col / 8 * 4, sizeof(word));
    word = word >> nibble_at(kind, col % 8) & 15;
    return (float)(kind == PANELS_LEVELS ? weight_levels_iq4[word] + GROUPS_ZERO_8 : (int)word);
}

void panels_unpack_row(const struct panels_layout *l, const uint8_t *panel, float factor,
                       int32_t row, float *out)
{
    for (int32_t col = 0; col < l->cols; col++) {
        int32_t group = col / PANEL_GROUP, in = col % PANEL_GROUP;
        const uint8_t *codes = panel + place_of(l, row, group).codes;
        if (l->kind == PANELS_FP4) {
            out[col] = factor * fp4_value(codes, panel[place_of(l, row, group).scale], in);
            continue;
        }
        uint32_t word[2];
        for (int32_t i = 0; i < 2; i++) {
            memcpy(&word[i], panel + place_of(l, row, group / 2 * 2 + i).scale, sizeof(word[i]));
        }
        out[col] = factor * group_value(&l->form, word, group, in >= PANEL_GROUP / 2,
                                        code_at(l->kind, codes, in));
    }
}
