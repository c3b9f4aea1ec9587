#include "tests/sim/toy.h"

#include <math.h>
#include <string.h>

static uint64_t mix(uint64_t z)
{
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

uint64_t toy_start(void)
{
    return UINT64_C(0x9e3779b97f4a7c15);
}

uint64_t toy_read(uint64_t context, int32_t token)
{
    return mix(context * 31 + (uint32_t)token + 1);
}

static float unit(uint64_t h)
{
    return (float)(h >> 40) * 0x1p-24F;
}

void toy_logprobs(uint64_t context, int32_t vocab, float *logprob)
{
    for (int32_t t = 0; t < vocab; t++) {
        logprob[t] = -1 - 8 * unit(mix(context + (uint64_t)t * UINT64_C(0x9e3779b97f4a7c15)));
    }
}

static uint64_t bits(float f)
{
    uint32_t u;

    memcpy(&u, &f, sizeof(u));
    return u;
}

/* Every parameter changes the noise, so that a lost one changes the result. */
static float noise(const struct toy_sampling *s, int32_t t)
{
    uint64_t h = mix(s->seed + (uint64_t)s->position * 77 + (uint32_t)t);

    h = mix(h ^ bits(s->top_p) ^ bits(s->min_p) << 32 ^ (uint64_t)s->top_k << 7 ^
            bits(s->temperature) << 20);
    return 6 * unit(h);
}

int32_t toy_sample(const float *logit, int32_t vocab, const struct toy_sampling *s)
{
    int32_t best = -1;
    float best_value = 0;

    for (int32_t t = 0; t < vocab; t++) {
        if (logit[t] == -INFINITY) {
            continue;
        }
        float value = s->temperature == 0 ? logit[t] : logit[t] / s->temperature + noise(s, t);
        if (best < 0 || value > best_value) {
            best = t;
            best_value = value;
        }
    }
    return best;
}

int32_t toy_top(const float *value, int32_t vocab, int32_t n, int32_t *token, float *best)
{
    int32_t found = 0;

    for (int32_t t = 0; t < vocab; t++) {
        if (value[t] == -INFINITY || (found == n && value[t] <= best[n - 1])) {
            continue;
        }
        int32_t i = found < n ? found++ : n - 1;
        for (; i > 0 && best[i - 1] < value[t]; i--) {
            best[i] = best[i - 1];
            token[i] = token[i - 1];
        }
        best[i] = value[t];
        token[i] = t;
    }
    return found;
}

float toy_penalise(float logit, int32_t n_output, bool in_prompt, float presence, float frequency,
                   float repetition)
{
    if (n_output > 0 || in_prompt) {
        logit = logit > 0 ? logit / repetition : logit * repetition;
    }
    return logit - (n_output > 0 ? presence : 0) - frequency * (float)n_output;
}

uint64_t rng_next(struct rng *r)
{
    return mix(r->state += UINT64_C(0x9e3779b97f4a7c15));
}

int32_t rng_range(struct rng *r, int32_t low, int32_t high)
{
    return low + (int32_t)(rng_next(r) % (uint64_t)(high - low + 1));
}

bool rng_chance(struct rng *r, int32_t percent)
{
    return rng_range(r, 0, 99) < percent;
}
