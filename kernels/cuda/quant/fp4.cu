/* Segments of FORMAT_FP4 (quant.h): packing and widening. */
#include "kernels/cuda/quant/codes.cuh"
#include "kernels/cuda/quant/fp4_order.h"
#include "kernels/cuda/quant/quant.h"

namespace
{

/* A word of eight codes a thread, of one group; the first of a segment also write its
 * scales, four each. Codes of a scale of zero become zero. */
template <int GROUP>
__global__ void pack_fp4_kernel(char *out, const uint8_t *codes, int64_t pitch,
                                const uint8_t *scale, int32_t cols)
{
    constexpr int BYTES = GROUP == 16 ? QUANT_NVFP4_BYTES : QUANT_MXFP4_BYTES,
                  GROUPS = QUANT_SEGMENT / GROUP; /* of a segment */
    int word = blockIdx.y * blockDim.x + threadIdx.x, in_segment = word % 64;
    int64_t row = blockIdx.x;

    if (word >= cols / 8) {
        return;
    }
    const uint8_t *from = codes + row * pitch + word / 4 * 16 + word % 4,
                  *scales = scale + row * (cols / GROUP);
    uint32_t v = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t two = scales[(word / 4 * 32 + i * 8) / GROUP] ? from[4 * i] : 0;
        v |= fp4_placed(two & 15, i, false) | fp4_placed(two >> 4, i, true);
    }
    uint32_t *segment =
        (uint32_t *)(out + quant_segment_at(row, word / 64, cols / QUANT_SEGMENT, BYTES));
    segment[in_segment] = v;
    if (in_segment < GROUPS / 4) {
        const uint8_t *four = scales + word / 64 * GROUPS + in_segment * 4;
        segment[64 + in_segment] = four[0] | four[1] << 8 | four[2] << 16 | (uint32_t)four[3] << 24;
    }
}

/* Eight neighbours of a row a thread, from the four words that have 32. */
template <typename T, int GROUP>
__global__ void widen_fp4_kernel(T *out, int64_t out_stride, const struct quant_weight w)
{
    pdl_release();
    pdl_wait();
    int eight = blockIdx.y * blockDim.x + threadIdx.x;
    int64_t row = blockIdx.x;

    if (eight >= w.cols / 8) {
        return;
    }
    const char *segment = (const char *)w.codes +
                          quant_segment_at(row, eight / 64, w.cols / QUANT_SEGMENT, w.segment);
    uint8_t byte = ((const uint8_t *)segment)[QUANT_SEGMENT / 2 + eight % 64 * 8 / GROUP];
    uint32_t factor = fp4_factor<GROUP>(byte);
    uint4 words = *(const uint4 *)(segment + eight % 64 / 4 * 16);
    const uint32_t word[4] = {words.x, words.y, words.z, words.w};
    float scale = w.scale[row];
    vec<T, 8> v;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        store_pair(v.v + 2 * i, scale, fp4_values(fp4_pair(word[i], eight % 4), factor));
    }
    *(vec<T, 8> *)(out + row * out_stride + eight * 8) = v;
}

template <typename T>
void widen_to(T *out, int64_t out_stride, const struct quant_weight &w, cudaStream_t stream)
{
    dim3 grid(w.rows, (w.cols / 8 + 255) / 256);

    if (w.group_cols == 16) {
        launch(widen_fp4_kernel<T, 16>, grid, dim3(256), 0, stream, out, out_stride, w);
    } else {
        launch(widen_fp4_kernel<T, 32>, grid, dim3(256), 0, stream, out, out_stride, w);
    }
}

} /* namespace */

extern "C" void launch_widen_fp4(void *out, int64_t out_stride, const struct quant_weight *w,
                                 int type, cudaStream_t stream)
{
    if (type == T_F16) {
        widen_to((__half *)out, out_stride, *w, stream);
    } else if (type == T_F32) {
        widen_to((float *)out, out_stride, *w, stream);
    } else {
        widen_to((__nv_bfloat16 *)out, out_stride, *w, stream);
    }
}

extern "C" void launch_pack_fp4(void *out, const uint8_t *codes, int64_t pitch,
                                const uint8_t *scale, int32_t rows, int32_t cols,
                                int32_t group_cols, cudaStream_t stream)
{
    dim3 grid(rows, (cols / 8 + 255) / 256);

    if (group_cols == 16) {
        pack_fp4_kernel<16><<<grid, 256, 0, stream>>>((char *)out, codes, pitch, scale, cols);
    } else {
        pack_fp4_kernel<32><<<grid, 256, 0, stream>>>((char *)out, codes, pitch, scale, cols);
    }
}
