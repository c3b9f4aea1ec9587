/* What the producers and the consumers of prefill attention on Hopper share: shared
 * memory, rings, work tiles (attn_prefill_sm90.cu). C is the cache's type. */
#ifndef QUIRE_KERNELS_CUDA_ATTENTION_ATTN_HOPPER_CUH
#define QUIRE_KERNELS_CUDA_ATTENTION_ATTN_HOPPER_CUH

#include "kernels/cuda/attention/attn_common.cuh"

enum {
    ROWS = ATTN_PREFILL_ROWS,
    GROUP_ROWS = 64,
    CONSUMER_THREADS = 256,
    HOPPER_THREADS = CONSUMER_THREADS + 128,
    STAGES = 2,
    SCALE_SLOTS = 2 * STAGES /* a stage's scales are read after it is free */
};

/* Of a cache of 8 bits: what queries are multiplied by, and log2 of the greatest weight
 * of a tile. */
#define QUERY_UNIT 0x1p-4f
enum { NARROW_HEADROOM = 12 };

template <typename C> constexpr bool NARROW = sizeof(C) == 1;
template <typename C> constexpr bool SCALED = std::is_same<C, int8_t>::value;

template <int D, typename C = __half> struct hopper_layout {
    static constexpr int KEYS = D > 128 ? 64 : 128; /* tokens per tile */
    /* stages for queries; 2: the next work tile's are loaded beside the current ones */
    static constexpr int Q_STAGES = D > 128 || SCALED<C> ? 1 : 2;
    /* bytes; a panel is [tokens or rows][width] */
    static constexpr int Q = ROWS * D * 2, TILE = KEYS * D * 2;
    static constexpr int BARS = 4 * STAGES + 1;
    /* of a cache of 8 bits: what a producer warp stages, in PARTS parts with a barrier
     * each: codes, and of int8 the scales of the part's keys and values */
    static constexpr int PARTS = 2, PART_KEYS = KEYS / 2 / PARTS, CODES = PART_KEYS * D,
                         PART = CODES + (SCALED<C> ? PART_KEYS * 8 : 0);
    static constexpr int SCALES = SCALED<C> ? SCALE_SLOTS * 2 * KEYS * 4 : 0;
    static constexpr int STAGING = NARROW<C> ? 4 * PARTS * (PART + 8) + SCALES : 0;
    static constexpr int BYTES = Q_STAGES * Q + 2 * STAGES * TILE + BARS * 8 + STAGING + 1024;
};

/* Shared-memory addresses. `which`: 0 the keys' ring, 1 the values'. */
template <int D, typename C> struct hopper_shared {
    using L = hopper_layout<D, C>;
    uint32_t base;
    __device__ uint32_t queries(int wave) const
    {
        return base + wave % L::Q_STAGES * L::Q;
    }
    __device__ uint32_t tile(int which, int stage) const
    {
        return base + L::Q_STAGES * L::Q + (which * STAGES + stage) * L::TILE;
    }
    __device__ uint32_t full(int which, int stage) const
    {
        return tile(2, 0) + (which * STAGES + stage) * 8;
    }
    __device__ uint32_t empty(int which, int stage) const
    {
        return full(2 + which, stage);
    }
    /* barrier of a sequence's last values, which are zeroed past its end before they
     * count as full */
    __device__ uint32_t last(void) const
    {
        return full(4, 0);
    }
    /* of producer warp `warp`: its barriers, and its staging area, behind the rings */
    __device__ uint32_t staged(int warp, int part) const
    {
        return last() + 8 + (warp * L::PARTS + part) * 8;
    }
    __device__ uint32_t staging(int warp, int part) const
    {
        return ((staged(4, 0) + 15) & ~15u) + (warp * L::PARTS + part) * L::PART;
    }
    /* scales of a tile's keys, then of its values, float32 */
    __device__ uint32_t scales(int slot) const
    {
        return staging(4, 0) + slot * 2 * L::KEYS * 4;
    }
};

/* A stage of a ring, and the parity of its mbarriers' phase (CUTLASS:
 * PipelineState). */
struct pipeline_state {
    int stage;
    uint32_t phase;
    __device__ __forceinline__ void advance(void)
    {
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
};

/* A work tile: query rows and a head, which see tokens [begin, end). */
struct work_tile {
    query_tile rows;
    int head, begin, end, n_tiles;
};

/* Query tiles are sorted by keys, most first, so waves run back and forth over the
 * blocks to even out their sums. */
__device__ __forceinline__ int work_tile_index(int wave)
{
    return wave * gridDim.x + (wave & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
}

/* The query tile of a block's work tile in `wave`, read well before work_tile_of needs
 * it; an arbitrary one if there is none. */
__device__ __forceinline__ int4 query_tile_of(const query_tile *tile, int wave, int heads,
                                              int n_work)
{
    return __ldg((const int4 *)tile + min(work_tile_index(wave), n_work - 1) / heads);
}

/* The block's work tile in `wave`, with its query tile t. False: there is none. */
template <int D>
__device__ __forceinline__ bool work_tile_of(work_tile &w, int wave, int4 t, const attn_args &a,
                                             int n_work)
{
    int i = work_tile_index(wave);

    w.rows = {t.x, t.y, t.z, t.w};
    w.head = i % a.n_heads;
    w.end = t.z + t.w;
    int first = t.y + t.w;
    w.begin = a.window > 0 && first + 1 > a.window ? (first + 1 - a.window) / 16 * 16 : 0;
    w.n_tiles = (w.end - w.begin + hopper_layout<D>::KEYS - 1) / hopper_layout<D>::KEYS;
    return i < n_work;
}

#endif
