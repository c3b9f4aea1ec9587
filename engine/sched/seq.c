#include "engine/sched/seq.h"

uint64_t seq_seed(uint64_t request_seed, int32_t index)
{
    /* splitmix64's step and finaliser: bijective in `request_seed` for each index. */
    uint64_t z = request_seed + (uint64_t)(uint32_t)index * UINT64_C(0x9e3779b97f4a7c15);

    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

struct sample_row seq_sample_row(const struct seq *s, int32_t position, int32_t logits_row)
{
    const struct gen_params *params = &s->group->request->params;

    return (struct sample_row){.logits_row = logits_row,
                               .kind = SAMPLE_TOKEN,
                               .temperature = params->temperature,
                               .top_p = params->top_p,
                               .min_p = params->min_p,
                               .top_k = params->top_k,
                               .presence_penalty = params->presence_penalty,
                               .frequency_penalty = params->frequency_penalty,
                               .repetition_penalty = params->repetition_penalty,
                               .n_logprobs = -1,
                               .target = -1,
                               .seed = s->seed,
                               .position = position,
                               .row = s->slot,
                               .n_prompt = s->group->n_prompt,
                               .mask_first = -1};
}
