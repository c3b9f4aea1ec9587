/* Weights in groups (groups.h): widening. */
#include "kernels/cuda/quant/groups.cuh"

namespace
{

/* Eight neighbours of a row a thread, from the four words that have 32, or 16. */
template <typename T, int KIND>
__global__ void widen_groups_kernel(T *out, int64_t out_stride, const struct quant_weight w)
{
    constexpr bool BYTES = KIND == GROUPS_8;
    constexpr int COLS = BYTES ? GROUPS_COLS_8 : GROUPS_COLS_4, EACH = COLS / 16; /* of a chunk */
    pdl_release();
    pdl_wait();
    int col = (blockIdx.y * blockDim.x + threadIdx.x) * 8;
    int64_t row = blockIdx.x;
    int in_tile = (int)(row % QUANT_TILE_ROWS), in = col % COLS;

    if (col >= w.cols) {
        return;
    }
    int64_t n_segments = w.row_bytes / w.segment;
    const char *segment =
        (const char *)w.codes + quant_segment_at(row - in_tile, col / COLS, n_segments, w.segment);
    uint4 chunk =
        *(const uint4 *)(segment + in_tile * GROUPS_CODES + ((in / EACH) ^ (in_tile & 7)) * 16);
    uint32_t group = *(const uint32_t *)(segment + QUANT_TILE_ROWS * GROUPS_CODES +
                                         (in / 32 * QUANT_TILE_ROWS + in_tile) * 4);
    const uint32_t word[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
    group_scale g = group_scale::of<KIND>(group, w.group_cols == 16, in % 32 >= 16);
    float factor = w.scale[row];
    vec<T, 8> v;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float first, next;
        if constexpr (KIND == GROUPS_4) {
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
    *(vec<T, 8> *)(out + row * out_stride + col) = v;
}

} /* namespace */

extern "C" void launch_widen_groups(void *out, int64_t out_stride, const struct quant_weight *w,
                                    int type, cudaStream_t stream)
{
    dim3 grid((unsigned)w->rows, (unsigned)(w->cols / 8 + 127) / 128);

    DISPATCH_TYPE(type, launch(w->kind == GROUPS_4        ? widen_groups_kernel<T, GROUPS_4>
                               : w->kind == GROUPS_LEVELS ? widen_groups_kernel<T, GROUPS_LEVELS>
                                                          : widen_groups_kernel<T, GROUPS_8>,
                               grid, dim3(128), 0, stream, (T *)out, out_stride, *w));
}
