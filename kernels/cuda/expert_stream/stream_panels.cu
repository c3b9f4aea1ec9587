/* A launch of few rows (stream.cu) where experts are panels (quant/panels.h), up's and
 * down's of one kind, or of two that files have together: a GGUF file keeps more bits
 * of down than of up in some layers. */
#include "kernels/cuda/expert_stream/stream_kernel.cuh"

namespace
{

using namespace expert_stream;

/* What there is for up and down of these kinds. */
struct stream_kernel_of {
    bool (*fits)(void);
    void (*run)(const expert_few &a, const expert_ranks &ranks, int32_t n_blocks,
                cudaStream_t stream);
};

template <int UP, int DOWN> stream_kernel_of kernel_of(void)
{
    using L = stream_launch<__nv_bfloat16, B_PANELS + UP, B_PANELS + DOWN, false>;

    return {L::fits, L::run};
}

/* `fits` is NULL where there is none. */
stream_kernel_of kernel_for(int32_t up, int32_t down)
{
    switch (up) {
    case PANELS_FP4:
        return down == up ? kernel_of<PANELS_FP4, PANELS_FP4>() : stream_kernel_of{};
    case PANELS_NVFP4:
        return down == up ? kernel_of<PANELS_NVFP4, PANELS_NVFP4>() : stream_kernel_of{};
    case PANELS_GROUPS_4:
        return down == up                ? kernel_of<PANELS_GROUPS_4, PANELS_GROUPS_4>()
               : down == PANELS_GROUPS_8 ? kernel_of<PANELS_GROUPS_4, PANELS_GROUPS_8>()
                                         : stream_kernel_of{};
    case PANELS_LEVELS:
        return down == up                ? kernel_of<PANELS_LEVELS, PANELS_LEVELS>()
               : down == PANELS_GROUPS_8 ? kernel_of<PANELS_LEVELS, PANELS_GROUPS_8>()
                                         : stream_kernel_of{};
    case PANELS_GROUPS_8:
        return down == up ? kernel_of<PANELS_GROUPS_8, PANELS_GROUPS_8>() : stream_kernel_of{};
    default:
        return {};
    }
}

} // namespace

extern "C" bool expert_stream_panels_fit(const struct expert_few *a)
{
    stream_kernel_of k = kernel_for(a->up.panels, a->down.panels);

    return k.fits && k.fits();
}

extern "C" void launch_expert_stream_panels(const struct expert_few *a,
                                            const struct expert_ranks *ranks, int32_t n_blocks,
                                            cudaStream_t stream)
{
    kernel_for(a->up.panels, a->down.panels).run(*a, *ranks, n_blocks, stream);
}
