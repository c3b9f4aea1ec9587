/* Mixed-input products of at most FEW_INT4_ROWS rows with weights of four bits, in
 * whole numbers.
 *
 * Of few rows the instructions that widen codes take longer than memory. A mask makes
 * four codes an operand of the 8-bit matrix instruction, where bf16 takes a shift, a
 * mask and a subtraction for two. Activations are whole numbers of 16 bits in units of
 * the greatest one of their 128 columns, cut into a high and a low byte, which are rows
 * of the instruction of their own: its eight rows are four high and four low ones.
 * Products are exact; the zero points' part is subtracted by the sum of a group's
 * activations. Each block makes the whole numbers of its part of the depth, which is
 * why more rows are faster as they were.
 *
 * Tiles and epilogues are those of mixed.cuh. */
#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/mixed/few_int4.cuh"

#include "kernels/cuda/mixed/epilogue.cuh"

namespace
{

struct few_args {
    mixed_args m;
    const bf16 *x; /* [rows, k] */
    int64_t x_stride;
};

enum {
    HALF_GROUP = MIXED_GROUP / 2, /* columns whose bytes lie together */
    WORD = 32,                    /* columns of four lanes' words of codes */
    HALF_BYTES = HALF_GROUP * 8,  /* of eight rows of the instruction */
    GROUP_BYTES = 2 * HALF_BYTES,
    TERM_BYTES = 64,                               /* of a group's terms */
    SLOT_BYTES = MIXED_ROWS * FUSED_SEGMENT_BYTES, /* codes of 64 rows, 512 columns */
    SLOT_GROUPS = FUSED_SEGMENT_K / MIXED_GROUP,
    MOST_SLOTS = 16,
    RING_BYTES = 225 * 1024, /* activations and slots */
    CODE_MOST = 32639,       /* the greatest whole number whose high byte has room for a carry */
};

static_assert(SLOT_GROUPS == 4, "a segment");

/* The sizes of a launch: dynamic shared memory has slots of codes, activations, and
 * mbarriers. */
struct few_sizes {
    int slots, in_flight; /* of a ring, on their way at a time */
    int x, terms, bars, bytes;
};

#if HAS_WGMMA

/* d += a b, [16, 32] of unsigned bytes times [32, 8] of signed ones. */
__device__ __forceinline__ void mma_bytes(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                          uint32_t a3, uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
                 "{%8,%9}, {%0,%1,%2,%3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/* Activations of a block's part of the depth in shared memory.
 *
 * bytes: [group][half of it][n][t][16], where n is a row of the instruction: a row's
 * number, of its high bytes, or that plus FEW_INT4_ROWS, of its low ones. The 16 bytes
 * are what lane t has of the 64 columns: eight for the low halves of bytes of codes,
 * eight for the upper ones.
 * terms: [group][t][4]: for n = 2 t and 2 t + 1 their unit, a sixteenth of it since
 * upper halves are multiplied in place, and sixteen times the sum of their numbers. */
struct byte_rows {
    uint32_t bytes, terms;

    __device__ __forceinline__ uint32_t place(int group, int half, int n, int t) const
    {
        return bytes + group * GROUP_BYTES + half * HALF_BYTES + (n * 4 + t) * 16;
    }
    __device__ __forceinline__ void store_terms(int group, int n, float unit, int sum) const
    {
        uint32_t to = terms + group * TERM_BYTES + n / 2 * 16 + n % 2 * 4;

        asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(__float_as_uint(unit)) : "memory");
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(to + 8), "r"(sum) : "memory");
    }
};

/* Bytes 0 (or 1) of four words. */
__device__ __forceinline__ uint32_t gather(uint32_t a, uint32_t b, uint32_t c, uint32_t d, int byte)
{
    uint32_t select = byte ? 0x0051 : 0x0040;

    return __byte_perm(__byte_perm(a, b, select), __byte_perm(c, d, select), 0x5410);
}

/* A thread's eight columns of a row: of WORD neighbours what lane t has of the codes,
 * 8 i + 2 t and the next one for i below 4. */
struct row_part {
    uint32_t v[4];

    /* from: of the WORD columns */
    __device__ __forceinline__ void load(const bf16 *from, int t)
    {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            v[i] = __ldcg((const uint32_t *)from + i * 4 + t);
        }
    }
    /* Sixteen neighbouring lanes have a group; those that are not `real` store nothing.
     * word: of the block's part of the depth. */
    __device__ __forceinline__ void store(const byte_rows &to, int row, int word, int t,
                                          bool real) const
    {
        __nv_bfloat162 most = __float2bfloat162_rn(0.0f);
        uint32_t q[8];
        int sum[2], group = word / 4, half = word / 2 % 2;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            most = __hmax2_nan(most, __habs2(*(const __nv_bfloat162 *)&v[i]));
        }
        float peak = __bfloat162float(__hmax_nan(most.x, most.y));
#pragma unroll
        for (int o = 1; o < 16; o <<= 1) {
            float other = __shfl_xor_sync(0xffffffffu, peak, o);
            peak = other > peak || other != other ? other : peak;
        }
        float inverse = peak > 0.0f ? CODE_MOST / peak : 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++) { /* the number plus 128, in the low 16 bits */
            float f = __uint_as_float(i % 2 ? v[i / 2] & 0xffff0000u : v[i / 2] << 16);
            q[i] = __float_as_uint(fmaf(f, inverse, 12582912.0f + 128.0f));
        }
#pragma unroll
        for (int low = 0; low < 2; low++) {
            uint32_t at = to.place(group, half, row + low * FEW_INT4_ROWS, t) + word % 2 * 4, u[2];
#pragma unroll
            for (int upper = 0; upper < 2; upper++) { /* columns of upper halves are 8 on */
                const uint32_t *c = q + upper * 2;
                u[upper] = gather(c[0], c[4], c[1], c[5], !low) ^ (low ? 0x80808080u : 0);
            }
            sum[low] = __dp4a((int)u[0], 0x01010101, __dp4a((int)u[1], 0x01010101, 0));
            if (real) {
                asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(u[0]) : "memory");
                asm volatile("st.shared.u32 [%0], %1;" ::"r"(at + 8), "r"(u[1]) : "memory");
            }
        }
#pragma unroll
        for (int o = 1; o < 16; o <<= 1) {
            sum[0] += __shfl_xor_sync(0xffffffffu, sum[0], o);
            sum[1] += __shfl_xor_sync(0xffffffffu, sum[1], o);
        }
        if (word % 4 == 0 && t == 0 && real) {
            float unit = peak < INFINITY ? peak * (1.0f / CODE_MOST / 16.0f) : NAN;
            to.store_terms(group, row, unit * 256.0f, sum[0] * 16);
            to.store_terms(group, row + FEW_INT4_ROWS, unit, sum[1] * 16);
        }
    }
};

/* All rows of the block's `groups` groups, of which x has the first column. A part is
 * loaded while the one before it is stored. */
template <int THREADS>
__device__ __forceinline__ void make_rows(const byte_rows &to, const bf16 *x, int64_t stride,
                                          int rows, int groups)
{
    int lanes = groups * (MIXED_GROUP / 8), each = (lanes + 31) / 32 * 32; /* whole warps */
    int row = 0, i = threadIdx.x, t = threadIdx.x % 4;
    row_part now, next = {};
    auto settle = [&] { /* on a row's lanes */
                        while (row < rows && i >= each) {
                            i -= each;
                            row++;
                        }
    };
    auto load = [&](row_part &p) {
        settle();
        if (row < rows) {
            p.load(x + row * stride + min(i, lanes - 1) / 4 * WORD, t);
        }
    };

    load(next);
#pragma unroll 1
    while (row < rows) {
        int of = row, at = i;
        now = next;
        i += THREADS;
        load(next);
        now.store(to, of, min(at, lanes - 1) / 4, t, at < lanes);
    }
}

/* Addresses of the ring and its mbarriers. Slot n of a block is of 64 rows n % TILES of
 * its tile. */
struct few_ring {
    uint32_t codes, full, empty;
    int slots, in_flight;
};

/* Where one is in the ring. */
struct few_place {
    int slot;
    uint32_t phase;

    __device__ __forceinline__ void next(const few_ring &r, int n)
    {
        slot += n;
        if (slot >= r.slots) {
            slot -= r.slots;
            phase ^= 1;
        }
    }
};

/* The lane that loads: every slot as soon as there is room. At most so many are on
 * their way that what lay in a slot before has come when somebody waits for the next
 * (see stages_in_flight in expert_stream/stream_ring.cuh). */
template <int WIDTH>
__device__ __forceinline__ void load_codes(const few_ring &r, const mixed_args &a, int kind,
                                           int tile, int first_group)
{
    constexpr int TILES = WIDTH / MIXED_ROWS;
    uint64_t once = read_once();
    int n = a.s.depth_steps / SLOT_GROUPS * TILES;
    few_place at = {0, 1}, lag = {0, 0};

#pragma unroll 1
    for (int i = 0; i < n; i++) {
        uint32_t bar = r.full + at.slot * 8;
        if (i >= r.in_flight) {
            barrier_wait(r.full + lag.slot * 8, lag.phase);
            lag.next(r, 1);
        }
        barrier_wait(r.empty + at.slot * 8, at.phase);
        barrier_expect(bar, SLOT_BYTES);
        plain_copy(r.codes + at.slot * SLOT_BYTES,
                   a.segments + quant_segment_at(first_row<WIDTH>(a.s, kind, tile, i % TILES),
                                                 first_group / SLOT_GROUPS + i / TILES,
                                                 a.n_segments, FUSED_SEGMENT_BYTES),
                   SLOT_BYTES, bar, once);
        at.next(r, 1);
    }
}

/* d += a lane's part of a group's sums, whose codes' low halves and upper halves were
 * multiplied apart: scale * unit * (sum - zero * sum of activations). */
__device__ __forceinline__ void add_group(float (&d)[4], const int (&sum)[4],
                                          const uint32_t (&words)[2], const uint4 &term, bool f16)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float scale = int4_group(words[h], f16).scale;
        int zero = words[h] & 127; /* of 128 + zero point in bf16 */
        d[2 * h] += scale * __uint_as_float(term.x) * (float)(sum[2 * h] - zero * (int)term.z);
        d[2 * h + 1] +=
            scale * __uint_as_float(term.y) * (float)(sum[2 * h + 1] - zero * (int)term.w);
    }
}

/* d = the sums of this warp's 16 weight rows and its part of the depth, as the
 * instruction of a warp has them for eight rows of activations (mixed.cuh). */
template <int WIDTH>
__device__ __forceinline__ void multiply_codes(float (&d)[4], const few_ring &r, const byte_rows &x,
                                               const mixed_args &a)
{
    using L = mixed_layout<FUSED_INT4, 8, WIDTH>;
    constexpr uint32_t LOW = 0x0f0f0f0fu, HIGH = 0xf0f0f0f0u;
    int lane = threadIdx.x & 31, warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    int part = warpgroup / L::TILES;
    uint32_t row = r.codes + lane_row() * FUSED_SEGMENT_BYTES;
    uint32_t bytes = x.bytes + part * GROUP_BYTES + lane * 16,
             terms = x.terms + part * TERM_BYTES + (lane & 3) * 16;
    few_place at = {warpgroup % L::TILES, 0};

#pragma unroll
    for (int i = 0; i < 4; i++) {
        d[i] = 0.0f;
    }
#pragma unroll 1
    for (int s = a.s.depth_steps / SLOT_GROUPS; s > 0; s--) {
        uint32_t tile = row + at.slot * SLOT_BYTES;
        barrier_wait(r.full + at.slot * 8, at.phase);
#pragma unroll
        for (int j = 0; j < SLOT_GROUPS; j += L::PARTS) {
            uint32_t from = tile + (part + j) * 64 + (lane & 3) * 4;
            uint32_t scales = tile + FUSED_SEGMENT_K / 2 + (part + j) * 4;
            uint32_t w[2][4], of[2];
            int low[4] = {}, high[4] = {}, sum[4];
#pragma unroll
            for (int h = 0; h < 2; h++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    w[h][i] = load_word(from + h * 8 * FUSED_SEGMENT_BYTES + i * 16);
                }
                of[h] = load_word(scales + h * 8 * FUSED_SEGMENT_BYTES);
            }
            uint4 term = load_shared16(terms);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                uint32_t u[4], v[4]; /* the operand of low halves, and of upper ones */
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    u[i] = w[i % 2][2 * half + i / 2] & LOW;
                    v[i] = w[i % 2][2 * half + i / 2] & HIGH;
                }
                uint4 b = load_shared16(bytes + half * HALF_BYTES);
                mma_bytes(low, u[0], u[1], u[2], u[3], b.x, b.y);
                mma_bytes(high, v[0], v[1], v[2], v[3], b.z, b.w);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                sum[i] = low[i] * 16 + high[i];
            }
            add_group(d, sum, of, term, a.f16_scales);
            bytes += L::PARTS * GROUP_BYTES;
            terms += L::PARTS * TERM_BYTES;
        }
        __syncwarp(); /* all lanes have read their codes */
        if (lane == 0) {
            barrier_arrive(r.empty + at.slot * 8);
        }
        at.next(r, L::TILES);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) { /* high and low bytes; the other lanes have no rows */
        d[i] += __shfl_xor_sync(0xffffffffu, d[i], 2);
        d[i] = lane & 2 ? 0.0f : d[i];
    }
}

#endif

template <int WIDTH, int SPLIT>
__global__ void __launch_bounds__(HAS_WGMMA ? mixed_layout<FUSED_INT4, 8, WIDTH>::THREADS : 32, 1)
    few_mixed_kernel(const __grid_constant__ few_args a, const few_sizes z, int kind)
{
#if HAS_WGMMA
    using L = mixed_layout<FUSED_INT4, 8, WIDTH>;
    extern __shared__ char raw[];
    uint32_t base = (shared_address(raw) + 1023) & ~1023u, bars = base + z.bars;
    const few_ring r = {base, bars, bars + MOST_SLOTS * 8, z.slots, z.in_flight};
    const byte_rows x = {base + z.x, base + z.terms};
    const small_args &s = a.m.s;
    uint32_t pushed = bars + 2 * MOST_SLOTS * 8;
    int part = SPLIT > 1 ? (int)(blockIdx.x % SPLIT) : 0, tile = (int)(blockIdx.x / SPLIT);

    if (threadIdx.x == 0) {
        barriers_init(r.full, z.slots, 1);
    } else if (threadIdx.x == 32) { /* count: the warps of a slot */
        barriers_init(r.empty, z.slots, L::PARTS * 4);
    } else if (threadIdx.x == 64) {
        barriers_init(pushed, 1, 1);
        barrier_expect(pushed, s.rows * WIDTH / 2 * 4);
    }
    __syncthreads();
    pdl_release();
    if (threadIdx.x >= L::MULTIPLIERS) {
        if (threadIdx.x / 32 == L::MULTIPLIERS / 32 && elected()) {
            load_codes<WIDTH>(r, a.m, kind, tile, part * s.depth_steps);
        }
        __syncwarp();
        if (SPLIT > 1) { /* the cluster's barriers are for all threads */
            cluster_arrive();
            cluster_wait();
        }
        return;
    }
    float d[4];
    pdl_wait();
    if (kind != SMALL_SUM && s.cleared && blockIdx.x == 0 && threadIdx.x < SMALL_ROWS) {
        s.cleared[threadIdx.x] = 0;
    }
    make_rows<L::MULTIPLIERS>(x, a.x + (int64_t)part * s.depth_steps * MIXED_GROUP, a.x_stride,
                              s.rows, s.depth_steps);
    sync_multipliers<L>();
    multiply_codes<WIDTH>(d, r, x, a.m);
    stream_part<L, 8, SPLIT, WIDTH> stream;
    if (kind == SMALL_SUM) {
        stream.load(s, tile, part);
    }
    sync_multipliers<L>(); /* the ring becomes room for sums */
    float *kept = (float *)(raw + (base - shared_address(raw)));
    keep_sums<L, 8>(d, kept);
    if (SPLIT > 1) {
        cluster_arrive();
        cluster_wait();
    }
    sync_multipliers<L>();
    shared_sums<L, 8, SPLIT> sums = {kept, part};
    if constexpr (SPLIT > 1) {
        sums.share(base, pushed, s.rows);
    }
    store<L, 8, SPLIT, WIDTH>(sums, stream, s, kind, tile, part);
#endif
}

template <int WIDTH, int SPLIT> bool run(const few_args &a, int kind, cudaStream_t stream)
{
    constexpr int TILES = WIDTH / MIXED_ROWS, BARS = (2 * MOST_SLOTS + 1) * 8;
    constexpr int MOST = RING_BYTES + BARS + 1024;
    static bool allowed = allow_shared(few_mixed_kernel<WIDTH, SPLIT>, MOST);
    int groups = a.m.s.depth_steps, x = groups * GROUP_BYTES;
    int room = (RING_BYTES - x - groups * TERM_BYTES) / SLOT_BYTES;
    few_sizes z = {.slots = room < MOST_SLOTS ? room : (int)MOST_SLOTS};

    z.in_flight = TILES > 1 ? z.slots - TILES : z.slots;
    z.x = z.slots * SLOT_BYTES;
    z.terms = z.x + x;
    z.bars = z.terms + groups * TERM_BYTES;
    z.bytes = z.bars + BARS + 1024;
    return allowed &&
           launch_clusters(SPLIT, few_mixed_kernel<WIDTH, SPLIT>, dim3(a.m.s.n / WIDTH * SPLIT),
                           dim3(mixed_layout<FUSED_INT4, 8, WIDTH>::THREADS), z.bytes, stream, a, z,
                           kind);
}

} // namespace

bool launch_few_int4(struct small_tile t, const mixed_args &m, const void *x, int64_t x_stride,
                     cudaStream_t stream)
{
    const few_args a = {m, (const bf16 *)x, x_stride};

#define TILE(WIDTH, SPLIT)                           \
    if (t.width == WIDTH && t.split == SPLIT) {      \
        return run<WIDTH, SPLIT>(a, t.kind, stream); \
    }
    MIXED_TILES(TILE)
#undef TILE
    return false;
}
