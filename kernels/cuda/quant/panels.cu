/* Panels of experts (panels.h): packing, dummies and widening. */
#include "kernels/cuda/quant/codes.cuh"
#include "kernels/cuda/quant/panels.h"

namespace
{

/* Where a row's part of a group lies. */
struct place {
    int64_t codes, scale; /* bytes from the beginning of the weight */

    __device__ __forceinline__ place(int64_t row, int group, int32_t cols, int kind)
    {
        int first = group * PANEL_GROUP / PANEL_COLS * PANEL_COLS, in = group - first / PANEL_GROUP;
        int64_t segment = row / PANEL_ROWS * panel_bytes(cols, kind) + panel_bytes(first, kind);
        int groups = min((int)PANEL_COLS, cols - first) / PANEL_GROUP;

        codes = segment + in * PANEL_CODES + row % PANEL_ROWS * (PANEL_GROUP / 2);
        scale = segment + groups * PANEL_CODES +
                (in * PANEL_ROWS + row % PANEL_ROWS) * panel_scale_bytes(kind);
    }
};

/* A group of a row a thread. Codes of a scale of zero become zero. */
__global__ void pack_panels_kernel(char *out, const uint8_t *codes, int64_t pitch,
                                   const uint8_t *scale, int32_t cols)
{
    int group = blockIdx.y * blockDim.x + threadIdx.x, n = cols / PANEL_GROUP;
    int64_t row = blockIdx.x;

    if (group >= n) {
        return;
    }
    const uint8_t *from = codes + row * pitch + group * (PANEL_GROUP / 2);
    uint8_t byte = scale[row * n + group];
    place at(row, group, cols, PANELS_FP4);
    uint32_t word[4] = {};
#pragma unroll
    for (int i = 0; i < 16; i++) {
        uint32_t two = byte ? from[i] : 0;
        word[i / 4] |= fp4_placed(two & 15, i % 4) | fp4_placed(two >> 4, i % 4) << 16;
    }
    *(uint4 *)(out + at.codes) = make_uint4(word[0], word[1], word[2], word[3]);
    out[at.scale] = (char)byte;
}

/* Likewise. */
__global__ void pack_int4_kernel(char *out, const uint8_t *codes, int64_t pitch, const float *scale,
                                 const uint8_t *zero, int32_t group_cols, int32_t cols)
{
    int group = blockIdx.y * blockDim.x + threadIdx.x;
    int64_t row = blockIdx.x, of = row * ((cols + group_cols - 1) / group_cols);

    if (group >= cols / PANEL_GROUP) {
        return;
    }
    const uint8_t *from = codes + row * pitch + group * (PANEL_GROUP / 2);
    place at(row, group, cols, PANELS_INT4);
    uint32_t word[4] = {};
#pragma unroll
    for (int i = 0; i < 16; i++) {
        uint32_t two = from[i];
        word[i / 4] |= (two & 15) << (i % 4 * 4) | (two >> 4) << (i % 4 * 4 + 16);
    }
    *(uint4 *)(out + at.codes) = make_uint4(word[0], word[1], word[2], word[3]);
    of += group * PANEL_GROUP / group_cols;
    *(uint32_t *)(out + at.scale) =
        (__float_as_uint(scale[of]) & 0xfffffff0u) | (zero ? zero[of] & 15 : 8);
}

/* Likewise. Every word of codes is some codes. */
__global__ void dummy_panels_kernel(char *out, int32_t cols, int kind, float scale, uint64_t seed)
{
    int group = blockIdx.y * blockDim.x + threadIdx.x, n = cols / PANEL_GROUP;
    int64_t row = blockIdx.x;

    if (group >= n) {
        return;
    }
    place at(row, group, cols, kind);
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint64_t z = seed + (uint64_t)(row * n + group) * 4 + i;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
        z = (z ^ z >> 27) * 0x94d049bb133111ebu;
        word[i] = (uint32_t)(z >> 32);
    }
    *(uint4 *)(out + at.codes) = make_uint4(word[0], word[1], word[2], word[3]);
    if (kind == PANELS_INT4) {
        *(uint32_t *)(out + at.scale) = (__float_as_uint(scale) & 0xfffffff0u) | 8;
    } else {
        out[at.scale] = (char)253;
    }
}

template <typename T, int KIND>
__global__ void widen_panels_kernel(T *out, int64_t out_stride, const struct quant_weight w)
{
    pdl_release();
    pdl_wait();
    int eight = blockIdx.y * blockDim.x + threadIdx.x;
    int64_t row = blockIdx.x;

    if (eight >= w.cols / 8) {
        return;
    }
    place at(row, eight / 4, w.cols, KIND);
    uint32_t word = ((const uint32_t *)((const char *)w.codes + at.codes))[eight % 4];
    vec<T, 8> v;
    if (KIND == PANELS_INT4) {
        int4_group of(*(const uint32_t *)((const char *)w.codes + at.scale));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            store_pair(v.v + 2 * i, of.scale, of.pair(word, i));
        }
    } else {
        uint32_t factor = fp4_factor<PANEL_GROUP>(((const uint8_t *)w.codes)[at.scale]);
        float scale = w.scale[row];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            store_pair(v.v + 2 * i, scale, fp4_values(fp4_pair(word, i), factor));
        }
    }
    *(vec<T, 8> *)(out + row * out_stride + eight * 8) = v;
}

dim3 grid_of(int32_t rows, int32_t pieces)
{
    return dim3((unsigned)rows, (unsigned)(pieces + 127) / 128);
}

} // namespace

extern "C" void launch_pack_panels(void *out, const uint8_t *codes, int64_t pitch,
                                   const uint8_t *scale, int32_t rows, int32_t cols,
                                   cudaStream_t stream)
{
    pack_panels_kernel<<<grid_of(rows, cols / PANEL_GROUP), 128, 0, stream>>>((char *)out, codes,
                                                                              pitch, scale, cols);
}

extern "C" void launch_pack_int4_panels(void *out, const uint8_t *codes, int64_t pitch,
                                        const float *scale, const uint8_t *zero, int32_t group_cols,
                                        int32_t rows, int32_t cols, cudaStream_t stream)
{
    pack_int4_kernel<<<grid_of(rows, cols / PANEL_GROUP), 128, 0, stream>>>(
        (char *)out, codes, pitch, scale, zero, group_cols, cols);
}

extern "C" void launch_dummy_panels(void *out, int32_t rows, int32_t cols, int32_t kind,
                                    float scale, uint64_t seed, cudaStream_t stream)
{
    dummy_panels_kernel<<<grid_of(rows, cols / PANEL_GROUP), 128, 0, stream>>>((char *)out, cols,
                                                                               kind, scale, seed);
}

extern "C" void launch_widen_panels(void *out, int64_t out_stride, const struct quant_weight *w,
                                    int type, cudaStream_t stream)
{
    DISPATCH_TYPE(type, launch(panel_kind(w) == PANELS_INT4 ? widen_panels_kernel<T, PANELS_INT4>
                                                            : widen_panels_kernel<T, PANELS_FP4>,
                               grid_of(w->rows, w->cols / 8), dim3(128), 0, stream, (T *)out,
                               out_stride, *w));
}
