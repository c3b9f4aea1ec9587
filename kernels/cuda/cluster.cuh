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
        random_delay();
        cooperative_groups::cluster_group::sync();
    }
    /* The halves of sync(): all have come to `arrive` when one leaves `wait`. */
    __device__ void arrive() const
    {
        random_delay();
        asm volatile("barrier.cluster.arrive.release;" ::: "memory");
    }
    __device__ void wait() const
    {
        asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
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
        random_delay();
        __syncthreads();
    }
    __device__ void arrive() const {}
    __device__ void wait() const
    {
        __syncthreads();
    }
    template <typename T> __device__ T *of(T *shared, unsigned) const
    {
        return shared;
    }
#endif
};

/* Launches in clusters of n blocks, 1: in none, with the attributes of `launch`. False:
 * it failed, and the error is CUDA's last. */
template <typename... P, typename... A>
static inline bool launch_clusters(unsigned n, void (*kernel)(P...), dim3 grid, dim3 block,
                                   size_t shared_bytes, cudaStream_t stream, const A &...args)
{
    cudaLaunchConfig_t c = {};
    cudaLaunchAttribute attr[3];

    attr[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attr[0].val.programmaticStreamSerializationAllowed = 1;
    attr[1].id = cudaLaunchAttributePreferredSharedMemoryCarveout;
    attr[1].val.sharedMemCarveout = cudaSharedmemCarveoutMaxShared;
    attr[2].id = cudaLaunchAttributeClusterDimension;
    attr[2].val.clusterDim.x = n;
    attr[2].val.clusterDim.y = attr[2].val.clusterDim.z = 1;
    c.gridDim = grid;
    c.blockDim = block;
    c.dynamicSmemBytes = shared_bytes;
    c.stream = stream;
    c.attrs = attr;
    c.numAttrs = n > 1 ? 3 : 2;
    return cudaLaunchKernelEx(&c, kernel, args...) == cudaSuccess;
}

#endif
