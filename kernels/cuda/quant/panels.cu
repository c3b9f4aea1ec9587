/* Panels of experts (panels.h): packing, dummies and widening. */
#include "kernels/cuda/quant/fp4_order.h"
#include "kernels/cuda/quant/groups.cuh"

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

        int bytes = panel_code_bytes(kind);
        codes = segment + in * bytes + row % PANEL_ROWS * (bytes / PANEL_ROWS);
        scale = segment + groups * bytes +
                (in * PANEL_ROWS + row % PANEL_ROWS) * panel_scale_bytes(kind);
    }
};

/* A group of a row a thread. Codes of a scale of zero become zero. */
template <int KIND>
__global__ void pack_panels_kernel(char *out, const uint8_t *codes, int64_t pitch,
                                   const uint8_t *scale, int32_t cols)
{
    constexpr int SCALES = panel_scale_bytes(KIND);
    int group = blockIdx.y * blockDim.x + threadIdx.x, n = cols / PANEL_GROUP;
    int64_t row = blockIdx.x;

    if (group >= n) {
        return;
    }
    const uint8_t *from = codes + row * pitch + group * (PANEL_GROUP / 2);
    const uint8_t *byte = scale + (row * n + group) * SCALES;
    place at(row, group, cols, KIND);
    uint32_t word[4] = {};
#pragma unroll
    for (int i = 0; i < 16; i++) {
        uint32_t two = byte[i * SCALES / 16] ? from[i] : 0;
        word[i / 4] |= fp4_placed(two & 15, i % 4, false) | fp4_placed(two >> 4, i % 4, true);
    }
    *(uint4 *)(out + at.codes) = make_uint4(word[0], word[1], word[2], word[3]);
#pragma unroll
    for (int i = 0; i < SCALES; i++) {
        out[at.scale + i] = (char)byte[i];
    }
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
    int words = panel_code_bytes(kind) / (PANEL_ROWS * 4);
    for (int i = 0; i < words; i++) {
        uint64_t z = seed + (uint64_t)(row * n + group) * words + i;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
        z = (z ^ z >> 27) * 0x94d049bb133111ebu;
        ((uint32_t *)(out + at.codes))[i] = (uint32_t)(z >> 32);
    }
    if (kind == PANELS_INT4) {
        *(uint32_t *)(out + at.scale) = (__float_as_uint(scale) & 0xfffffff0u) | 8;
    } else if (kind == PANELS_GROUPS_8) {
        *(uint32_t *)(out + at.scale) = 0x3c005800u; /* one; GROUPS_ZERO_8 */
    } else {
        out[at.scale] = (char)253;
    }
}

/* The part-th eight neighbours of a row's group, which lies at `at`. */
template <int KIND>
__device__ __forceinline__ panel_eight<KIND> read_eight(const char *codes, const place &at,
                                                        int group, int part)
{
    const uint32_t *code = (const uint32_t *)(codes + at.codes);
    const char *scale = codes + at.scale;
    panel_eight<KIND> e;

    if constexpr (KIND == PANELS_GROUPS_8) {
        e.v = code[2 * part];
        e.more = code[2 * part + 1];
    } else {
        e.v = code[part];
    }
    if constexpr (KIND == PANELS_FP4 || KIND == PANELS_NVFP4) {
        e.word = ((const uint8_t *)scale)[KIND == PANELS_FP4 ? 0 : part / 2];
    } else if constexpr (KIND == PANELS_GROUPS_2) {
        scale -= group % 2 * (PANEL_ROWS * 4);
        e.word = *(const uint32_t *)scale;
        e.odd = *(const uint32_t *)(scale + PANEL_ROWS * 4);
    } else {
        e.word = *(const uint32_t *)scale;
    }
    return e;
}

template <typename T, int KIND>
__global__ void widen_panels_kernel(T *out, int64_t out_stride, const struct quant_weight w)
{
    pdl_release();
    pdl_wait();
    int eight = blockIdx.y * blockDim.x + threadIdx.x, group = eight / 4;
    int64_t row = blockIdx.x;

    if (eight >= w.cols / 8) {
        return;
    }
    place at(row, group, w.cols, KIND);
    float scale = w.scale[row];
    uint4 values;
    if constexpr (KIND == PANELS_INT4) {
        int4_group of(*(const uint32_t *)((const char *)w.codes + at.scale));
        values = of.values(((const uint32_t *)((const char *)w.codes + at.codes))[eight % 4]);
        scale = of.scale;
    } else {
        values = read_eight<KIND>((const char *)w.codes, at, group, eight % 4)
                     .values(w.group_cols == 16, group, eight % 4);
    }
    vec<T, 8> v;
    store_pair(v.v, scale, values.x);
    store_pair(v.v + 2, scale, values.y);
    store_pair(v.v + 4, scale, values.z);
    store_pair(v.v + 6, scale, values.w);
    *(vec<T, 8> *)(out + row * out_stride + eight * 8) = v;
}

template <typename T> auto widen_kernel(int32_t kind)
{
    switch (kind) {
    case PANELS_INT4:
        return widen_panels_kernel<T, PANELS_INT4>;
    case PANELS_NVFP4:
        return widen_panels_kernel<T, PANELS_NVFP4>;
    case PANELS_GROUPS_4:
        return widen_panels_kernel<T, PANELS_GROUPS_4>;
    case PANELS_GROUPS_2:
        return widen_panels_kernel<T, PANELS_GROUPS_2>;
    case PANELS_LEVELS:
        return widen_panels_kernel<T, PANELS_LEVELS>;
    case PANELS_GROUPS_8:
        return widen_panels_kernel<T, PANELS_GROUPS_8>;
    default:
        return widen_panels_kernel<T, PANELS_FP4>;
    }
}

dim3 grid_of(int32_t rows, int32_t pieces)
{
    return dim3((unsigned)rows, (unsigned)(pieces + 127) / 128);
}

} // namespace

extern "C" void launch_pack_panels(void *out, const uint8_t *codes, int64_t pitch,
                                   const uint8_t *scale, int32_t group_cols, int32_t rows,
                                   int32_t cols, cudaStream_t stream)
{
    auto kernel =
        group_cols == 16 ? pack_panels_kernel<PANELS_NVFP4> : pack_panels_kernel<PANELS_FP4>;

    kernel<<<grid_of(rows, cols / PANEL_GROUP), 128, 0, stream>>>((char *)out, codes, pitch, scale,
                                                                  cols);
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
    DISPATCH_TYPE(type, launch(widen_kernel<T>(panel_kind(w)), grid_of(w->rows, w->cols / 8),
                               dim3(128), 0, stream, (T *)out, out_stride, *w));
}
