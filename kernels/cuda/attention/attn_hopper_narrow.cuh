/* The producer of prefill attention on Hopper for a cache of 8 bits: codes are staged
 * and widened to float16 on their way to the rings (attn_prefill_sm90.cu). */
#ifndef QUIRE_KERNELS_CUDA_ATTENTION_ATTN_HOPPER_NARROW_CUH
#define QUIRE_KERNELS_CUDA_ATTENTION_ATTN_HOPPER_NARROW_CUH

#include "kernels/cuda/attention/attn_hopper.cuh"

/* A producer warp's place in the tiles of its block's work tiles. */
struct tile_cursor {
    work_tile w;
    int wave, token; /* the tile's first token */
    bool more;       /* there is such a tile */
};

template <int D>
__device__ __forceinline__ void tile_cursor_set(tile_cursor &c, int wave, const attn_args &a,
                                                const query_tile *tile, int n_work)
{
    c.wave = wave;
    c.more = work_tile_of<D>(c.w, wave, query_tile_of(tile, wave, a.n_heads, n_work), a, n_work);
    c.token = c.w.begin;
}

/* Copies a part of a tile, tokens from `at` of it on, to the staging area. */
template <typename C, int D>
__device__ __forceinline__ void stage_part(const tile_cursor &c, const attn_args &a,
                                           const step_arrays &s, int which, int at, uint32_t to,
                                           uint32_t bar, int lane)
{
    using P = panels<D, 1>;
    using L = hopper_layout<D, C>;
    constexpr int KEYS = L::PART_KEYS;
    int bs = a.kv.block_size, segment = bs % 16 ? 8 : 16, first = c.token + at;
    int kv_head = c.w.head / (a.n_heads / a.kv.n_kv_heads);
    int segments = min(KEYS, max(c.w.end - first, 0) + segment - 1) / segment,
        copies = segments * P::COUNT, scales = SCALED<C> && which == 0 ? 2 * segments : 0;

    if (lane == 0) {
        barrier_expect(bar, segments * segment * D + scales * segment * 4);
    }
    __syncwarp();
    if (lane < copies + scales) {
        int i = lane < copies ? lane / P::COUNT : (lane - copies) / 2, token = first + i * segment;
        const C *from =
            (const C *)a.kv.base + a.layer * a.kv.layer_stride + kv_head * a.kv.head_stride +
            s.table[(int64_t)c.w.rows.row * s.table_width + token / bs] * a.kv.block_stride;
        if (lane < copies) {
            int panel = lane % P::COUNT;
            bulk_copy(to + (panel * KEYS + i * segment) * P::ROW,
                      from + which * a.kv.kv_stride + ((int64_t)panel * bs + token % bs) * P::ROW,
                      segment * P::ROW, bar);
        } else {
            int value = (lane - copies) % 2;
            bulk_copy(to + L::CODES + (value * KEYS + i * segment) * 4,
                      from + value * a.kv.kv_stride + a.kv.scale_offset + token % bs * 4,
                      segment * 4, bar);
        }
    }
}

/* A lane's token and chunk of the n-th piece of a staged panel. Eight lanes have two
 * tokens, and of rows of 128 bytes different halves: they then read and write all banks
 * once. */
template <int ROW> __device__ __forceinline__ void piece_of(int n, int lane, int &t, int &chunk)
{
    if (ROW == 128) {
        int second = lane >> 2 & 1;
        t = n / 2 * 8 + (lane >> 3) * 2 + second;
        chunk = (lane & 3) + 4 * (second ^ (n & 1));
    } else {
        t = (n * 32 + lane) / (ROW / 16);
        chunk = lane % (ROW / 16);
    }
}

/* Widens a staged part to its place in a tile, tokens from its `valid` on as zeros. */
template <typename C, int D>
__device__ __forceinline__ void widen_part(uint32_t from, uint32_t tile, int at, int valid,
                                           int lane)
{
    using P = panels<D, 1>;
    using L = hopper_layout<D, C>;

#pragma unroll
    for (int panel = 0; panel < P::COUNT; panel++)
#pragma unroll
        for (int n = 0; n < (L::PART_KEYS * P::CHUNKS + 31) / 32; n++) {
            int t, chunk;
            piece_of<P::ROW>(n, lane, t, chunk);
            if (L::PART_KEYS * P::CHUNKS % 32 && t >= L::PART_KEYS) {
                break;
            }
            uint4 w[2], v = load_shared16(from + (panel * L::PART_KEYS + t) * P::ROW +
                                          ((chunk ^ (t * P::ROW / 128 % P::CHUNKS)) << 4));
            if (t >= valid) {
                v = make_uint4(0, 0, 0, 0);
            }
            widen_chunk<__half, C>(v, w[0], w[1]);
            chunk += panel * P::CHUNKS;
            store_shared16(tile + tile_at<D, L::KEYS>(at + t, 2 * chunk), w[0]);
            store_shared16(tile + tile_at<D, L::KEYS>(at + t, 2 * chunk + 1), w[1]);
        }
}

/* Takes a staged part's scales to `to`, of tokens from `valid` on as zeros. */
template <typename C, int D>
__device__ __forceinline__ void take_scales(uint32_t from, uint32_t to, int at, int valid, int lane)
{
    using L = hopper_layout<D, C>;
    const float *x = (const float *)__cvta_shared_to_generic(from + L::CODES);
    float *y = (float *)__cvta_shared_to_generic(to);

    for (int n = lane; n < 2 * L::PART_KEYS; n += 32) {
        int value = n / L::PART_KEYS, t = n % L::PART_KEYS;
        y[value * L::KEYS + at + t] = t < valid ? x[n] : 0.0f;
    }
}

/* Producer warps 0 to 3, two per ring; see attn_prefill_sm90.cu. */
template <typename C, int D>
__device__ __forceinline__ void produce_narrow(const attn_args &a, const step_arrays &s,
                                               const query_tile *tile, int n_work,
                                               const hopper_shared<D, C> &sh, int warp, int lane)
{
    using L = hopper_layout<D, C>;
    int which = warp >> 1, half = (warp & 1) * L::PARTS * L::PART_KEYS;
    pipeline_state r = {0, 1};
    uint32_t phase = 0;
    tile_cursor c;
    auto stage = [&](int part) {
        stage_part<C, D>(c, a, s, which, half + part * L::PART_KEYS, sh.staging(warp, part),
                         sh.staged(warp, part), lane);
    };

    tile_cursor_set<D>(c, 0, a, tile, n_work);
    for (int part = 0; part < L::PARTS && c.more; part++) {
        stage(part);
    }
    while (c.more) {
        int valid = c.w.end - c.token - half; /* of this tile, the warp's half */
        c.token += L::KEYS;
        if (c.token >= c.w.end) {
            tile_cursor_set<D>(c, c.wave + 1, a, tile, n_work);
        }
        barrier_wait(sh.empty(which, r.stage), r.phase);
        random_delay();
        for (int part = 0; part < L::PARTS; part++) {
            int at = half + part * L::PART_KEYS, left = valid - part * L::PART_KEYS;
            uint32_t from = sh.staging(warp, part);
            barrier_wait(sh.staged(warp, part), phase);
            widen_part<C, D>(from, sh.tile(which, r.stage), at, left, lane);
            if (SCALED<C> && which == 0) {
                take_scales<C, D>(from, sh.scales(r.stage + STAGES * (r.phase ^ 1)), at, left,
                                  lane);
            }
            proxy_fence();
            __syncwarp();
            if (c.more) {
                stage(part);
            }
        }
        if (lane == 0) {
            random_delay();
            barrier_arrive(sh.full(which, r.stage));
        }
        phase ^= 1;
        r.advance();
    }
}

#endif
