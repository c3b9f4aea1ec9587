/* The rotation table, for every kind of RoPE scaling.
 *
 * Frequencies and angles are rounded to float32 where transformers rounds them: models
 * were trained with that rounding, and at long positions it is the largest error of a
 * float32 forward pass. Sources: Su et al. 2021 (RoPE); Peng et al. 2023 (YaRN,
 * equations 17-23); Ding et al. 2024 (LongRoPE); Llama 3.1's reference code (llama3).
 *
 * Factors of queries by position (Nakanishi 2025, scalable softmax; Ministral 3) stand
 * in a column behind the sines.
 */
#include <math.h>

#include "models/families/layers.h"

/* The angle of pair i at position 1, before any scaling. */
static float frequency(double theta, int32_t i, int32_t rot_dim)
{
    return 1.0f / powf((float)theta, (float)(2 * i) / (float)rot_dim);
}

/* Long wavelengths are stretched by `factor`, short ones kept, those between are
 * interpolated. With equal factors, as Llama 4 Scout's, there are none between. */
static float llama3_frequency(const struct rope_config *r, float f)
{
    float wavelength = (float)(2 * M_PI) / f, context = (float)r->original_positions;

    if (wavelength < context / (float)r->high_freq_factor) {
        return f;
    }
    if (wavelength > context / (float)r->low_freq_factor) {
        return f / (float)r->factor;
    }
    if (r->high_freq_factor <= r->low_freq_factor) {
        return f;
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

/* The angle of pair i from one position to the next, `f` before any scaling. */
static float scaled(const struct rope_config *r, int32_t i, float f, const float *stretch)
{
    switch (r->kind) {
    case ROPE_DEFAULT:
    case ROPE_DYNAMIC:
        return f;
    case ROPE_PROPORTIONAL:
        return i < (int32_t)(r->share * r->rot_dim / 2) ? f / (float)r->factor : 0;
    case ROPE_LINEAR:
        return f / (float)r->factor;
    case ROPE_LLAMA3:
        return llama3_frequency(r, f);
    case ROPE_YARN:
        return yarn_frequency(r, i, f);
    case ROPE_LONGROPE:
        return 1.0f / (stretch[i] * powf((float)r->theta, (float)(2 * i) / (float)r->rot_dim));
    }
    return f;
}

int32_t rope_table_cols(const struct rope_config *r)
{
    enum { ALIGNED = 4 }; /* floats that a GPU reads at once */

    return r->query_beta > 0 ? r->rot_dim + ALIGNED : r->rot_dim;
}

void rope_table_init(struct rope_table *t, float *out, const struct rope_config *r,
                     int32_t n_positions)
{
    double theta =
        r->kind == ROPE_DYNAMIC && r->rot_dim > 2 ? dynamic_theta(r, n_positions) : r->theta;
    const float *stretch = n_positions > r->original_positions ? r->long_factor : r->short_factor;

    *t = (struct rope_table){.out = out,
                             .scale = (float)magnitude(r),
                             .rot_dim = r->rot_dim,
                             .cols = rope_table_cols(r),
                             .query_beta = r->query_beta,
                             .original_positions = r->original_positions,
                             .query_offset = r->query_offset,
                             .n_positions = n_positions};
    for (int32_t i = 0; i < r->rot_dim / 2; i++) {
        t->freq[i] = scaled(r, i, frequency(theta, i, r->rot_dim), stretch);
    }
}

void rope_table_reach(void *table, int32_t n)
{
    struct rope_table *t = table;
    int32_t half = t->rot_dim / 2, end = MIN(n, t->n_positions);

    for (; t->n_filled < end; t->n_filled++) {
        float *row = t->out + (int64_t)t->n_filled * t->cols;
        for (int32_t i = 0; i < half; i++) {
            float angle = (float)t->n_filled * t->freq[i];
            sincosf(angle, &row[half + i], &row[i]);
            row[i] *= t->scale;
            row[half + i] *= t->scale;
        }
        if (t->query_beta > 0) {
            int32_t contexts = (t->n_filled + t->query_offset) / t->original_positions;
            row[t->rot_dim] = (float)(1 + t->query_beta * log(1.0 + contexts));
        }
    }
}
