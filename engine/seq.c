#include "engine/seq.h"

#include <string.h>

uint64_t seq_seed(uint64_t request_seed, int32_t index)
{
    /* splitmix64's step and finaliser: bijective in `request_seed` for each index. */
    uint64_t z = request_seed + (uint64_t)(uint32_t)index * UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

void seq_count(struct seq *s, int32_t token, bool in_prompt)
{
    uint32_t i = (uint32_t)token * 2654435761u & (uint32_t)s->count_mask;
    while (s->count_slot[i] >= 0 && s->count[s->count_slot[i]].token != token)
        i = (i + 1) & (uint32_t)s->count_mask;
    if (s->count_slot[i] < 0) {
        s->count_slot[i] = s->n_counts;
        s->count[s->n_counts++] = (struct token_count){.token = token};
    }
    struct token_count *k = &s->count[s->count_slot[i]];
    if (in_prompt)
        k->in_prompt = 1;
    else
        k->n_output++;
}

void seq_copy_counts(struct seq *dst, const struct seq *src)
{
    if (!src->count)
        return;
    memcpy(dst->count, src->count, (size_t)src->n_counts * sizeof *src->count);
    memcpy(dst->count_slot, src->count_slot, ((size_t)src->count_mask + 1) * sizeof *src->count_slot);
    dst->n_counts = src->n_counts;
}
