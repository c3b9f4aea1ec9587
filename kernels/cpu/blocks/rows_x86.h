/* The frame of products with blocks: every row of w with a tile of x, 256 values at a
 * time. A file includes it once, after unpack_x86.h and after defining
 *     struct sums              accumulators of n_x rows of x
 *     clear_sums(sums, n_x)
 *     add_block(sums, f, s, x, n_x, groups)
 *                              the 256 values at s, or their first `groups` groups, an
 *                              even number of them
 *     put_sums(out, sums, f, n_x)
 * which are inlined with constant f and n_x.
 */
#ifdef INLINE

/* The last groups of a row: their number is a constant of what is inlined, so that it
 * computes no others. */
INLINE void add_rest(struct sums *sums, const enum weight_format_id f, const uint8_t *s,
                     const struct act_block *x, const int n_x, int32_t groups)
{
    if (groups == 2) {
        add_block(sums, f, s, x, n_x, 2);
    } else if (groups == 4) {
        add_block(sums, f, s, x, n_x, 4);
    } else if (groups == 6) {
        add_block(sums, f, s, x, n_x, 6);
    } else {
        add_block(sums, f, s, x, n_x, GROUPS);
    }
}

INLINE void dot_row(float *out, const enum weight_format_id f, const uint8_t *row, int32_t n,
                    const struct act_block *x, const int n_x, int64_t ahead)
{
    struct sums sums;
    uint8_t last[FORMAT_BLOCK_BYTES_MAX] = {0};
    int32_t at = 0;

    clear_sums(&sums, n_x);
    for (; at + 256 <= n; at += 256, row += bytes_of(f), x += n_x) {
        for (int line = 0; line < bytes_of(f) && ahead != 0; line += 64) {
            __builtin_prefetch(row + ahead + line, 0, 2);
        }
        add_block(&sums, f, row, x, n_x, GROUPS);
    }
    if (at < n) { /* blocks of 32: the rest, with zeros up to an even number */
        int32_t groups = (n - at) / 32;
        if (groups % 2 != 0) {
            memcpy(last, row, (size_t)(groups * (bytes_of(f) / GROUPS)));
            row = last;
            groups++;
        }
        add_rest(&sums, f, row, x, n_x, groups);
    }
    put_sums(out, &sums, f, n_x);
}

INLINE void dot_rows(float *sum, const struct dot_rows *w, const enum weight_format_id f, int32_t n,
                     const struct act_block *x, const int n_x, const struct prefetch *ahead)
{
    for (int32_t i = 0; i < w->n; i++) {
        bool fetches =
            ahead->period == 1 || (ahead->period > 1 && i % ahead->period == ahead->phase);
        dot_row(sum + i * n_x, f, w->row[i], n, x, n_x, fetches ? ahead->distance : 0);
    }
}

INLINE void dots_of(float *sum, const struct dot_rows *w, const enum weight_format_id f, int32_t n,
                    const struct act_block *x, int32_t n_x, const struct prefetch *ahead)
{
    switch (n_x) {
    case 1:
        dot_rows(sum, w, f, n, x, 1, ahead);
        break;
    case 2:
        dot_rows(sum, w, f, n, x, 2, ahead);
        break;
    case 3:
        dot_rows(sum, w, f, n, x, 3, ahead);
        break;
    default:
        dot_rows(sum, w, f, n, x, 4, ahead);
        break;
    }
}

#define DOTS(NAME)                                                                                \
    static void dots_##NAME(float *sum, const struct dot_rows *w, int32_t n,                      \
                            const struct act_block *x, int32_t n_x, const struct prefetch *ahead) \
    {                                                                                             \
        dots_of(sum, w, FORMAT_##NAME, n, x, n_x, ahead);                                         \
    }
EACH_BLOCK_FORMAT(DOTS)

#define ENTRY(NAME) [FORMAT_##NAME] = dots_##NAME,

#endif
