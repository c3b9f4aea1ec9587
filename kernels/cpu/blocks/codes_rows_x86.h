/* The frame of products with codes whose scales are apart: every row of w with a tile
 * of x, 256 values at a time. A file includes it once, after codes_x86.h and after
 * defining
 *     struct sums              accumulators of TILE_ROWS rows of x
 *     struct codes             256 codes of a row
 *     clear_sums(sums, n_x)
 *     unpack(codes, f, s, zero, group)
 *                              the codes at s; zero: NULL, or the zero points of their
 *                              groups, of FORMAT_INT4
 *     add_block(sums, f, codes, scale, min, x, n_x, group, minima)
 *                              their products, with the scales and minima of their groups
 *     put_sums(out, sums, n_x, group)
 * which are inlined with constant f, n_x, group and minima. CODES_FORMATS(X) may be
 * defined as X(name) for each format that is wanted; otherwise all are.
 */
#ifdef INLINE

INLINE void dot_row(float *out, const enum weight_format_id f, const uint8_t *row,
                    const struct row_scales *scales, int32_t n, const struct act_block *x,
                    const int n_x, const int group, const bool minima, struct row_fetch ahead)
{
    bool zeros = f == FORMAT_INT4 && scales->of->zero;
    uint8_t last[FORMAT_BLOCK_MAX];
    struct code_groups of;
    struct codes w;
    struct sums s;

    clear_sums(&s, n_x);
    for (int32_t at = 0; at < n; at += FORMAT_BLOCK_MAX, x += n_x) {
        const uint8_t *codes = row + codes_bytes(f, at);
        int32_t g = at % CODES_SPAN / group;
        fetch_row(ahead, codes, codes_bytes(f, FORMAT_BLOCK_MAX));
        if (n - at < FORMAT_BLOCK_MAX) { /* what follows the row is not read */
            memset(last, 0, sizeof(last));
            codes = memcpy(last, codes, (size_t)codes_bytes(f, n - at));
        }
        if (g == 0) {
            groups_of_span(&of, scales, f, group, at, n);
        }
        unpack(&w, f, codes, zeros ? of.zero + g : NULL, group);
        add_block(&s, f, &w, of.scale + g, of.min + g, x, n_x, group, minima);
    }
    put_sums(out, &s, n_x, group);
}

/* By what the row's scales are of. */
INLINE void dot_any(float *out, const enum weight_format_id f, const uint8_t *row,
                    const struct row_scales *scales, int32_t n, const struct act_block *x,
                    const int n_x, struct row_fetch ahead)
{
    bool wide = codes_group(scales->of) == 32, minima = codes_have_minima(f, scales->of);

    if (f == FORMAT_INT8 && minima && wide) {
        dot_row(out, f, row, scales, n, x, n_x, 32, true, ahead);
    } else if (f == FORMAT_INT8 && minima) {
        dot_row(out, f, row, scales, n, x, n_x, 16, true, ahead);
    } else if (wide) {
        dot_row(out, f, row, scales, n, x, n_x, 32, false, ahead);
    } else {
        dot_row(out, f, row, scales, n, x, n_x, 16, false, ahead);
    }
}

INLINE void dots_of(float *sum, const struct dot_rows *w, const enum weight_format_id f, int32_t n,
                    const struct act_block *x, int32_t n_x, const struct prefetch *ahead)
{
    for (int32_t i = 0; i < w->n; i++, sum += n_x) {
        bool fetches =
            ahead->period == 1 || (ahead->period > 1 && i % ahead->period == ahead->phase);
        struct row_fetch fetch = {.distance = fetches ? ahead->distance : 0, .far = ahead->far};
        switch (n_x) {
        case 1:
            dot_any(sum, f, w->row[i], &w->scales[i], n, x, 1, fetch);
            break;
        case 2:
            dot_any(sum, f, w->row[i], &w->scales[i], n, x, 2, fetch);
            break;
        case 3:
            dot_any(sum, f, w->row[i], &w->scales[i], n, x, 3, fetch);
            break;
        default:
            dot_any(sum, f, w->row[i], &w->scales[i], n, x, 4, fetch);
            break;
        }
    }
}

#ifndef CODES_FORMATS
#define CODES_FORMATS(X) X(FP8) X(INT8) X(INT4) X(FP4)
#endif

#define DOTS(NAME)                                                                                \
    static void dots_##NAME(float *sum, const struct dot_rows *w, int32_t n,                      \
                            const struct act_block *x, int32_t n_x, const struct prefetch *ahead) \
    {                                                                                             \
        dots_of(sum, w, FORMAT_##NAME, n, x, n_x, ahead);                                         \
    }
CODES_FORMATS(DOTS)

static void set_dots(struct cpu_blocks *b)
{
#define SET(NAME) b->dots[FORMAT_##NAME] = dots_##NAME;
    CODES_FORMATS(SET)
}

#endif
