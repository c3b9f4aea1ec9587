/* The rotation table, for every kind of RoPE scaling.
 *
 * Frequencies and angles are rounded to float32 where transformers rounds them: models
 * were trained with that rounding, and at long positions it is the largest error of a
 * float32 forward pass. Sources: Su et al. 2021 (RoPE); Peng et al. 2023 (YaRN,
 * equations 17-23); Ding et al. 2024 (LongRoPE); Llama 3.1's reference code (llama3).
 */
#include <math.h>

#include "models/families/layers.h"

/* The angle of pair i at position 1, before any scaling. */
static float frequency(double theta, int32_t i, int32_t rot_dim)
{
    return 1.0f / powf((float)theta, (float)(2 * i) / (float)rot_dim);
}

/* Long wavelengths are stretched by `factor`, short ones kept, those between are
 * interpolated. */
static float llama3_frequency(const struct rope_config *r, float f)
{
    float wavelength = (float)(2 * M_PI) / f, context = (float)r->original_positions;

    if (wavelength < context / (float)r->high_freq_factor) {
        return f;
    }
    if (wavelength > context / (float)r->low_freq_factor) {
        return f / (float)r->factor;
    }
    float smooth = (context / wavelength - (float)r->low_freq_factor) /
                   (float)(r->high_freq_factor - r->low_freq_factor);
    return (1 - smooth) * f / (float)r->factor + smooth * f;
}

/* The pair, as a real number, that rotates `rotations` times within the original
 * context. */
static double yarn_dim(const struct rope_config *r, double rotations)
{
    return r->rot_dim * log(r->original_positions / (rotations * 2 * M_PI)) / (2 * log(r->theta));
}

static float yarn_frequency(const struct rope_config *r, int32_t i, float f)
{
    double low = yarn_dim(r, r->beta_fast), high = yarn_dim(r, r->beta_slow);

    if (r->truncate) {
        low = floor(low);
        high = ceil(high);
    }
    low = MAX(low, 0);
    high = MIN(high, r->rot_dim - 1);
    if (low == high) {
        high += 0.001;
    }
    float keep = 1 - fminf(fmaxf((float)((i - low) / (high - low)), 0), 1);
    return f / (float)r->factor * (1 - keep) + f * keep;
}

/* NTK-aware scaling: theta grows with the length of the context. It is fixed by the
 * table's length, so that cached keys stay valid; up to original_positions it is the
 * original theta. */
static double dynamic_theta(const struct rope_config *r, int32_t n_positions)
{
    double stretch = r->factor * MAX(n_positions, r->original_positions) / r->original_positions -
                     (r->factor - 1);

    return r->theta * pow(stretch, r->rot_dim / (r->rot_dim - 2.0));
}

static double yarn_mscale(double factor, double mscale)
{
    return factor <= 1 ? 1 : 0.1 * mscale * log(factor) + 1;
}

/* The factor of all cosines and sines. */
static double magnitude(const struct rope_config *r)
{
    if (r->kind != ROPE_YARN && r->kind != ROPE_LONGROPE) {
        return 1;
    }
    if (r->attention_factor > 0) {
        return r->attention_factor;
    }
    if (r->kind == ROPE_LONGROPE) {
        return r->factor <= 1 ? 1 : sqrt(1 + log(r->factor) / log(r->original_positions));
    }
    if (r->mscale > 0 && r->mscale_all_dim > 0) {
        return yarn_mscale(r->factor, r->mscale) / yarn_mscale(r->factor, r->mscale_all_dim);
    }
    return yarn_mscale(r->factor, 1);
}

void rope_fill(float *out, const struct rope_config *r, int32_t n_positions)
{
    int32_t half = r->rot_dim / 2;
    float freq[LIMIT_HEAD_DIM / 2], scale = (float)magnitude(r);
    double theta =
        r->kind == ROPE_DYNAMIC && r->rot_dim > 2 ? dynamic_theta(r, n_positions) : r->theta;
    const float *stretch = n_positions > r->original_positions ? r->long_factor : r->short_factor;

    for (int32_t i = 0; i < half; i++) {
        float f = frequency(theta, i, r->rot_dim);
        switch (r->kind) {
        case ROPE_DEFAULT:
        case ROPE_DYNAMIC:
            freq[i] = f;
            break;
        case ROPE_PROPORTIONAL:
            freq[i] = i < (int32_t)(r->share * r->rot_dim / 2) ? f / (float)r->factor : 0;
            break;
        case ROPE_LINEAR:
            freq[i] = f / (float)r->factor;
            break;
        case ROPE_LLAMA3:
            freq[i] = llama3_frequency(r, f);
            break;
        case ROPE_YARN:
            freq[i] = yarn_frequency(r, i, f);
            break;
        case ROPE_LONGROPE:
            freq[i] =
                1.0f / (stretch[i] * powf((float)r->theta, (float)(2 * i) / (float)r->rot_dim));
            break;
        }
    }
    for (int32_t p = 0; p < n_positions; p++, out += r->rot_dim) {
        for (int32_t i = 0; i < half; i++) {
            float angle = (float)p * freq[i];
            sincosf(angle, &out[half + i], &out[i]);
            out[i] *= scale;
            out[half + i] *= scale;
        }
    }
}
