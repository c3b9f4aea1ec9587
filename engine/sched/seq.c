#include "engine/sched/seq.h"

uint64_t seq_seed(uint64_t request_seed, int32_t index)
{
    /* splitmix64's step and finaliser: bijective in `request_seed` for each index. */
    uint64_t z = request_seed + (uint64_t)(uint32_t)index * UINT64_C(0x9e3779b97f4a7c15);

    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}
