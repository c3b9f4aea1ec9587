/* The recurrence of steps whose sequences have one token each (decode.cu) for many
 * sequences, none of which verifies drafts, by the gated delta rule with heads of 128
 * keys and values: a block takes whole heads, all of a group, one after the other.
 *
 * A head's matrix comes into one of SLOTS slots of shared memory by one copy, is
 * changed in registers and leaves from the slot by another, so that copies both ways
 * are under way all the time. The first of them start before the wait for the launch
 * ahead, as in recurrence.cu. One warp looks heads up and copies; the others first make
 * the operands of up to ROUND heads at once, then take these.
 *
 * Warp w has the 32 columns of part w % PARTS. Of these a lane has four neighbours, and
 * of the rows those of one class modulo 16. Sums of take_token are 16 to a column, one
 * of each class, so they are added in its order and the bits are the same. */
#include "kernels/cuda/gemm/bulk.cuh"
#include "kernels/cuda/states/token.cuh"

namespace
{

enum {
    DIM = 128, /* keys and values of a head */
    SLOTS = 3,
    ROUND = 4,     /* heads whose operands are made at once */
    GROUP_SMS = 4, /* multiprocessors to a group at most, else decode.cu is faster */
    LOOKED = 32,   /* heads that are looked up at once */
    PARTS = DIM / COLUMNS,
    CLASSES = 16, /* of rows */
    EACH = DIM / CLASSES,
    WORKERS = DIM / 4 * CLASSES, /* threads that compute */
    MATRIX = DIM * DIM,
    BYTES = MATRIX * (int)sizeof(float),
    ALL = WORKERS + 32,
    CHANNELS = (3 * DIM * ROUND + WORKERS - 1) / WORKERS /* of a thread */
};
/* Named barriers: part p's warps have PART_BARRIER + p. */
enum { WORKERS_BARRIER = 1, PART_BARRIER };

/* A head of a sequence. */
struct looked_up {
    int token, head, group;
    const float *from; /* the layer's state before the token; NULL: all 0 */
    float *to;         /* and behind it; NULL: it is kept nowhere */
};

/* Which operand of a token. */
enum { Q, K, V, VECTORS };

/* Of a token and head; q and k in the order of key_place. */
struct alignas(16) head_operands {
    float of[VECTORS][DIM], factor[2];
};

struct heads_shared {
    float slot[SLOTS][MATRIX];
    head_operands operands[ROUND]; /* q and k: of a group's first head alone */
    float known[CLASSES / 4][DIM], sum[CLASSES / 4][DIM]; /* of four classes each */
    looked_up looked[LOOKED];
    uint64_t full[SLOTS], done[SLOTS];
};

__device__ __forceinline__ void named_barrier(int id, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* The rows of a class lie one behind the other. */
__device__ __forceinline__ int key_place(int row)
{
    return row % CLASSES * EACH + row / CLASSES;
}

/* The heads of a block: all of the groups [first, end) of the step's sequences. */
struct block_heads {
    int of_group, first, end;

    __device__ __forceinline__ block_heads(const recurrence_args &a, int n_seqs)
        : of_group(a.n_heads / a.n_groups)
    {
        int64_t groups = (int64_t)n_seqs * a.n_groups;
        first = (int)(groups * blockIdx.x / gridDim.x) * of_group;
        end = (int)(groups * (blockIdx.x + 1) / gridDim.x) * of_group;
    }
};

/* Head `at` of all: sequence by sequence, of one the heads of a group together. */
__device__ __forceinline__ looked_up look_up(const recurrence_args &a, const step_arrays &s,
                                             const block_heads &b, int at, int n_seqs)
{
    int seq = at / a.n_heads, i = at % a.n_heads, group = i / b.of_group;
    looked_up u = {};

    u.group = group;
    u.head = a.tiled ? group + i % b.of_group * a.n_groups : i;
    const state_span p = span_of(a, s, seq, n_seqs);
    u.token = p.start;
    u.from = p.from;
    if (p.cached) {
        u.to = a.states + s.slot[p.start] / s.block_size * a.block_stride;
    }
    return u;
}

/* ---- the warp that copies ---- */

__device__ __forceinline__ void load_head(heads_shared &sh, const looked_up &u, int slot,
                                          int64_t matrix)
{
    uint32_t full = shared_address(&sh.full[slot]);

    if (u.from) {
        barrier_expect(full, BYTES);
        bulk_copy(shared_address(sh.slot[slot]), u.from + matrix + (int64_t)u.head * MATRIX, BYTES,
                  full);
    } else {
        barrier_arrive(full);
    }
}

__device__ __forceinline__ void store_head(heads_shared &sh, const looked_up &u, int slot,
                                           int64_t matrix)
{
#if BULK_COPY
    if (u.to) {
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(
                         u.to + matrix + (int64_t)u.head * MATRIX),
                     "r"(shared_address(sh.slot[slot])), "r"((uint32_t)BYTES)
                     : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }
#endif
}

/* Until slots may be written that copies read. */
__device__ __forceinline__ void stores_wait(void)
{
#if BULK_COPY
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
}

/* The n heads that are looked up; `before`: heads of earlier calls. By one thread. */
__device__ __forceinline__ void copy_heads(heads_shared &sh, int n, int before, int64_t matrix)
{
    for (int i = 0; i < min(n, (int)SLOTS); i++) {
        load_head(sh, sh.looked[i], (before + i) % SLOTS, matrix);
    }
    for (int i = 0; i < n; i++) {
        int slot = (before + i) % SLOTS;
        barrier_wait(shared_address(&sh.done[slot]), (before + i) / SLOTS & 1);
        random_delay();
        store_head(sh, sh.looked[i], slot, matrix);
        stores_wait();
        if (i + SLOTS < n) {
            load_head(sh, sh.looked[i + SLOTS], slot, matrix);
        }
    }
}

/* ---- operands ---- */

/* Where element r of an operand of a head lies among a token's channels. */
__device__ __forceinline__ int channel_at(const recurrence_args &a, const looked_up &u, int which,
                                          int r)
{
    return which * a.n_groups * DIM + (which < V ? u.group : u.head) * DIM + r;
}

/* A channel of a round's operands. */
struct round_channel {
    int head, c; /* its first head in the round; where it lies in a token */
    float *to;
};

/* Channel i of a round of n heads, of each group q, k and the heads' v; head -1: there
 * are fewer. */
__device__ __forceinline__ round_channel channel_of(heads_shared &sh, const recurrence_args &a,
                                                    const looked_up *u, int n, int of_group, int i)
{
    int all = (2 + of_group) * DIM, first = i / all * of_group, r = i % DIM;
    int vector = i % all / DIM, which = min(vector, (int)V), head = first + vector - which;

    if (head >= n) {
        return {-1, 0, nullptr};
    }
    return {head, channel_at(a, u[head], which, r),
            &sh.operands[head].of[which][which < V ? key_place(r) : r]};
}

/* What of a channel's convolution comes from earlier steps. */
struct channel_past {
    float input[3], weight, sum;
};

__device__ __forceinline__ channel_past load_past(const recurrence_args &a, const float *from,
                                                  int c)
{
    const float4 w = ((const float4 *)a.conv)[c];
    channel_past to = {{}, w.w, a.conv_bias ? a.conv_bias[c] : 0.0f};

#pragma unroll
    for (int k = 0; k < 3; k++) {
        to.input[k] = from ? from[(int64_t)c * 3 + k] : 0.0f;
    }
    to.sum += w.x * to.input[0];
    to.sum += w.y * to.input[1];
    to.sum += w.z * to.input[2];
    return to;
}

/* Gives a q or k in the order of key_place its length, by a warp, as norm_keys. */
__device__ __forceinline__ void norm_placed(float *x, float norm_scale, int lane)
{
    float squares = 0.0f;

#pragma unroll
    for (int i = 0; i < DIM; i += 32) {
        float y = x[key_place(i + lane)];
        squares += y * y;
    }
    float scale = norm_scale / sqrtf(warp_sum(squares) + 1e-6f);
#pragma unroll
    for (int i = 0; i < DIM; i += 32) {
        x[key_place(i + lane)] *= scale;
    }
}

/* Norms the q and k of n heads' groups. By all workers, between barriers. */
__device__ __forceinline__ void norm_operands(heads_shared &sh, const recurrence_args &a, int n,
                                              int of_group)
{
    int warp = threadIdx.x >> 5, i = (warp >> 1) * of_group;

    if (i < n) {
        norm_placed(sh.operands[i].of[warp & 1], warp & 1 ? 1.0f : query_scale(a),
                    threadIdx.x & 31);
    }
}

/* The operands of n heads. Calls pdl_wait where `waits`. */
template <typename T>
__device__ __forceinline__ void make_round(heads_shared &sh, const recurrence_args &a,
                                           const looked_up *u, int n, int of_group, bool waits)
{
    channel_past past[CHANNELS];
    round_channel of[CHANNELS];

#pragma unroll
    for (int k = 0; k < CHANNELS; k++) {
        of[k] = channel_of(sh, a, u, n, of_group, threadIdx.x + k * WORKERS);
        if (of[k].head >= 0 && !u[of[k].head].to) {
            of[k].head = -1;
        }
        if (of[k].head >= 0) {
            past[k] = load_past(a, u[of[k].head].from, of[k].c);
        }
    }
    if (waits) {
        pdl_wait();
    }
    if (threadIdx.x >= WORKERS - 32 && threadIdx.x - (WORKERS - 32) < n) {
        int i = threadIdx.x - (WORKERS - 32);
        if (u[i].to) {
            float2 f = factors_of<T>(a, u[i].token, u[i].head, false);
            sh.operands[i].factor[0] = f.x;
            sh.operands[i].factor[1] = f.y;
        }
    }
#pragma unroll
    for (int k = 0; k < CHANNELS; k++) {
        if (of[k].head < 0) {
            continue;
        }
        const looked_up &head = u[of[k].head];
        float x = to_float(((const T *)a.x)[head.token * a.x_stride + of[k].c]);
        *of[k].to = silu_of(past[k].sum + past[k].weight * x);
        float *to = head.to + (int64_t)of[k].c * 3;
        to[0] = past[k].input[1];
        to[1] = past[k].input[2];
        to[2] = x;
    }
    named_barrier(WORKERS_BARRIER, WORKERS);
    norm_operands(sh, a, n, of_group);
    named_barrier(WORKERS_BARRIER, WORKERS);
}

/* ---- a head's matrix ---- */

/* A lane's place: its columns from `column` on, and the rows of class 4 * sub + i. */
struct lane_place {
    int part, sub, i, column, kept; /* kept: the column whose sums it holds in the end */

    __device__ __forceinline__ lane_place()
        : part((threadIdx.x >> 5) % PARTS), sub((threadIdx.x >> 5) / PARTS),
          i(threadIdx.x >> 3 & 3), column(part * COLUMNS + (threadIdx.x & 7) * 4),
          kept(column + (i & 1) * 2 + (i >> 1))
    {
    }
};

/* The sum over the four classes of a warp, (0 + 1) + (2 + 3), of column `kept`. */
__device__ __forceinline__ float sum_classes(const float (&x)[4], const lane_place &l)
{
    bool odd = l.i & 1, high = l.i >> 1;
    float a = odd ? x[2] : x[0], b = odd ? x[3] : x[1];

    a += __shfl_xor_sync(0xffffffffu, odd ? x[0] : x[2], 8);
    b += __shfl_xor_sync(0xffffffffu, odd ? x[1] : x[3], 8);
    float mine = high ? b : a, other = high ? a : b;
    return mine + __shfl_xor_sync(0xffffffffu, other, 16);
}

/* The sums of four of a column, as sum_of_four has them. */
__device__ __forceinline__ float sum_subs(const float (&x)[CLASSES / 4][DIM], int column)
{
    return (x[0][column] + x[1][column]) + (x[2][column] + x[3][column]);
}

/* One token, as take_token; leaves the shares of S^T q in sh.sum. */
__device__ __forceinline__ void take_operands(float (&state)[EACH][4], heads_shared &sh,
                                              const head_operands &of_group, const head_operands &o,
                                              const lane_place &l)
{
    const float4 *q = (const float4 *)(of_group.of[Q] + (4 * l.sub + l.i) * EACH);
    const float4 *k = (const float4 *)(of_group.of[K] + (4 * l.sub + l.i) * EACH);
    const float4 k0 = k[0], k1 = k[1], q0 = q[0], q1 = q[1];
    const float ks[EACH] = {k0.x, k0.y, k0.z, k0.w, k1.x, k1.y, k1.z, k1.w};
    const float qs[EACH] = {q0.x, q0.y, q0.z, q0.w, q1.x, q1.y, q1.z, q1.w};
    float decay = o.factor[0], rate = o.factor[1], known[4] = {}, sum[4] = {}, add[4];

#pragma unroll
    for (int j = 0; j < EACH; j++) {
#pragma unroll
        for (int c = 0; c < 4; c++) {
            known[c] = __fmaf_rn(state[j][c], ks[j], known[c]);
        }
    }
    sh.known[l.sub][l.kept] = sum_classes(known, l);
    named_barrier(PART_BARRIER + l.part, WORKERS / PARTS);
#pragma unroll
    for (int c = 0; c < 4; c++) {
        float v = o.of[V][l.column + c];
        add[c] = rate * __fmaf_rn(-decay, sum_subs(sh.known, l.column + c), v);
    }
#pragma unroll
    for (int j = 0; j < EACH; j++) {
#pragma unroll
        for (int c = 0; c < 4; c++) {
            state[j][c] = __fmaf_rn(decay, state[j][c], __fmul_rn(ks[j], add[c]));
            sum[c] = __fmaf_rn(state[j][c], qs[j], sum[c]);
        }
    }
    sh.sum[l.sub][l.kept] = sum_classes(sum, l);
    named_barrier(PART_BARRIER + l.part, WORKERS / PARTS);
}

/* Head i of a round, whose matrix is in a slot; `first`: of its group. */
template <typename T>
__device__ __forceinline__ void take_head(heads_shared &sh, const recurrence_args &a,
                                          const looked_up &u, int i, int first, float *slot,
                                          const lane_place &l)
{
    const head_operands &o = sh.operands[i];
    int at = (4 * l.sub + l.i) * DIM + l.column; /* of each 16 rows */
    int column = l.part * COLUMNS + (threadIdx.x & 31);
    float state[EACH][4] = {}, skip = a.d ? a.d[u.head] : 0.0f;

#pragma unroll
    for (int j = 0; j < EACH && u.from; j++) {
        *(float4 *)state[j] = *(const float4 *)(slot + j * CLASSES * DIM + at);
    }
    take_operands(state, sh, sh.operands[first], o, l);
    if (l.sub == 0) {
        float y = __fmaf_rn(skip, o.of[V][column], sum_subs(sh.sum, column));
        ((T *)a.out)[u.token * a.out_stride + u.head * DIM + column] = from_float<T>(y);
    }
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        *(float4 *)(slot + j * CLASSES * DIM + at) = *(const float4 *)state[j];
    }
    proxy_fence();
}

template <typename T>
__device__ __forceinline__ void zero_head(const recurrence_args &a, const looked_up &u)
{
    if (threadIdx.x < DIM) {
        ((T *)a.out)[u.token * a.out_stride + u.head * DIM + threadIdx.x] = from_float<T>(0.0f);
    }
}

/* The gated norm of a round's n heads, a warp a head. Behind a barrier, since other
 * warps have written them. */
template <typename T>
__device__ __forceinline__ void norm_round(const recurrence_args &a, const looked_up *u, int n)
{
    const gated_norm_args &g = a.after;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;

    if (warp >= n) {
        return;
    }
    int64_t weight = g.own_weights ? (int64_t)u[warp].head * DIM : 0;
    int64_t first = (int64_t)u[warp].head * DIM + lane;
    T *to = (T *)g.x + u[warp].token * g.x_stride + first;
    const T *gates = (const T *)g.gate + u[warp].token * g.gate_stride + first;
    float x[DIM / 32], gate[DIM / 32], w[DIM / 32], squares = 0.0f;
#pragma unroll
    for (int k = 0; k < DIM / 32; k++) {
        x[k] = to_float(to[k * 32]);
        gate[k] = to_float(gates[k * 32]);
        w[k] = load_any(g.weight, g.weight_type, weight + lane + k * 32);
    }
#pragma unroll
    for (int k = 0; k < DIM / 32; k++) {
        squares = add_gated_square(g, squares, x[k], gate[k]);
    }
    float factor = group_factor(g, warp_sum(squares));
#pragma unroll
    for (int k = 0; k < DIM / 32; k++) {
        to[k * 32] = from_float<T>(gated_element(x[k], factor, w[k], gate[k]));
    }
}

/* The n heads that are looked up; `before`: heads of earlier calls. By the workers. */
template <typename T>
__device__ __forceinline__ void take_heads(heads_shared &sh, const recurrence_args &a, int n,
                                           int before, int of_group)
{
    const lane_place l;

    for (int first = 0; first < n; first += ROUND) {
        const looked_up *u = sh.looked + first;
        int of = min(n - first, (int)ROUND);
        make_round<T>(sh, a, u, of, of_group, before + first == 0);
        for (int i = 0; i < of; i++) {
            int at = before + first + i, slot = at % SLOTS;
            barrier_wait(shared_address(&sh.full[slot]), at / SLOTS & 1);
            random_delay();
            if (u[i].to) {
                take_head<T>(sh, a, u[i], i, i / of_group * of_group, sh.slot[slot], l);
            } else {
                zero_head<T>(a, u[i]);
            }
            __syncwarp();
            if ((threadIdx.x & 31) == 0) {
                barrier_arrive(shared_address(&sh.done[slot]));
            }
        }
        named_barrier(WORKERS_BARRIER, WORKERS);
        if (a.after.gate) {
            norm_round<T>(a, u, of);
        }
    }
}

/* Any grid. */
template <typename T>
__global__ void __launch_bounds__(ALL, 1) heads_kernel(recurrence_args a, step_arrays s, int n_seqs)
{
    extern __shared__ __align__(128) char memory[];
    heads_shared &sh = *(heads_shared *)memory;
    const block_heads b(a, n_seqs);
    int64_t matrix = (int64_t)channels_of(a) * 3;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, before = 0;

    pdl_release();
    if (threadIdx.x == 0) {
        barriers_init(shared_address(sh.full), SLOTS, 1);
        barriers_init(shared_address(sh.done), SLOTS, WORKERS / 32);
    }
    for (int at = b.first; at < b.end; at += LOOKED) {
        int n = min(b.end - at, (int)LOOKED);
        if (warp == WORKERS / 32 && lane < n) {
            sh.looked[lane] = look_up(a, s, b, at + lane, n_seqs);
        }
        __syncthreads();
        if (warp < WORKERS / 32) {
            take_heads<T>(sh, a, n, before, b.of_group);
        } else if (lane == 0) {
            copy_heads(sh, n, before, matrix);
        }
        before += n;
        __syncthreads();
    }
}

} // namespace

/* Whether there is a kernel for these heads. */
static bool takes_heads(const recurrence_args &a)
{
    int of_group = a.n_heads / a.n_groups;

    return cuda_code_version() >= 90 && a.delta && a.key_dim == DIM && a.value_dim == DIM &&
           a.kernel == 4 && (!a.after.gate || a.after.width == DIM) &&
           a.n_heads % a.n_groups == 0 && ROUND % of_group == 0 && (uintptr_t)a.conv % 16 == 0;
}

template <typename T>
static bool launch_heads(const recurrence_args &a, const step_arrays &s, int n_seqs, int blocks,
                         cudaStream_t stream)
{
    static const bool fits = allow_shared(heads_kernel<T>, sizeof(heads_shared));

    if (fits) {
        launch(heads_kernel<T>, dim3(blocks), dim3(ALL), sizeof(heads_shared), stream, a, s,
               n_seqs);
    }
    return fits;
}

extern "C" bool launch_recurrence_heads(const struct recurrence_args *a,
                                        const struct step_arrays *s, int32_t n_seqs,
                                        cudaStream_t stream)
{
    int most = attn_decode_blocks(), groups = n_seqs * a->n_groups, blocks = min(most, groups);
    bool done = false;

    if (takes_heads(*a) && groups * GROUP_SMS >= most) {
        DISPATCH_TYPE(a->type, done = launch_heads<T>(*a, *s, n_seqs, blocks, stream));
    }
    return done;
}
