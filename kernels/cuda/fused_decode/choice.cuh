/* The choice of experts of a fused launch, in shared memory: every block makes it from
 * the router's scores, MMA warp r for row r, before the experts' products begin. The
 * other warps wait for it at an mbarrier.
 *
 * The chosen experts have places 0, 1, ... in the order of their indices. Up has the
 * tiles of all of them, place after place, and multiplies them with all rows; only the
 * results of rows that chose the expert are stored. Down takes per_slice neighbouring
 * places as a split-K slice, or a part of the depth of one; its tiles are those of one
 * slice after another, of which each block has as many neighbours.
 */
#ifndef QUIRE_KERNELS_CUDA_FUSED_DECODE_CHOICE_CUH
#define QUIRE_KERNELS_CUDA_FUSED_DECODE_CHOICE_CUH

#include "kernels/cuda/experts/route.cuh"
#include "kernels/cuda/fused_decode/fused_decode.h"
#include "kernels/cuda/gemm/bulk.cuh"

struct expert_choice {
    float weight[FUSED_PAIRS][FUSED_ROWS];  /* by place and row; 0 of others */
    int8_t of_row[FUSED_PAIRS][FUSED_ROWS]; /* which of the row's experts it is; -1: none */
    int32_t expert[FUSED_PAIRS];            /* by place */
    int32_t pair_expert[FUSED_PAIRS];       /* of pair row * top + i */
    float pair_weight[FUSED_PAIRS];         /* likewise */
    uint32_t chosen[FUSED_EXPERTS / 32];    /* a bit an expert */
    int32_t n;                              /* experts that are chosen */
    int32_t rows;                           /* rows that are no padding */
};
static_assert(sizeof(expert_choice) <= FUSED_CHOICE_BYTES, "planned for");

/* Before any warp chooses; thread i of n. */
__device__ __forceinline__ void clear_choice(expert_choice &c, int i, int n)
{
    for (int k = i; k < FUSED_PAIRS * FUSED_ROWS; k += n) {
        c.weight[k / FUSED_ROWS][k % FUSED_ROWS] = 0.0f;
        c.of_row[k / FUSED_ROWS][k % FUSED_ROWS] = -1;
    }
    for (int k = i; k < FUSED_EXPERTS / 32; k += n) {
        c.chosen[k] = 0;
    }
}

/* An MMA warp's row. */
__device__ __forceinline__ void choose_row(expert_choice &c, const expert_route &a, int row,
                                           int lane)
{
    int expert;
    float weight;

    choose_experts_of<FUSED_EXPERTS / 32, false>(a, row, lane, &expert, &weight);
    if (lane < a.top) {
        c.pair_expert[row * a.top + lane] = expert;
        c.pair_weight[row * a.top + lane] = weight;
        atomicOr(&c.chosen[expert >> 5], 1u << (expert & 31));
    }
}

/* How many chosen experts have a smaller index than `expert`. */
__device__ __forceinline__ int place_of(const expert_choice &c, int expert)
{
    int place = 0;

    for (int w = 0; w < expert >> 5; w++) {
        place += __popc(c.chosen[w]);
    }
    return expert & 31 ? place + __popc(c.chosen[expert >> 5] << (32 - (expert & 31))) : place;
}

/* Gives the chosen experts their places; thread i of n. */
__device__ __forceinline__ void place_experts(expert_choice &c, const expert_route &a, int rows,
                                              int i, int n)
{
    if (i == 0) {
        c.n = place_of(c, FUSED_EXPERTS);
    }
    for (; i < rows * a.top; i += n) {
        int row = i / a.top, expert = c.pair_expert[i], place = place_of(c, expert);
        c.expert[place] = expert;
        c.weight[place][row] = c.pair_weight[i];
        c.of_row[place][row] = (int8_t)(i % a.top);
    }
}

/* Slices of down: per_slice places each, or as many slices a place as an expert has
 * parts. */
__device__ __forceinline__ int down_slices(const fused_args &a, const expert_choice &c)
{
    const fused_experts &e = a.experts;

    return max(1, e.parts > 1 ? c.n * e.parts : (c.n + e.per_slice - 1) / e.per_slice);
}

/* What a slice of down holds: columns [begin, end) of each of its experts. */
struct down_slice {
    int first; /* place of the first expert */
    int begin, end;
    int n_stages; /* of all its experts together */

    __device__ __forceinline__ down_slice(const fused_args &a, const fused_op &q,
                                          const expert_choice &c, int slice)
    {
        const fused_experts &e = a.experts;
        int part = slice % e.parts;

        first = slice / e.parts * e.per_slice;
        begin = part * FUSED_DOWN_K;
        end = min(q.k, begin + FUSED_DOWN_K);
        int stages = min(e.stages - part * e.part_stages, e.part_stages);
        n_stages = min(e.per_slice, c.n - first) * stages;
    }
};

/* The block's tiles of an op of the chosen experts: of up, tile i % tiles of the expert
 * at place i / tiles; of down, tile i % tiles of slice i / tiles. */
__device__ __forceinline__ tile_schedule expert_tiles_of(const fused_args &a, const fused_op &q,
                                                         const expert_choice &c)
{
    int n = q.n / FUSED_TILE, blocks = gridDim.x, block = blockIdx.x;

    if (q.kind == FUSED_EXPERT_UP) {
        return tile_schedule_for(n * c.n, 1, q.first, block, blocks);
    }
    n *= down_slices(a, c);
    int first = n * block / blocks;
    return {0, first, 1, n * (block + 1) / blocks - first};
}

#endif
