/* Inner products of many rows of x with stored rows, AVX-512: an outer product over
 * panels, as in panel_avx2.c with sixteen lanes.
 *
 * The sums are those of the tiles, in the same order. Panels lie as
 * [lane][step][PANEL_ROWS], packed x as [lane][tile][step][row], in words of 32 bits: a
 * float, or two neighbouring elements in bfloat16. An accumulator holds one lane's sums
 * of sixteen rows of w with one row of x. Two tiles of x are taken at a time: of the 32
 * registers 24 hold sums, three w and one x.
 *
 * A tile_avx512*.c file includes it once, after defining
 *     in_pairs(t)                whether rows of type t are multiplied as words of two
 *                                elements; `tile` must then take words alike
 *     pack_pairs(x)              the words of 32 floats, rounded to bfloat16
 *     add_product(a, w, x, pairs)
 *                                a + w x, word by word
 */
#ifdef INLINE

enum {
    LANES = 16,
    PANEL_ROWS = 48, /* stored rows of w in a panel */
    VECTORS = PANEL_ROWS / LANES,
    PAIR_ROWS = 2 * TILE_ROWS, /* rows of x in two tiles */
    PANEL_SUMS = VECTORS * PAIR_ROWS,
    /* words between lanes, so that they do not fall into the same cache sets */
    LANE_PAD = PANEL_SLACK / LANES,
};

/* Steps of a lane over n elements. */
INLINE int32_t lane_steps(int32_t n, enum dtype t)
{
    return n / (in_pairs(t) ? 2 * LANES : LANES);
}

/* Words from a lane to the next: of a panel, and of packed x. */
INLINE int64_t panel_lane(int32_t n_steps)
{
    return (int64_t)n_steps * PANEL_ROWS + LANE_PAD;
}
INLINE int64_t x_lane(int32_t n_steps, int32_t n_tiles)
{
    return (int64_t)n_steps * TILE_ROWS * n_tiles + LANE_PAD;
}

/* Of thirty-two stored elements, the words of step `part`. */
INLINE __m512 stored_words(const void *w, const enum dtype t, const int part)
{
    if (in_pairs(t)) {
        return _mm512_loadu_ps(w);
    }
    return part == 0 ? stored_low(w, t) : stored_high(w, t);
}

INLINE void pack_panel_type(float *panel, const void *const *row, int64_t first, int32_t n,
                            const enum dtype t)
{
    const int parts = in_pairs(t) ? 1 : 2;
    int64_t lane_stride = panel_lane(lane_steps(n, t));

    for (int32_t at = 0; at < n; at += TILE_CHUNK, panel += parts * PANEL_ROWS) {
        for (int32_t v = 0; v < VECTORS; v++) {
            for (int part = 0; part < parts; part++) {
                float *to = panel + part * PANEL_ROWS + v * LANES;
                __m512 r[LANES];
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++) {
                    const char *from = row[v * LANES + i];
                    r[i] = stored_words(from + (first + at) * dtype_bytes(t), t, part);
                }
                transpose16(r);
#pragma GCC unroll 16
                for (int l = 0; l < LANES; l++) {
                    _mm512_store_ps(to + l * lane_stride, r[l]);
                }
            }
        }
    }
}

static void pack_panel_rows(float *panel, const void *const *row, int64_t first, int32_t n,
                            enum dtype t)
{
    if (t == DTYPE_BF16) {
        pack_panel_type(panel, row, first, n, DTYPE_BF16);
    } else if (t == DTYPE_F16) {
        pack_panel_type(panel, row, first, n, DTYPE_F16);
    } else {
        pack_panel_type(panel, row, first, n, DTYPE_F32);
    }
}

/* Put one step of four rows to its place in each lane. */
INLINE void put_step(float *out, int64_t lane_stride, __m512 r[TILE_ROWS])
{
    transpose4(r);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        float *to = out + j * lane_stride;
        _mm_store_ps(to, _mm512_castps512_ps128(r[j]));
        _mm_store_ps(to + 4 * lane_stride, _mm512_extractf32x4_ps(r[j], 1));
        _mm_store_ps(to + 8 * lane_stride, _mm512_extractf32x4_ps(r[j], 2));
        _mm_store_ps(to + 12 * lane_stride, _mm512_extractf32x4_ps(r[j], 3));
    }
}

static void pack_panel_x(float *out, int32_t tile, int32_t n_tiles, const float *const *x,
                         int32_t n_x, int32_t n, int32_t padded, enum dtype t)
{
    int32_t n_steps = lane_steps(padded, t);
    int64_t lane_stride = x_lane(n_steps, n_tiles);

    out += (int64_t)tile * n_steps * TILE_ROWS;
    for (int32_t at = 0; at < padded; at += TILE_CHUNK, out += TILE_ROWS) {
        __m512 low[TILE_ROWS], high[TILE_ROWS];
        for (int r = 0; r < TILE_ROWS; r++) {
            float last[TILE_CHUNK] = {0};
            _Alignas(64) float both[TILE_CHUNK];
            const float *from = x[MIN(r, n_x - 1)] + at;
            if (at + TILE_CHUNK > n) {
                memcpy(last, from, (size_t)MAX(n - at, 0) * sizeof(*last));
                from = last;
            }
            if (in_pairs(t)) {
                low[r] = pack_pairs(from);
                continue;
            }
            pack32(both, from, t);
            low[r] = _mm512_load_ps(both);
            high[r] = _mm512_load_ps(both + LANES);
        }
        put_step(out, lane_stride, low);
        if (!in_pairs(t)) {
            out += TILE_ROWS;
            put_step(out, lane_stride, high);
        }
    }
}

/* Sums of two tiles between their lanes. Lanes l and l + 8 are added first, then the
 * eight results in the tree ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)), which needs up
 * to three at a time. */
struct partial {
    __m512 half[PANEL_SUMS]; /* of lane l, until lane l + 8 is there */
    __m512 at[3][PANEL_SUMS];
};

/* Add result l, the sums of lanes l and l + 8, into the tree; a: those of lane
 * l + 8. */
INLINE void fold_result(struct partial *p, const __m512 *a, const int n_sums, const int l)
{
    const int to = l < 2 ? 0 : l < 6 ? 1 : 2;

#pragma GCC unroll 24
    for (int i = 0; i < n_sums; i++) {
        __m512 s = _mm512_add_ps(p->half[i], a[i]);
        if (l == 7) {
            s = _mm512_add_ps(p->at[2][i], s);
        }
        if (l == 1 || l == 3 || l == 5 || l == 7) {
            s = _mm512_add_ps(p->at[l == 7 ? 1 : to][i], s);
        }
        if (l == 3 || l == 7) {
            s = _mm512_add_ps(p->at[0][i], s);
        }
        p->at[l == 3 || l == 7 ? 0 : to][i] = s;
    }
}

INLINE void fold_lane(struct partial *p, const __m512 *a, const int n_sums, int32_t lane)
{
    switch (lane) {
    case 8:
        fold_result(p, a, n_sums, 0);
        break;
    case 9:
        fold_result(p, a, n_sums, 1);
        break;
    case 10:
        fold_result(p, a, n_sums, 2);
        break;
    case 11:
        fold_result(p, a, n_sums, 3);
        break;
    case 12:
        fold_result(p, a, n_sums, 4);
        break;
    case 13:
        fold_result(p, a, n_sums, 5);
        break;
    case 14:
        fold_result(p, a, n_sums, 6);
        break;
    case 15:
        fold_result(p, a, n_sums, 7);
        break;
    default:
#pragma GCC unroll 24
        for (int i = 0; i < n_sums; i++) {
            p->half[i] = a[i];
        }
    }
}

/* One lane of n_rows rows of x, four or eight; the second four are those of the next
 * tile. */
INLINE void lane_rows(struct partial *p, const float *panel, const float *x, int32_t n_steps,
                      int32_t lane, const int n_rows, const bool pairs)
{
    __m512 a[PANEL_SUMS];
    const float *next = x + (int64_t)n_steps * TILE_ROWS;

#pragma GCC unroll 24
    for (int i = 0; i < n_rows * VECTORS; i++) {
        a[i] = _mm512_setzero_ps();
    }
    for (int32_t s = 0; s < n_steps; s++) {
        __m512 w[VECTORS];
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; v++) {
            w[v] = _mm512_load_ps(panel + LANES * v);
        }
#pragma GCC unroll 8
        for (int r = 0; r < n_rows; r++) {
            __m512 b = _mm512_set1_ps(r < TILE_ROWS ? x[r] : next[r - TILE_ROWS]);
#pragma GCC unroll 3
            for (int v = 0; v < VECTORS; v++) {
                a[r * VECTORS + v] = add_product(a[r * VECTORS + v], w[v], b, pairs);
            }
        }
        panel += PANEL_ROWS;
        x += TILE_ROWS;
        next += TILE_ROWS;
    }
    fold_lane(p, a, n_rows * VECTORS, lane);
}

/* A lane of the panel stays in the first-level cache while all tiles use it. */
INLINE void panel_type(float *sum, const float *panel, const float *x, int32_t count,
                       int32_t n_tiles, int32_t n_steps, struct line_prefetch *ahead,
                       const bool pairs)
{
    struct partial p[(PANEL_TILES + 1) / 2];

    for (int32_t i = 0; i < LANES; i++) {
        int32_t lane = i / 2 + i % 2 * (LANES / 2); /* 0, 8, 1, 9, … */
        const float *w = panel + lane * panel_lane(n_steps);
        const float *from = x + lane * x_lane(n_steps, n_tiles);
        for (int32_t t = 0; t < count; t += 2, from += (int64_t)2 * n_steps * TILE_ROWS) {
            prefetch_lines(ahead, 2 * ahead->per_tile / LANES + 1);
            if (t + 1 < count) {
                lane_rows(&p[t / 2], w, from, n_steps, lane, PAIR_ROWS, pairs);
            } else {
                lane_rows(&p[t / 2], w, from, n_steps, lane, TILE_ROWS, pairs);
            }
        }
    }
    for (int32_t r = 0; r < count * TILE_ROWS; r++) {
        for (int v = 0; v < VECTORS; v++, sum += LANES) {
            _mm512_store_ps(sum, p[r / PAIR_ROWS].at[0][r % PAIR_ROWS * VECTORS + v]);
        }
    }
}

static void panel_dots(float *sum, const float *panel, const float *x, int32_t tile, int32_t count,
                       int32_t n_tiles, int32_t n, enum dtype t, struct line_prefetch *ahead)
{
    int32_t n_steps = lane_steps(n, t);

    x += (int64_t)tile * n_steps * TILE_ROWS;
    if (in_pairs(t)) {
        panel_type(sum, panel, x, count, n_tiles, n_steps, ahead, true);
    } else {
        panel_type(sum, panel, x, count, n_tiles, n_steps, ahead, false);
    }
}

static const struct cpu_panels avx512_panels = {.k_block = K_BLOCK,
                                                .rows = PANEL_ROWS,
                                                .from = 128,
                                                .pack_rows = pack_panel_rows,
                                                .pack_x = pack_panel_x,
                                                .dots = panel_dots};

#endif
