/* See groups.h. */
#include "kernels/cuda/quant/groups.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/weight_pieces.h"

/* ---- what suits ---- */

/* The form of pieces that are of one format. */
static const char *form_of(const struct weight_desc *d, struct group_form *ret)
{
    const char *why = NULL;
    bool halves = false;

    for (int32_t i = 0; i < d->n_pieces && !why; i++) {
        why = group_form_of(&d->piece[i], ret);
        halves |= ret->halves;
        why = !why && i > 0 && halves != ret->halves ? "groups of 16 columns and others" : why;
    }
    return why;
}

static const char *why_not(const struct weight_desc *d, struct group_form *ret)
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
    return form_of(d, ret);
}

bool groups_layout_of(const struct weight_desc *d, struct groups_layout *ret, const char **ret_why)
{
    struct groups_layout l = {.rows = d->rows, .cols = d->cols};
    const char *why = why_not(d, &l.form);

    if (why) {
        *ret_why = why;
        return false;
    }
    bool bytes = l.form.kind == GROUPS_8;
    l.segments =
        (int32_t)div_ceil(d->cols, GROUPS_COLS) * (bytes ? GROUPS_COLS / GROUPS_COLS_8 : 1);
    l.bytes = bytes ? GROUPS_BYTES_8 : GROUPS_BYTES_4;
    *ret = l;
    return true;
}

/* ---- packing ---- */

/* The words of a chunk, the second one of 32 columns of eight bits. */
static void chunk_words(int32_t kind, const uint8_t *code, uint32_t word[4])
{
    bool nibbles = kind == GROUPS_4 || kind == GROUPS_2;

    for (int i = 0; i < 4; i++) {
        word[i] = 0;
        for (int j = 0; j < 8; j++) {
            int col = nibbles ? 2 * i + j % 4 * 8 + j / 4 : 2 * i + j % 2 + j / 2 * 8;
            int bits = kind == GROUPS_8 ? 8 : 4;
            if (j * bits < 32) {
                word[i] |= (uint32_t)code[col] << (j * bits);
            }
        }
    }
}

static void store_group(const struct groups_layout *l, const struct group_cols *g, uint32_t word,
                        int32_t row, int32_t col, uint8_t *tile)
{
    int32_t cols = l->form.kind == GROUPS_8 ? GROUPS_COLS_8 : GROUPS_COLS_4, in = col % cols,
            each = cols / 16; /* columns of a chunk */
    uint8_t *segment = tile + (int64_t)(col / cols) * QUANT_TILE_ROWS * l->bytes;
    uint32_t words[4];

    memcpy(segment + QUANT_TILE_ROWS * GROUPS_CODES + (in / GROUP_COLS * QUANT_TILE_ROWS + row) * 4,
           &word, sizeof(word));
    for (int32_t i = 0; i < GROUP_COLS; i += each) {
        chunk_words(l->form.kind, g->code + i, words);
        memcpy(segment + row * GROUPS_CODES + (((in + i) / each) ^ (row & 7)) * 16, words,
               sizeof(words));
    }
}

int groups_pack_tile(const struct weight_desc *d, const struct groups_layout *l, int32_t first_row,
                     uint8_t *out, float *factor)
{
    int32_t n = d->cols / GROUP_COLS;
    struct group_cols *g = malloc((size_t)n * sizeof(*g));

    if (!g) {
        return ERR_NOMEM;
    }
    memset(out, 0, (size_t)groups_tile_bytes(l));
    for (int32_t i = 0; i < QUANT_TILE_ROWS; i++) {
        factor[i] = 1;
        if (first_row + i >= d->rows) {
            continue;
        }
        group_cols_read(d, first_row + i, &l->form, g);
        factor[i] = group_row_factor(g, n);
        for (int32_t j = 0; j < n; j++) {
            store_group(l, &g[j], group_word(&g[j], j, &l->form, factor[i]), i, j * GROUP_COLS,
                        out);
        }
    }
    free(g);
    return 0;
}

/* ---- unpacking ---- */

/* The code of a column of a segment, without its zero point. */
static float code_at(const struct groups_layout *l, const uint8_t *codes, int32_t row, int32_t in)
{
    int32_t kind = l->form.kind, each = kind == GROUPS_8 ? 16 : 32, col = in % each;
    int i = col % 8 / 2;
    const uint8_t *chunk = codes + row * GROUPS_CODES + ((in / each) ^ (row & 7)) * 16;
    uint32_t word;

    memcpy(&word, chunk + i * 4, sizeof(word));
    if (kind == GROUPS_8) {
        return (float)(word >> (col / 8 * 16 + col % 2 * 8) & 255);
    }
    if (kind == GROUPS_LEVELS) {
        return (float)(weight_levels_iq4[word >> (col / 8 * 8 + col % 2 * 4) & 15] + GROUPS_ZERO_8);
    }
    return (float)(word >> (col / 8 * 4 + col % 2 * 16) & 15);
}

void groups_unpack_row(const struct groups_layout *l, const uint8_t *tile, float factor,
                       int32_t row_in_tile, float *out)
{
    int32_t cols = l->form.kind == GROUPS_8 ? GROUPS_COLS_8 : GROUPS_COLS_4;

    for (int32_t col = 0; col < l->cols; col++) {
        const uint8_t *segment = tile + (int64_t)(col / cols) * QUANT_TILE_ROWS * l->bytes;
        int32_t group = col % cols / GROUP_COLS;
        uint32_t word[2]; /* of the group and its neighbour, in their order */
        for (int32_t i = 0; i < 2; i++) {
            memcpy(&word[i],
                   segment + QUANT_TILE_ROWS * GROUPS_CODES +
                       ((group / 2 * 2 + i) * QUANT_TILE_ROWS + row_in_tile) * 4,
                   sizeof(word[i]));
        }
        out[col] = factor * group_value(&l->form, word, group, col % GROUP_COLS >= GROUP_COLS / 2,
                                        code_at(l, segment, row_in_tile, col % cols));
    }
}
