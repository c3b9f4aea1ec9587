/* Weights in groups (groups.h): widening and embedding. */
#include "kernels/cuda/quant/groups.cuh"

namespace
{

/* That of a row's group of a segment, by the row's words. */
template <int KIND>
__device__ __forceinline__ group_scale scale_at(const uint32_t *words, int group, bool halves,
                                                bool second)
{
    if constexpr (KIND == GROUPS_2) {
        const uint32_t *even = words + group / 2 * 2 * QUANT_TILE_ROWS;
        return group_scale::of_two(even[0], even[QUANT_TILE_ROWS], group, second);
    }
    return group_scale::of<KIND>(words[group * QUANT_TILE_ROWS], halves, second);
}

/* Eight neighbours of a row, from the four words that have 32, or 16, times the row's
 * factor. */
template <typename T, int KIND>
__device__ __forceinline__ vec<T, 8> eight_values(const struct quant_weight &w, int64_t row,
                                                  int col)
{
    constexpr bool BYTES = KIND == GROUPS_8;
    constexpr int COLS = BYTES ? GROUPS_COLS_8 : GROUPS_COLS_4, EACH = COLS / 16; /* of a chunk */
    int in_tile = (int)(row % QUANT_TILE_ROWS), in = col % COLS;
    const char *segment =
        (const char *)w.codes +
        quant_segment_at(row - in_tile, col / COLS, w.row_bytes / w.segment, w.segment);
    uint4 chunk =
        *(const uint4 *)(segment + in_tile * GROUPS_CODES + ((in / EACH) ^ (in_tile & 7)) * 16);
    const uint32_t *words =
        (const uint32_t *)(segment + QUANT_TILE_ROWS * GROUPS_CODES) + in_tile; /* of the row */
    const uint32_t word[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
    group_scale g = scale_at<KIND>(words, in / 32, w.group_cols == 16, in % 32 >= 16);
    float factor = w.scale[row];
    vec<T, 8> v;

#pragma unroll
    for (int i = 0; i < 4; i++) {
        float first, next;
        if constexpr (KIND == GROUPS_4 || KIND == GROUPS_2) {
            int p = in / 8 % 4;
            first = fmaf((float)(word[i] >> (4 * p) & 15), g.scale, g.minus);
            next = fmaf((float)(word[i] >> (4 * p + 16) & 15), g.scale, g.minus);
        } else {
            uint32_t bytes = BYTES ? word[i] : group_levels(word[i], in % 32 >= 16);
            first = group_byte(bytes, in / 8 % 2 * 2, g);
            next = group_byte(bytes, in / 8 % 2 * 2 + 1, g);
        }
        v.v[2 * i] = from_float<T>(factor * first);
        v.v[2 * i + 1] = from_float<T>(factor * next);
    }
    return v;
}

template <typename T, int KIND>
__global__ void widen_groups_kernel(T *out, int64_t out_stride, const struct quant_weight w)
{
    pdl_release();
    pdl_wait();
    int col = (blockIdx.y * blockDim.x + threadIdx.x) * 8;

    if (col < w.cols) {
        *(vec<T, 8> *)(out + blockIdx.x * out_stride + col) =
            eight_values<T, KIND>(w, blockIdx.x, col);
    }
}

/* As embed_kernel of elementwise.cu. */
template <typename T, int KIND>
__global__ void embed_groups_kernel(T *out, int64_t out_stride, const struct quant_weight w,
                                    const int32_t *token, int32_t first, float scale)
{
    pdl_wait(); /* before the release: attention reads the step's arrays before it waits */
    pdl_release();
    int id = token[blockIdx.x] - first;
    bool here = id >= 0 && id < w.rows;

    for (int col = threadIdx.x * 8; col < w.cols; col += blockDim.x * 8) {
        vec<T, 8> v = {};
        if (here) {
            v = eight_values<T, KIND>(w, id, col);
        }
        if (scale != 1.0f) {
            for (int i = 0; i < 8; i++) {
                v.v[i] = from_float<T>(to_float(v.v[i]) * scale);
            }
        }
        *(vec<T, 8> *)(out + blockIdx.x * out_stride + col) = v;
    }
}

} /* namespace */

extern "C" void launch_widen_groups(void *out, int64_t out_stride, const struct quant_weight *w,
                                    int type, cudaStream_t stream)
{
    dim3 grid((unsigned)w->rows, (unsigned)(w->cols / 8 + 127) / 128);

    DISPATCH_TYPE(type, launch(w->kind == GROUPS_4        ? widen_groups_kernel<T, GROUPS_4>
                               : w->kind == GROUPS_LEVELS ? widen_groups_kernel<T, GROUPS_LEVELS>
                               : w->kind == GROUPS_2      ? widen_groups_kernel<T, GROUPS_2>
                                                          : widen_groups_kernel<T, GROUPS_8>,
                               grid, dim3(128), 0, stream, (T *)out, out_stride, *w));
}

extern "C" void launch_embed_groups(void *out, int64_t out_stride, const struct quant_weight *w,
                                    const int32_t *token, int32_t first, int32_t rows, float scale,
                                    int type, cudaStream_t stream)
{
    DISPATCH_TYPE(type, launch(w->kind == GROUPS_4        ? embed_groups_kernel<T, GROUPS_4>
                               : w->kind == GROUPS_LEVELS ? embed_groups_kernel<T, GROUPS_LEVELS>
                               : w->kind == GROUPS_2      ? embed_groups_kernel<T, GROUPS_2>
                                                          : embed_groups_kernel<T, GROUPS_8>,
                               dim3((unsigned)rows), dim3(128), 0, stream, (T *)out, out_stride, *w,
                               token, first, scale));
}
