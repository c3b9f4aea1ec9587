#include "engine/sched/seq.h"

uint64_t seq_seed(uint64_t request_seed, int32_t index)
{
    /* splitmix64's step and finaliser: bijective in `request_seed` for each index. */
    uint64_t z = request_seed + (uint64_t)(uint32_t)index * UINT64_C(0x9e3779b97f4a7c15);

    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

void seq_sample_row(struct sample_row *ret, const struct seq *s, int32_t position,
                    int32_t logits_row)
{
    const struct gen_params *params = &s->group->request->params;

    /* one by one: of an initialiser the compiler would make a copy first */
    ret->logits_row = logits_row;
    ret->kind = SAMPLE_TOKEN;
    ret->temperature = params->temperature;
    ret->top_p = params->top_p;
    ret->min_p = params->min_p;
    ret->top_k = params->top_k;
    ret->presence_penalty = params->presence_penalty;
    ret->frequency_penalty = params->frequency_penalty;
    ret->repetition_penalty = params->repetition_penalty;
    ret->n_logprobs = -1;
    ret->n_candidates = 0;
    ret->target = -1;
    ret->seed = s->seed;
    ret->position = position;
    ret->row = s->slot;
    ret->n_prompt = s->group->n_prompt;
    ret->bias_first = ret->n_bias = 0;
    ret->mask_first = -1;
    ret->late_mask = 0;
}
