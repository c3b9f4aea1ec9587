/* Thread-block clusters of compute capability 9. Code for older devices sees a cluster
 * of one block. */
#ifndef QUIRE_KERNELS_CUDA_CLUSTER_CUH
#define QUIRE_KERNELS_CUDA_CLUSTER_CUH

#include <cooperative_groups.h>

#include "kernels/cuda/common.cuh"

struct block_cluster {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    __device__ unsigned rank() const
    {
        return cooperative_groups::cluster_group::block_rank();
    }
    __device__ unsigned blocks() const
    {
        return cooperative_groups::cluster_group::num_blocks();
    }
    __device__ void sync() const
    {
        cooperative_groups::cluster_group::sync();
    }
    /* The same shared-memory variable in block `rank` of the cluster. */
    template <typename T> __device__ T *of(T *shared, unsigned rank) const
    {
        return cooperative_groups::cluster_group::map_shared_rank(shared, rank);
    }
#else
    __device__ unsigned rank() const
    {
        return 0;
    }
    __device__ unsigned blocks() const
    {
        return 1;
    }
    __device__ void sync() const
    {
        __syncthreads();
    }
    template <typename T> __device__ T *of(T *shared, unsigned) const
    {
        return shared;
    }
#endif
};

#endif
