/* See bf16_ranks.h. */
#include "kernels/cpu/bf16_ranks.h"

int cpu_bf16_agree(enum cpu_bf16 *way, enum cpu_isa isa, struct comm *comm, struct err *e)
{
    int32_t first = (int32_t)*way;
    int rc = comm->ops->broadcast(comm, &first, sizeof(first), e);

    if (rc == 0 && isa == CPU_AVX512_BF16) {
        *way = (enum cpu_bf16)first;
    }
    return rc;
}
