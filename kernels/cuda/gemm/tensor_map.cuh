/* Tensor maps, which describe a matrix to the copy engine of compute capability 9, and
 * copies of boxes by them. Shared-memory boxes have rows of 128 bytes, swizzled;
 * elements outside the matrix read as zero and are not written. */
#ifndef QUIRE_KERNELS_CUDA_GEMM_TENSOR_MAP_CUH
#define QUIRE_KERNELS_CUDA_GEMM_TENSOR_MAP_CUH

#include <cuda.h>

#include "kernels/cuda/gemm/bulk.cuh"

/* ---- device ---- */

/* The box whose first element is at (column, row), to shared memory; completes on
 * `bar`. */
__device__ __forceinline__ void tensor_copy(uint32_t to, const CUtensorMap *map, int column,
                                            int row, uint32_t bar)
{
#if BULK_COPY
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
                 "l"(map), "r"(column), "r"(row), "r"(bar)
                 : "memory");
#endif
}

/* The same to the blocks of the cluster in `mask`, at the same offsets in each; it
 * completes on the barrier of each. */
__device__ __forceinline__ void tensor_copy_to(uint32_t to, const CUtensorMap *map, int column,
                                               int row, uint32_t bar, uint16_t mask)
{
#if BULK_COPY
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
                 "l"(map), "r"(column), "r"(row), "r"(bar), "h"(mask)
                 : "memory");
#endif
}

/* A box from shared memory; part of the thread's current group of stores. */
__device__ __forceinline__ void tensor_store(const CUtensorMap *map, int column, int row,
                                             uint32_t from)
{
#if BULK_COPY
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
        "r"(column), "r"(row), "r"(from)
        : "memory");
#endif
}

__device__ __forceinline__ void store_commit(void)
{
#if BULK_COPY
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}

/* Until at most LEFT of this thread's groups of stores have still to read shared
 * memory. */
template <int LEFT> __device__ __forceinline__ void store_wait_read(void)
{
#if BULK_COPY
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LEFT) : "memory");
#endif
}

/* ---- host ---- */

typedef CUresult (*tensor_map_encode)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                                      const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                                      const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                                      CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/* The driver's function, or NULL. */
static inline tensor_map_encode tensor_map_encoder(void)
{
    static tensor_map_encode found = [] {
        void *f = NULL;
        cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
        cudaError_t rc = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000,
                                                          cudaEnableDefault, &result);
#else
        cudaError_t rc =
            cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &f, cudaEnableDefault, &result);
#endif
        if (rc != cudaSuccess || result != cudaDriverEntryPointSuccess) {
            cudaGetLastError();
            f = NULL;
        }
        return (tensor_map_encode)f;
    }();

    return found;
}

/* Describes a matrix [rows, columns] whose rows are `pitch` bytes apart, for boxes of
 * box_rows by box_columns, which are 128 bytes. False: the driver has no such maps, or
 * refuses these sizes: data and pitch are multiples of 16 bytes. */
static inline bool tensor_map(CUtensorMap *ret, CUtensorMapDataType type, const void *data,
                              int64_t rows, int64_t columns, int64_t pitch, int box_rows,
                              int box_columns)
{
    cuuint64_t size[2] = {(cuuint64_t)columns, (cuuint64_t)rows};
    cuuint64_t pitches[1] = {(cuuint64_t)pitch};
    cuuint32_t box[2] = {(cuuint32_t)box_columns, (cuuint32_t)box_rows}, step[2] = {1, 1};
    tensor_map_encode encode = tensor_map_encoder();

    return encode && encode(ret, type, 2, (void *)data, size, pitches, box, step,
                            CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                            CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                            CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

/* Describes a bf16 matrix [rows, columns], a multiple of 64, as panels of 64 columns,
 * for boxes of `panels` by box_rows by 64: coordinates are 0, the row, the panel. */
static inline bool tensor_map_panels(CUtensorMap *ret, const void *data, int64_t rows,
                                     int64_t columns, int64_t stride, int box_rows, int panels)
{
    cuuint64_t size[3] = {64, (cuuint64_t)rows, (cuuint64_t)(columns / 64)};
    cuuint64_t pitches[2] = {(cuuint64_t)(stride * 2), 128};
    cuuint32_t box[3] = {64, (cuuint32_t)box_rows, (cuuint32_t)panels}, step[3] = {1, 1, 1};
    tensor_map_encode encode = tensor_map_encoder();

    return encode && encode(ret, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, (void *)data, size, pitches,
                            box, step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                            CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                            CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

/* That of 16-bit numbers; `type` is an enum dtype, the stride in elements. */
static inline bool tensor_map_16(CUtensorMap *ret, int type, const void *data, int64_t rows,
                                 int64_t columns, int64_t stride, int box_rows)
{
    return tensor_map(
        ret, type == T_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        data, rows, columns, stride * 2, box_rows, 64);
}

#endif
