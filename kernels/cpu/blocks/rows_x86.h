/* The frame of products with blocks: every row of w with a tile of x, 256 values at a
 * time. A file includes it once, after unpack_x86.h and after defining
 *     ROWS_TOGETHER            rows of w that are read together: 2
 *     PAIRED_ROWS_X            rows of x, up to which registers allow it
 *     struct sums              accumulators of n_x rows of x
 *     clear_sums(sums, n_x)
 *     add_blocks(sums, f, s, n_rows, x, n_x, groups, ahead)
 *                              of each of n_rows rows the 256 values at s[r], or their
 *                              first `groups` groups, an even number, to sums[r];
 *                              what is ahead of them is prefetched
 *     put_sums(out, sums, f, n_x)
 * which are inlined with constant f, n_rows and n_x. ROWS_FORMATS(X) may be defined as
 * X(name) for each format that is wanted; otherwise all are.
 */
#ifdef INLINE

/* The last groups of a row: their number is a constant of what is inlined, so that it
 * computes no others. */
INLINE void add_rest(struct sums *sums, const enum weight_format_id f, const uint8_t *s,
                     const struct act_block *x, const int n_x, int32_t groups)
{
    const struct row_fetch none = {0};

    if (groups == 2) {
        add_blocks(sums, f, &s, 1, x, n_x, 2, none);
    } else if (groups == 4) {
        add_blocks(sums, f, &s, 1, x, n_x, 4, none);
    } else if (groups == 6) {
        add_blocks(sums, f, &s, 1, x, n_x, 6, none);
    } else {
        add_blocks(sums, f, &s, 1, x, n_x, GROUPS, none);
    }
}

/* What follows the last whole span of a row at s, n < 256 values in blocks of 32. */
INLINE void add_end(struct sums *sums, const enum weight_format_id f, const uint8_t *s,
                    const struct act_block *x, const int n_x, int32_t n)
{
    uint8_t last[FORMAT_BLOCK_BYTES_MAX];
    int32_t groups = n / 32;

    if (groups % 2 != 0) { /* zeros up to an even number */
        memset(last, 0, sizeof(last));
        memcpy(last, s, (size_t)(groups * (bytes_of(f) / GROUPS)));
        s = last;
        groups++;
    }
    add_rest(sums, f, s, x, n_x, groups);
}

/* out[r * n_x + x] = row[r] . x of n_rows neighbours in a list: their loads from memory
 * are under way together. */
INLINE void dot_few(float *out, const enum weight_format_id f, const void *const *row,
                    const int n_rows, int32_t n, const struct act_block *x, const int n_x,
                    struct row_fetch ahead)
{
    struct sums sums[ROWS_TOGETHER];
    const uint8_t *s[ROWS_TOGETHER];
    int32_t at = 0;

#pragma GCC unroll 2
    for (int r = 0; r < n_rows; r++) {
        clear_sums(&sums[r], n_x);
        s[r] = row[r];
    }
    for (; at + 256 <= n; at += 256, x += n_x) {
        add_blocks(sums, f, s, n_rows, x, n_x, GROUPS, ahead);
#pragma GCC unroll 2
        for (int r = 0; r < n_rows; r++) {
            s[r] += bytes_of(f);
        }
    }
#pragma GCC unroll 2
    for (int r = 0; r < n_rows; r++) {
        if (at < n) {
            add_end(&sums[r], f, s[r], x, n_x, n - at);
        }
        put_sums(out + r * n_x, &sums[r], f, n_x);
    }
}

INLINE struct row_fetch fetch_of(const struct prefetch *ahead, int32_t i)
{
    bool fetches = ahead->period == 1 || (ahead->period > 1 && i % ahead->period == ahead->phase);

    return (struct row_fetch){.distance = fetches ? ahead->distance : 0, .far = ahead->far};
}

INLINE void dot_rows(float *sum, const struct dot_rows *w, const enum weight_format_id f, int32_t n,
                     const struct act_block *x, const int n_x, const struct prefetch *ahead)
{
    const int together = n_x <= PAIRED_ROWS_X ? ROWS_TOGETHER : 1;
    int32_t i = 0;

    for (; i + together <= w->n; i += together) {
        dot_few(sum + i * n_x, f, w->row + i, together, n, x, n_x, fetch_of(ahead, i));
    }
    for (; i < w->n; i++) {
        dot_few(sum + i * n_x, f, w->row + i, 1, n, x, n_x, fetch_of(ahead, i));
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

#ifndef ROWS_FORMATS
#define ROWS_FORMATS EACH_BLOCK_FORMAT
#endif

#define DOTS(NAME)                                                                                \
    static void dots_##NAME(float *sum, const struct dot_rows *w, int32_t n,                      \
                            const struct act_block *x, int32_t n_x, const struct prefetch *ahead) \
    {                                                                                             \
        dots_of(sum, w, FORMAT_##NAME, n, x, n_x, ahead);                                         \
    }
ROWS_FORMATS(DOTS)

#define ENTRY(NAME) [FORMAT_##NAME] = dots_##NAME,

#endif
