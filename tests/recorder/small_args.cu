/* What the recorder asks of launches whose arguments only nvcc can read. */
#include "kernels/cuda/fused_decode/small_pipeline.cuh"
#include "tests/recorder/recorder.h"

int recorder_small_args(const void *args, int32_t *ret_rows)
{
    const small_args *a = (const small_args *)args; /* mixed_args and few_args begin so */

    *ret_rows = a->rows;
    return a->ranks.n_ranks;
}
