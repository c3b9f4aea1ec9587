/* Times products of weights in blocks with rows of activations. All of it lies in the
 * second-level cache, so that the time is that of the arithmetic, which is what the
 * instruction sets differ in. */
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/ways/block_ways.h"

enum {
    COLS = 2048,
    BLOCKS = COLS / FORMAT_BLOCK_MAX,
    W_ROWS = 64,
    ONE_ROW_RUNS = 8,  /* products in a time, which is read in microseconds */
    FEW_ROWS_RUNS = 4, /* likewise */
    PANEL_X_ROWS = 96, /* of activations, multiplied with a panel */
    PANEL_RUNS = 2,
    BYTE = 0x2c, /* of weights: as any part of a block it makes ordinary numbers */
};

struct block_product {
    _Alignas(64) char w[W_ROWS * BLOCKS * FORMAT_BLOCK_BYTES_MAX];
    _Alignas(64) float x[COLS];
    _Alignas(64) struct act_block act[BLOCKS * TILE_ROWS];
    /* codes may take two bytes, scales and minima lie beside them */
    _Alignas(64) char panel[CODE_PANEL_ROWS * COLS * 4], tile[CODE_TILE_ROWS * COLS * 4];
    _Alignas(64) float sum[MAX(W_ROWS * TILE_ROWS, CODE_PANEL_ROWS *CODE_TILE_ROWS) + 4];
    const void *row[W_ROWS];
    enum weight_format_id format;
};

struct block_product *block_product_new(enum weight_format_id f)
{
    struct block_product *p = aligned_alloc(64, sizeof(*p));
    int64_t row_bytes = weight_format_bytes(weight_format_of(f), COLS);

    if (!p) {
        return NULL;
    }
    memset(p, 0, sizeof(*p));
    memset(p->w, BYTE, sizeof(p->w));
    for (int32_t i = 0; i < COLS; i++) {
        p->x[i] = (float)(i % 17 - 8);
    }
    for (int32_t i = 0; i < W_ROWS; i++) {
        p->row[i] = p->w + i * row_bytes;
    }
    p->format = f;
    return p;
}

void block_product_free(struct block_product *p)
{
    free(p);
}

static double rows_us(struct block_product *p, const struct cpu_blocks *b, int32_t n_x, int runs)
{
    const struct dot_rows w = {.row = p->row, .n = W_ROWS};
    const struct prefetch none = {0};

    for (int32_t i = 0; i < n_x; i++) {
        b->quantise(p->act + i, n_x, p->x, COLS);
    }
    int64_t began = clock_us();
    for (int i = 0; i < runs; i++) {
        b->dots[p->format](p->sum, &w, COLS, p->act, n_x, &none);
    }
    return (double)(clock_us() - began) / runs;
}

static double panels_us(struct block_product *p, const struct cpu_code_panels *k)
{
    const float *x[CODE_TILE_ROWS];
    int32_t tiles = PANEL_X_ROWS / k->tile_rows;

    for (int32_t i = 0; i < k->tile_rows; i++) {
        x[i] = p->x;
    }
    k->pack_x(p->tile, p->format, x, k->tile_rows, COLS, 1);
    int64_t began = clock_us();
    for (int r = 0; r < PANEL_RUNS; r++) {
        k->pack_rows(p->panel, p->row, COLS, 0);
        for (int32_t i = 0; i < tiles; i++) {
            k->dots(p->sum, CODE_PANEL_ROWS, p->format, p->panel, p->tile, k->tile_rows, COLS);
        }
    }
    return (double)(clock_us() - began) / (PANEL_RUNS * tiles * k->tile_rows);
}

double block_product_us(struct block_product *p, enum cpu_block_class class,
                        const struct cpu_blocks *b, const struct cpu_code_panels *panels)
{
    return class == BLOCKS_PANELS    ? panels_us(p, panels)
           : class == BLOCKS_ONE_ROW ? rows_us(p, b, 1, ONE_ROW_RUNS)
                                     : rows_us(p, b, TILE_ROWS, FEW_ROWS_RUNS);
}
