/* Layers of experts against a loop over experts in float64, and a row alone against the
 * same row in company. */
#include "tests/unit/quantised.h"

enum { MOST_EXPERTS = 512 };

struct shape {
    int32_t rows, n, top, hidden, width, shared; /* shared: 0: there is no shared expert */
    bool normalised;
    float skew; /* added to the scores of the first experts: all rows go to them */
    int32_t n_groups, top_groups;
    bool sigmoid, by_two, choice_bias, biases, ungated; /* ungated: no gate of the shared expert */
    bool beside; /* the router reads rows of its own, and each expert's weight has a factor */
    float factor, limit;
    float jitter;  /* above 0: a sparse mixer chooses */
    int32_t large; /* so many results of up are 2^15 times the others; odd columns read none */
    const struct quant_case *quant; /* of up and down; NULL: floats */
    const struct quant_case *down;  /* of down; NULL: as up */
};

static const struct quant_case
    FP8_ROWS = {.format = FORMAT_FP8, .type = SCALE_F32, .group_rows = 1},
    FP8_ROW_GROUPS = {.format = FORMAT_FP8, .type = SCALE_F32, .group_rows = 1, .group_cols = 128},
    FP8_TOKENS = {.format = FORMAT_FP8,
                  .type = SCALE_F32,
                  .group_rows = 1,
                  .experts = true,
                  .act = ACT_SCALE_TOKEN},
    FP8_GROUPS = {.format = FORMAT_FP8,
                  .type = SCALE_BF16,
                  .group_rows = 128,
                  .group_cols = 128,
                  .experts = true,
                  .act = ACT_SCALE_GROUP},
    FP8_FIXED = {.format = FORMAT_FP8,
                 .type = SCALE_F32,
                 .group_rows = 1,
                 .experts = true,
                 .act = ACT_SCALE_TENSOR,
                 .act_scale = 0.6f / 448},
    FP8_BLOCKS = {.format = FORMAT_FP8, .type = SCALE_BF16, .group_rows = 128, .group_cols = 128},
    INT4_GROUPS = {.format = FORMAT_INT4,
                   .type = SCALE_BF16,
                   .group_rows = 1,
                   .group_cols = 32,
                   .zeros = true,
                   .experts = true},
    INT4_WIDE = {.format = FORMAT_INT4,
                 .type = SCALE_F16,
                 .group_rows = 1,
                 .group_cols = 128,
                 .zeros = true,
                 .experts = true},
    INT4_MIDDLE = {.format = FORMAT_INT4,
                   .type = SCALE_BF16,
                   .group_rows = 1,
                   .group_cols = 64,
                   .experts = true},
    INT4_ROWS = {.format = FORMAT_INT4, .type = SCALE_F32, .group_rows = 1, .experts = true},
    FP4_GROUPS = {.format = FORMAT_FP4,
                  .type = SCALE_E8M0,
                  .group_rows = 1,
                  .group_cols = 32,
                  .experts = true},
    NVFP4 = {.format = FORMAT_FP4,
             .type = SCALE_E4M3,
             .group_rows = 1,
             .group_cols = 16,
             .experts = true,
             .factor = 0.0078125f},
    INT8_ROWS = {.format = FORMAT_INT8, .type = SCALE_F32, .group_rows = 1, .experts = true},
    INT8_GROUPS = {.format = FORMAT_INT8,
                   .type = SCALE_BF16,
                   .group_rows = 1,
                   .group_cols = 64,
                   .zeros = true,
                   .experts = true},
    Q4_0 = {.format = FORMAT_Q4_0, .experts = true},
    Q4_1 = {.format = FORMAT_Q4_1, .experts = true},
    Q5_0 = {.format = FORMAT_Q5_0, .experts = true},
    Q8_0 = {.format = FORMAT_Q8_0, .experts = true},
    IQ4_NL = {.format = FORMAT_IQ4_NL, .experts = true},
    MXFP4 = {.format = FORMAT_MXFP4, .experts = true},
    Q2_K = {.format = FORMAT_Q2_K, .experts = true},
    Q3_K = {.format = FORMAT_Q3_K, .experts = true},
    Q4_K = {.format = FORMAT_Q4_K, .experts = true},
    Q5_K = {.format = FORMAT_Q5_K, .experts = true},
    Q6_K = {.format = FORMAT_Q6_K, .experts = true},
    IQ4_XS = {.format = FORMAT_IQ4_XS, .experts = true};

static const struct shape SHAPES[] = {
    {1, 4, 2, 64, 48, 0, true, .skew = 0},
    {7, 5, 5, 40, 24, 0, false, .skew = 0},
    {33, 16, 3, 96, 72, 0, true, .skew = 0},
    {64, 8, 2, 128, 64, 56, false, .skew = 0},
    {100, 64, 8, 64, 32, 0, true, .skew = 0},
    {65, 8, 2, 48, 32, 0, true, .skew = 40},
    {20, 6, 1, 72, 40, 24, false, .skew = 40},
    /* the widths of a GPU's tiles, all rows to a few experts, many experts */
    {40, 16, 4, 128, 64, 0, true, .skew = 0},
    {70, 8, 3, 192, 128, 64, false, .skew = 0},
    {150, 8, 3, 128, 64, 0, true, .skew = 0},
    {320, 4, 2, 128, 192, 0, true, .skew = 0},
    {300, 8, 2, 64, 64, 0, true, .skew = 40},
    {600, 6, 2, 320, 192, 0, true, .skew = 0},
    {420, 5, 3, 192, 320, 0, true, .skew = 40, .biases = true, .limit = 0.5F},
    {400, 4, 2, 64, 448, 0, true, .skew = 0, .biases = true},
    {12, 300, 6, 64, 64, 0, true, .skew = 0},
    {2, 128, 8, 256, 192, 0, true, .skew = 0},
    {3, 160, 6, 2304, 40, 0, true, .skew = 0, .n_groups = 8, .top_groups = 3, .sigmoid = true,
     .by_two = true, .choice_bias = true, .biases = true, .factor = 2},
    {4, 9, 9, 96, 520, 0, false, .skew = 0},
    /* DeepSeek-V2, -V3 and GLM-4.5, gpt-oss */
    {40, 32, 4, 64, 32, 48, false, 0, 8, 3, .ungated = true, .factor = 16},
    {40, 32, 6, 64, 40, 32, true, 0, 8, 4, .sigmoid = true, .by_two = true, .choice_bias = true,
     .ungated = true, .factor = 2.5F},
    {21, 16, 4, 64, 32, 32, true, 0, .sigmoid = true, .choice_bias = true, .ungated = true},
    {30, 16, 4, 96, 48, 0, true, 0, .biases = true, .limit = 0.5F},
    {30, 12, 3, 96, 48, 0, true, 0, .beside = true}, /* Gemma-4 */
    {2, 16, 4, 64, 32, 0, true, 0, .beside = true},
    {80, 16, 2, 64, 32, 0, false, 0, .jitter = 0.01F}, /* Phi-3.5-MoE */
    {80, 16, 2, 64, 32, 0, false, 0, .jitter = 0.3F},
    {30, 5, 2, 48, 24, 0, false, 0, .jitter = 0.2F, .biases = true},
    {300, 90, 2, 64, 64, 0, false, 0, .jitter = 0.3F},
    {9, 12, 3, 40, 24, 24, false, 0, 4, 2, .by_two = true, .choice_bias = true, .biases = true},
    /* a shared expert as parts beside the others, of one to five tiles each */
    {9, 16, 3, 128, 64, 128, false, .skew = 0, .ungated = true},
    {30, 12, 4, 192, 192, 192, true, .skew = 0, .biases = true},
    {33, 40, 6, 320, 64, 256, false, .skew = 0, .ungated = true},
    {70, 16, 2, 128, 128, 256, true, .skew = 0},
    {130, 8, 2, 192, 192, 384, true, .skew = 40, .biases = true, .ungated = true},
    {256, 12, 3, 128, 64, 192, true, .skew = 0},
    {257, 12, 3, 128, 64, 192, true, .skew = 0, .ungated = true}, /* too many rows */
    {100, 4, 3, 64, 64, 64, true, .skew = 0},                     /* for wider tiles */
    {40, 8, 2, 64, 64, 128, true, .skew = 0, .limit = 0.5F},      /* another middle */
    /* a router's product divided among blocks and warps: many experts, odd depths */
    {20, 136, 4, 1056, 32, 0, true, .skew = 0, .biases = true},
    {70, 250, 6, 192, 64, 0, false, .skew = 0, .sigmoid = true, .choice_bias = true},
    {100, 64, 8, 1024, 64, 128, false, .skew = 0, .ungated = true},
    /* down's weights read ahead: more and fewer stages than the ring has, several tiles
     * of an expert, experts without rows, more blocks than tiles */
    {64, 16, 4, 192, 1088, 0, true, .skew = 0},
    {64, 16, 4, 128, 832, 0, true, .skew = 40, .biases = true},
    {160, 32, 4, 1152, 320, 0, true, .skew = 0},
    {190, 100, 3, 288, 48, 0, true, .skew = 0, .n_groups = 4, .top_groups = 2},
    {256, 32, 4, 2880, 32, 0, true, .skew = 0, .biases = true},
    {17, 256, 8, 512, 32, 32, true, .skew = 0, .ungated = true},
    /* Kimi-K2's number of experts, Qwen3-Next's, and more than blocks choose among */
    {1, 384, 8, 128, 64, 64, true, .skew = 0, .sigmoid = true, .choice_bias = true, .ungated = true,
     .factor = 2.5F},
    {3, 384, 8, 256, 64, 0, true, .skew = 0, .n_groups = 8, .top_groups = 4, .sigmoid = true,
     .by_two = true, .choice_bias = true, .factor = 2.5F},
    {8, 384, 8, 128, 64, 64, true, .skew = 0, .n_groups = 8, .top_groups = 4, .sigmoid = true,
     .by_two = true, .choice_bias = true, .ungated = true, .factor = 2.5F},
    {20, 384, 8, 288, 32, 32, true, .skew = 0, .n_groups = 8, .top_groups = 4, .sigmoid = true,
     .by_two = true, .choice_bias = true, .ungated = true, .factor = 2.5F},
    {100, 384, 8, 128, 64, 64, true, .skew = 0, .sigmoid = true, .choice_bias = true,
     .ungated = true, .factor = 2.5F},
    {4, 512, 10, 96, 64, 0, true, .skew = 0},
    {70, 511, 10, 64, 32, 32, true, .skew = 0},
    {300, 384, 8, 64, 32, 0, true, .skew = 0, .n_groups = 8, .top_groups = 4, .sigmoid = true,
     .by_two = true, .choice_bias = true, .factor = 2.5F},
    /* codes, by the widths of a GPU's tiles of them */
    {3, 8, 2, 128, 128, 0, true, .skew = 0, .quant = &FP8_ROWS},
    {70, 16, 4, 384, 128, 0, true, .skew = 0, .biases = true, .quant = &FP8_ROWS},
    {150, 8, 3, 128, 256, 0, true, .skew = 0, .quant = &FP8_BLOCKS},
    {40, 8, 3, 256, 384, 64, true, .skew = 0, .quant = &FP8_BLOCKS},
    {130, 4, 2, 128, 128, 0, true, .skew = 40, .quant = &FP8_ROWS},
    {560, 8, 2, 128, 128, 0, true, .skew = 0, .quant = &FP8_ROWS},
    /* the same with quantised activations, by the widths of their tiles */
    {4, 8, 2, 128, 128, 0, true, .skew = 0, .quant = &FP8_TOKENS},
    {5, 8, 2, 128, 128, 0, true, .skew = 0, .quant = &FP8_TOKENS},
    {8, 16, 4, 256, 384, 64, true, .skew = 0, .quant = &FP8_GROUPS},
    {60, 16, 3, 384, 128, 0, true, .skew = 0, .biases = true, .quant = &FP8_TOKENS},
    /* and with those rounded by one scale, beyond which some of them are */
    {4, 8, 2, 128, 128, 0, true, .skew = 0, .quant = &FP8_FIXED},
    {12, 8, 2, 128, 128, 0, true, .skew = 0, .quant = &FP8_FIXED},
    {70, 16, 3, 384, 256, 0, true, .skew = 0, .biases = true, .quant = &FP8_FIXED},
    {300, 16, 4, 128, 128, 0, true, .skew = 0, .quant = &FP8_FIXED},
    {70, 8, 2, 256, 384, 64, true, .skew = 0, .quant = &FP8_GROUPS},
    {150, 8, 3, 128, 256, 0, true, .skew = 0, .quant = &FP8_TOKENS},
    {300, 6, 2, 128, 128, 0, true, .skew = 40, .biases = true, .limit = 0.5F, .quant = &FP8_GROUPS},
    {560, 6, 2, 384, 256, 0, true, .skew = 0, .quant = &FP8_GROUPS},
    {600, 5, 3, 256, 128, 0, true, .skew = 40, .quant = &FP8_TOKENS},
    {5, 6, 2, 64, 96, 0, true, .skew = 0, .quant = &INT4_GROUPS},
    {3, 8, 2, 960, 192, 0, true, .skew = 0, .quant = &INT4_GROUPS},
    {70, 16, 4, 384, 128, 0, true, .skew = 0, .biases = true, .limit = 0.5F, .quant = &INT4_WIDE},
    {150, 8, 3, 832, 320, 0, true, .skew = 0, .quant = &INT4_MIDDLE},
    {300, 8, 2, 256, 192, 0, true, .skew = 40, .quant = &INT4_GROUPS},
    {40, 8, 3, 64, 64, 64, true, .skew = 0, .quant = &INT4_ROWS},
    {560, 6, 2, 128, 256, 0, true, .skew = 0, .quant = &INT4_WIDE},
    {33, 6, 2, 96, 32, 0, true, .skew = 0, .quant = &FP4_GROUPS},
    {3, 8, 2, 960, 192, 0, true, .skew = 0, .quant = &FP4_GROUPS},
    {70, 16, 4, 384, 128, 0, true, .skew = 0, .biases = true, .limit = 0.5F, .quant = &FP4_GROUPS},
    {150, 8, 3, 832, 320, 0, true, .skew = 0, .quant = &FP4_GROUPS},
    {300, 8, 2, 256, 192, 0, true, .skew = 40, .quant = &FP4_GROUPS},
    {40, 8, 3, 64, 64, 64, true, .skew = 0, .quant = &FP4_GROUPS},
    {560, 6, 2, 128, 192, 0, true, .skew = 0, .quant = &FP4_GROUPS},
    {3, 8, 2, 960, 192, 0, true, .skew = 0, .quant = &NVFP4},
    {70, 16, 4, 384, 128, 0, true, .skew = 0, .biases = true, .limit = 0.5F, .quant = &NVFP4},
    {150, 8, 3, 832, 320, 0, true, .skew = 0, .quant = &NVFP4},
    {560, 6, 2, 128, 192, 0, true, .skew = 0, .quant = &NVFP4},
    {3, 8, 2, 960, 192, 0, true, .skew = 0, .quant = &INT8_ROWS},
    {70, 16, 4, 384, 128, 64, true, .skew = 0, .biases = true, .quant = &INT8_ROWS},
    {560, 6, 2, 128, 192, 0, true, .skew = 0, .quant = &INT8_ROWS},
    {8, 8, 2, 832, 320, 0, true, .skew = 0, .quant = &INT8_GROUPS},
    {150, 8, 3, 832, 320, 0, true, .skew = 0, .quant = &INT8_GROUPS},
    /* blocks of GGUF, up's and down's of one format and of two */
    {3, 8, 2, 960, 192, 0, true, .skew = 0, .quant = &Q8_0},
    {40, 8, 3, 64, 64, 64, true, .skew = 0, .quant = &Q8_0},
    {300, 8, 2, 256, 192, 0, true, .skew = 40, .quant = &Q8_0},
    {560, 6, 2, 128, 192, 0, true, .skew = 0, .quant = &Q8_0},
    {2, 128, 8, 1024, 256, 0, true, .skew = 0, .quant = &Q4_K, .down = &Q6_K},
    {7, 8, 2, 512, 256, 0, true, .skew = 0, .quant = &Q4_K},
    {30, 16, 4, 256, 256, 0, true, .skew = 0, .quant = &Q4_K, .down = &Q6_K},
    {150, 8, 3, 768, 256, 0, true, .skew = 0, .quant = &Q4_K, .down = &Q6_K},
    {520, 6, 2, 256, 256, 0, true, .skew = 40, .quant = &Q4_K, .down = &Q5_K},
    {5, 6, 2, 256, 512, 0, true, .skew = 0, .quant = &Q6_K},
    {33, 6, 2, 256, 256, 0, true, .skew = 0, .quant = &Q5_K, .down = &Q6_K},
    {4, 8, 2, 320, 64, 0, true, .skew = 0, .quant = &IQ4_NL},
    {70, 8, 3, 192, 128, 0, true, .skew = 0, .quant = &IQ4_NL},
    {1, 8, 2, 512, 256, 0, true, .skew = 0, .quant = &IQ4_XS, .down = &Q5_K},
    {520, 6, 2, 256, 256, 0, true, .skew = 0, .quant = &IQ4_XS},
    {3, 8, 2, 960, 192, 0, true, .skew = 0, .biases = true, .limit = 0.5F, .quant = &MXFP4},
    {150, 8, 3, 832, 320, 0, true, .skew = 0, .quant = &MXFP4},
    {560, 6, 2, 128, 192, 0, true, .skew = 0, .quant = &MXFP4},
    {6, 8, 2, 448, 128, 0, true, .skew = 0, .quant = &Q4_0},
    {70, 8, 2, 448, 128, 0, true, .skew = 0, .quant = &Q4_0, .down = &Q4_1},
    {4, 8, 2, 320, 64, 0, true, .skew = 0, .quant = &Q5_0, .down = &Q4_0}, /* no one launch */
    {6, 8, 2, 512, 256, 0, true, .skew = 0, .quant = &Q3_K, .down = &Q4_K},
    {40, 8, 2, 256, 256, 0, true, .skew = 0, .quant = &Q3_K},
    {4, 8, 2, 512, 256, 0, true, .skew = 0, .quant = &Q2_K, .down = &Q3_K},
    {70, 8, 2, 256, 256, 0, true, .skew = 0, .quant = &Q2_K},
    {520, 4, 2, 256, 256, 0, true, .skew = 0, .quant = &Q2_K},
};

/* The operands of one shape, as numbers. */
struct values {
    float *x, *router, *up, *down, *shared_up, *shared_down, *shared_gate;
    float *router_bias, *choice_bias, *up_bias, *down_bias; /* zeros where there is none */
    float *router_x, *scale;                                /* of `beside` */
};

struct layer_rig {
    struct mat x, y;
    struct experts e;
    struct expert_scratch s;
};

static double activated(double x)
{
    return x / (1 + exp(-x));
}

/* One MLP: up [2 * width, hidden], down [hidden, width]; biases NULL: none. */
struct mlp {
    const float *up, *down, *up_bias, *down_bias;
    int32_t hidden, width;
    double limit;   /* 0: none */
    bool quantised; /* the operands of both products are rounded to e4m3 */
    float fixed;    /* by this scale; 0: by each group's greatest */
};

/* x as e4m3 codes stand for it, in groups of 128 columns or by a fixed scale. */
static void round_groups(double *x, int32_t n, float fixed)
{
    enum { GROUP = 128 };
    float group[GROUP];

    for (int32_t i = 0; i < n; i += GROUP) {
        for (int32_t k = 0; k < GROUP; k++) {
            group[k] = bf16_load(bf16_store((float)x[i + k]));
            x[i + k] = weight_act_round(FORMAT_FP8, fixed, group[k]);
        }
        if (fixed == 0) {
            quant_row(group, GROUP, x + i);
        }
    }
}

/* y += weight * MLP(x). */
static void add_mlp(double *y, const float *x, const struct mlp *m, double weight)
{
    double *act = rig_alloc((size_t)m->width * sizeof(*act));
    double *in = rig_alloc((size_t)m->hidden * sizeof(*in));

    for (int32_t i = 0; i < m->hidden; i++) {
        in[i] = x[i];
    }
    if (m->quantised) {
        round_groups(in, m->hidden, m->fixed);
    }
    for (int32_t i = 0; i < m->width; i++) {
        double g = dot_of(in, m->up + (int64_t)i * m->hidden, m->hidden);
        double u = dot_of(in, m->up + (int64_t)(m->width + i) * m->hidden, m->hidden);
        if (m->up_bias) {
            g += m->up_bias[i];
            u += m->up_bias[m->width + i];
        }
        act[i] = activated(g) * u;
        if (m->limit > 0) {
            g = fmin(g, m->limit);
            act[i] = g / (1 + exp(-1.702 * g)) * (fmin(fmax(u, -m->limit), m->limit) + 1);
        }
    }
    if (m->quantised) {
        round_groups(act, m->width, m->fixed);
    }
    for (int32_t k = 0; k < m->hidden; k++) {
        double sum = dot_of(act, m->down + (int64_t)k * m->width, m->width);
        y[k] += weight * (sum + (m->down_bias ? m->down_bias[k] : 0));
    }
    free(act);
    free(in);
}

/* The index of the greatest of those that may still be taken, which it takes. */
static int32_t take_greatest(const double *c, int32_t n, bool *may)
{
    int32_t best = -1;

    for (int32_t i = 0; i < n; i++) {
        best = may[i] && (best < 0 || c[i] > c[best]) ? i : best;
    }
    may[best] = false;
    return best;
}

/* Which experts are left after the choice of groups. */
static void left_by_groups(bool *may, const double *c, const struct shape *t)
{
    int32_t n_groups = MAX(t->n_groups, 1), n = t->n / n_groups;
    double worth[MOST_EXPERTS];
    bool group[MOST_EXPERTS], free_of[MOST_EXPERTS];

    for (int32_t g = 0; g < n_groups; g++) {
        memset(free_of, true, sizeof(free_of));
        worth[g] = c[g * n + take_greatest(c + g * n, n, free_of)];
        worth[g] += t->by_two ? c[g * n + take_greatest(c + g * n, n, free_of)] : 0;
        group[g] = true;
    }
    for (int32_t i = 0; i < (n_groups > 1 ? t->top_groups : 1); i++) {
        int32_t g = take_greatest(worth, n_groups, group);
        for (int32_t k = 0; k < n; k++) {
            may[g * n + k] = true;
        }
    }
}

/* The weights of two experts, chosen by a sparse mixer of the products p. */
static void reference_mixer(double *weight, const double *p, const struct shape *t)
{
    bool may[MOST_EXPERTS];

    memset(may, true, sizeof(may));
    memset(weight, 0, (size_t)t->n * sizeof(*weight));
    for (int32_t k = 0; k < t->top; k++) {
        int32_t best = take_greatest(p, t->n, may);
        double sum = 1;
        for (int32_t i = 0; i < t->n; i++) {
            double of = fmax(fabs(p[i]), p[best]);
            sum += may[i] && p[best] - p[i] <= 2 * (double)t->jitter * of ? exp(p[i] - p[best]) : 0;
        }
        weight[best] = 1 / sum;
    }
}

/* s, and the weights of those that are chosen; 0 of the others. */
static void reference_weights(double *weight, const float *x, const struct values *v,
                              const struct shape *t)
{
    x = t->beside ? v->router_x + (x - v->x) : x;

    double s[MOST_EXPERTS], c[MOST_EXPERTS], all = 0, sum = 0, most = -INFINITY;
    bool may[MOST_EXPERTS] = {false}, chosen[MOST_EXPERTS] = {false};

    for (int32_t i = 0; i < t->n; i++) {
        s[i] = dot(x, v->router + (int64_t)i * t->hidden, t->hidden) + v->router_bias[i];
        most = fmax(most, s[i]);
    }
    if (t->jitter > 0) {
        reference_mixer(weight, s, t);
        return;
    }
    for (int32_t i = 0; i < t->n; i++) {
        s[i] = t->sigmoid ? 1 / (1 + exp(-s[i])) : exp(s[i] - most);
        all += s[i];
    }
    for (int32_t i = 0; i < t->n; i++) {
        s[i] /= t->sigmoid ? 1 : all;
        c[i] = s[i] + v->choice_bias[i];
    }
    left_by_groups(may, c, t);
    for (int32_t k = 0; k < t->top; k++) {
        int32_t best = take_greatest(c, t->n, may);
        chosen[best] = true;
        sum += s[best];
    }
    for (int32_t i = 0; i < t->n; i++) {
        double factor = (t->factor > 0 ? t->factor : 1) / (t->normalised ? sum : 1);
        weight[i] = chosen[i] ? s[i] * factor * (t->beside ? v->scale[i] : 1) : 0;
    }
}

static struct mlp expert_mlp(const struct values *v, const struct shape *t, int32_t i)
{
    return (struct mlp){.up = v->up + (int64_t)i * 2 * t->width * t->hidden,
                        .down = v->down + (int64_t)i * t->hidden * t->width,
                        .up_bias = v->up_bias + (int64_t)i * 2 * t->width,
                        .down_bias = v->down_bias + (int64_t)i * t->hidden,
                        .hidden = t->hidden,
                        .width = t->width,
                        .limit = t->limit};
}

/* `quantised`: experts read activations rounded to e4m3. */
static void reference_row(double *y, const float *x, const struct values *v, const struct shape *t,
                          bool quantised)
{
    double weight[MOST_EXPERTS];

    reference_weights(weight, x, v, t);
    for (int32_t i = 0; i < t->n; i++) {
        struct mlp m = expert_mlp(v, t, i);
        m.quantised = quantised;
        m.fixed = t->quant ? t->quant->act_scale : 0;
        if (weight[i] != 0) {
            add_mlp(y, x, &m, weight[i]);
        }
    }
    if (t->shared > 0) {
        struct mlp m = {
            .up = v->shared_up, .down = v->shared_down, .hidden = t->hidden, .width = t->shared};
        double gate = 1 / (1 + exp(-dot(x, v->shared_gate, t->hidden)));
        add_mlp(y, x, &m, t->ungated ? 1 : gate);
    }
}

/* The NMSE of the odd or of the even columns, of which there are even numbers. */
static double nmse_of_columns(const float *got, const double *want, int64_t n, int32_t odd)
{
    float *g = rig_alloc((size_t)n / 2 * sizeof(*g));
    double *w = rig_alloc((size_t)n / 2 * sizeof(*w));

    for (int64_t i = 0; i < n / 2; i++) {
        g[i] = got[2 * i + odd];
        w[i] = want[2 * i + odd];
    }
    double error = nmse(g, w, n / 2);
    free(g);
    free(w);
    return error;
}

/* What the definition gives for rows of x [rows, hidden]. */
static double *wanted(const float *x, const struct values *v, const struct shape *t, bool quantised)
{
    double *want = rig_alloc((size_t)t->rows * (size_t)t->hidden * sizeof(*want));

    for (int32_t k = 0; k < t->rows; k++) {
        int64_t at = (int64_t)k * t->hidden;
        reference_row(want + at, x + at, v, t, quantised);
    }
    return want;
}

/* The NMSE of `got` [rows, hidden] against the definition for rows of x, plus `add`
 * unless NULL. */
static double error_by(const float *got, const float *x, const float *add, const struct values *v,
                       const struct shape *t, bool quantised)
{
    int64_t n = (int64_t)t->rows * t->hidden;
    double *want = wanted(x, v, t, quantised);

    for (int64_t k = 0; add && k < n; k++) {
        want[k] += add[k];
    }
    double error = nmse(got, want, n);
    for (int32_t odd = 0; odd < 2 && t->large > 0; odd++) {
        error = fmax(error, nmse_of_columns(got, want, n, odd));
    }
    free(want);
    return error;
}

/* The same; where files ask for quantised activations, those may explain an error
 * beyond the limit. */
static double error_of(const float *got, const float *x, const float *add, const struct values *v,
                       const struct shape *t, double limit)
{
    double error = error_by(got, x, add, v, t, false);

    return error > limit && t->quant && t->quant->act != ACT_AS_THEY_ARE
               ? fmin(error, error_by(got, x, add, v, t, true))
               : error;
}

static void make_large(struct values *v, const struct shape *t)
{
    int64_t h = t->hidden, w = t->width;

    for (int64_t i = 0; i < (int64_t)t->n * t->large; i++) {
        int64_t expert = i / t->large, column = i % t->large * (w / t->large);
        float *up = v->up + (expert * 2 * w + w + column) * h;
        for (int64_t k = 0; k < h; k++) {
            up[k] *= 0x1p15F;
            v->down[(expert * h + k) * w + column] *= k % 2 == 0 ? 1 : 0;
        }
    }
}

/* What the definition gives for values_of_shape(i). On a CPU it is computed once for
 * all instruction sets, and of experts that are floats for all tests. */
static const double *wanted_of_shape(size_t i, const struct values *v)
{
    static double *kept[ARRAY_LEN(SHAPES)];

    if (kept[i] && strcmp(rig_device, "cpu") == 0) {
        return kept[i];
    }
    free(kept[i]);
    kept[i] = wanted(v->x, v, &SHAPES[i], false);
    return kept[i];
}

static struct values make_values(struct rig *r, const struct shape *t)
{
    enum dtype b = DTYPE_BF16;
    int64_t h = t->hidden, w = t->width;
    float range = 2 / sqrtf((float)h);
    struct values v = {
        .x = rig_floats(r, t->rows * h, 1, b),
        .router = rig_floats(r, t->n * h, 1, b),
        .up = rig_floats(r, t->n * 2 * w * h, range, b),
        .down = rig_floats(r, t->n * h * w, range, b),
        .shared_up = rig_floats(r, 2 * t->shared * h, range, b),
        .shared_down = rig_floats(r, h * t->shared, range, b),
        .shared_gate = rig_floats(r, h, range, b),
        .router_bias = rig_floats(r, t->n, t->biases ? 1 : 0, b),
        .choice_bias = rig_floats(r, t->n, t->choice_bias ? 0.25F : 0, DTYPE_F32),
        .up_bias = rig_floats(r, t->n * 2 * w, t->biases ? 0.5F : 0, b),
        .down_bias = rig_floats(r, t->n * h, t->biases ? 0.5F : 0, b),
        .router_x = t->beside ? rig_floats(r, t->rows * h, 1, b) : NULL,
        .scale = t->beside ? rig_floats(r, t->n, 2, DTYPE_F32) : NULL,
    };

    for (int64_t i = 0; i < t->rows && t->skew > 0; i++) {
        v.x[i * h] = 1; /* the column that carries the skew */
    }
    for (int32_t i = 0; i < t->top && t->skew > 0; i++) {
        v.router[i * h] = t->skew + (float)i;
    }
    make_large(&v, t);
    return v;
}

/* Of SHAPES[i]. On a CPU they do not depend on the shapes before. */
static struct values values_of_shape(struct rig *r, size_t i)
{
    if (strcmp(rig_device, "cpu") == 0) {
        r->rng = 7 + i;
    }
    return make_values(r, &SHAPES[i]);
}

static void free_values(struct values *v)
{
    free(v->x);
    free(v->router);
    free(v->up);
    free(v->down);
    free(v->shared_up);
    free(v->shared_down);
    free(v->shared_gate);
    free(v->router_bias);
    free(v->choice_bias);
    free(v->up_bias);
    free(v->down_bias);
    free(v->router_x);
    free(v->scale);
}

static struct mat linear_weight(struct rig *r, int32_t rows, int32_t cols, const float *v)
{
    return rig_weight(r, WEIGHT_LINEAR, DTYPE_BF16, rows, cols, v);
}

static struct mat bias(struct rig *r, int32_t n, const float *v)
{
    return rig_weight(r, WEIGHT_VECTOR, DTYPE_BF16, 1, n, v);
}

static void add_biases(struct rig *r, const struct shape *t, const struct values *v,
                       struct experts *e)
{
    if (t->choice_bias) {
        e->choice_bias = rig_weight(r, WEIGHT_TABLE, DTYPE_F32, 1, t->n, v->choice_bias);
    }
    if (t->biases) {
        e->router_bias = bias(r, t->n, v->router_bias);
        e->up_bias = bias(r, t->n * 2 * t->width, v->up_bias);
        e->down_bias = bias(r, t->n * t->hidden, v->down_bias);
    }
}

/* Whether the backend multiplies the shape's experts as they are stored, and the run
 * takes shapes of its size. */
static bool takes(const struct rig *r, const struct shape *t)
{
    int32_t of = 1, group = 0; /* group 0: any */

    if (t->quant) {
        struct weight_support s = r->b->ops->supports(r->b, weight_format_of(t->quant->format));
        of = s.experts;
        group = s.expert_group;
    }
    if (t->down && r->b->ops->supports(r->b, weight_format_of(t->down->format)).experts == 0) {
        return false;
    }
    return r->b->ops->experts && (t->jitter == 0 || r->b->mixer_experts) && of > 0 &&
           t->hidden % of == 0 && t->width % of == 0 &&
           (group == 0 || t->quant->group_cols % group == 0) &&
           (!rig_small() || t->rows * t->hidden <= 16384);
}

/* A stack of matrices of experts; of codes, values become theirs. */
static struct mat expert_weight(struct rig *r, const struct shape *t, const struct quant_case *k,
                                int32_t rows, int32_t cols, float *values)
{
    return k ? rig_quantised(r, k, rows, cols, 2 / sqrtf((float)t->hidden), 1, values)
             : linear_weight(r, rows, cols, values);
}

static struct mat up_weight(struct rig *r, const struct shape *t, int32_t n, float *values)
{
    return expert_weight(r, t, t->quant, n * 2 * t->width, t->hidden, values);
}

static struct mat down_weight(struct rig *r, const struct shape *t, int32_t n, float *values)
{
    return expert_weight(r, t, t->down ? t->down : t->quant, n * t->hidden, t->width, values);
}

/* What rounding may cost: the products' operands are rounded once more, the result of
 * act * up; a CPU rounds groups of the activations of codes to int8. */
static double limit_of(const struct rig *r, const struct shape *t)
{
    return t->quant && strcmp(rig_device, "cpu") == 0 ? 4e-4
           : operand_of(r, DTYPE_BF16) == DTYPE_F32   ? 1e-9
                                                      : 1e-4;
}

static struct layer_rig make_layer(struct rig *r, const struct shape *t, const struct values *v)
{
    enum dtype act = act_of(r, DTYPE_BF16);
    int32_t parts = experts_parts(t->shared, t->width);
    int32_t pairs = (int32_t)experts_most_pairs(t->top, parts, t->rows);
    int64_t words = experts_list_words(t->n + parts, t->top + parts, t->rows);
    struct layer_rig l = {
        .x = rig_mat(r, t->rows, t->hidden, act, v->x),
        .y = rig_mat(r, t->rows, t->hidden, act, NULL),
        .e = {.router = linear_weight(r, t->n, t->hidden, v->router),
              .up = up_weight(r, t, t->n, v->up),
              .down = down_weight(r, t, t->n, v->down),
              .n = t->n,
              .top = t->top,
              .width = t->width,
              .n_groups = t->n_groups,
              .top_groups = t->top_groups,
              .scores = t->sigmoid      ? SCORES_SIGMOID
                        : t->jitter > 0 ? SCORES_MIXER
                                        : SCORES_SOFTMAX,
              .mixer_jitter = t->jitter,
              .act = ACT_SILU,
              .factor = t->factor,
              .swiglu_limit = t->limit,
              .normalised = t->normalised,
              .groups_by_two = t->by_two},
        .s = {.scores = rig_mat(r, t->rows, t->n, DTYPE_F32, NULL),
              .row = rig_mat(r, 1, t->rows, DTYPE_I32, NULL),
              .x = rig_mat(r, t->rows, t->hidden, act, NULL),
              .y = rig_mat(r, t->rows, t->hidden, act, NULL),
              .up = rig_mat(r, t->rows, 2 * t->width, act, NULL),
              .act = rig_mat(r, t->rows, t->width, act, NULL),
              .pair_act = rig_mat(r, pairs, t->width, act, NULL),
              .pair_y = rig_mat(r, pairs, t->hidden, act, NULL),
              .lists = rig_mat(r, 1, (int32_t)words, DTYPE_I32, NULL)},
    };

    add_biases(r, t, v, &l.e);
    if (t->beside) {
        l.s.router_x = rig_mat(r, t->rows, t->hidden, act, v->router_x);
        l.e.expert_scale = rig_weight(r, WEIGHT_VECTOR, DTYPE_F32, 1, t->n, v->scale);
    }
    if (t->shared > 0) {
        l.e.shared_up = linear_weight(r, 2 * t->shared, t->hidden, v->shared_up);
        l.e.shared_down = linear_weight(r, t->hidden, t->shared, v->shared_down);
        if (!t->ungated) {
            l.e.shared_gate = linear_weight(r, 1, t->hidden, v->shared_gate);
        }
        l.s.shared_up = rig_mat(r, t->rows, 2 * t->shared, act, NULL);
        l.s.shared_act = rig_mat(r, t->rows, t->shared, act, NULL);
    }
    return l;
}

/* How rows of x, as many as the shape has, load the experts. */
static struct expert_load load_of(const struct shape *t, const struct values *v, const float *x)
{
    int64_t count[MOST_EXPERTS] = {0}, most = 0;
    struct expert_load load = {0};
    double weight[MOST_EXPERTS];

    for (int32_t k = 0; k < t->rows; k++) {
        reference_weights(weight, x + (int64_t)k * t->hidden, v, t);
        for (int32_t i = 0; i < t->n; i++) {
            count[i] += weight[i] != 0;
        }
    }
    for (int32_t i = 0; i < t->n; i++) {
        load.rows += count[i];
        most = MAX(most, count[i]);
    }
    load.peak = most * t->n;
    return load;
}

static void check_load(struct expert_load got, struct expert_load want)
{
    assert_int_equal(got.rows, want.rows);
    assert_int_equal(got.peak, want.peak);
}

/* y of rows [first, first + n); `load`: of the step. */
static float *run_counted(struct rig *r, const struct layer_rig *l, int32_t first, int32_t n,
                          struct expert_load *load)
{
    struct expert_scratch s = l->s;
    struct mat y = mat_rows(l->y, 0, n);

    s.scores = mat_rows(s.scores, 0, n);
    if (s.router_x.data) {
        s.router_x = mat_rows(s.router_x, first, n);
    }
    if (l->e.shared_up.data) {
        s.shared_up = mat_rows(s.shared_up, 0, n);
        s.shared_act = mat_rows(s.shared_act, 0, n);
    }
    rig_begin_plain(r, n);
    r->b->ops->experts(r->b, y, mat_rows(l->x, first, n), &l->e, &s);
    *load = rig_end(r).experts;
    return rig_download(r, y);
}

static float *run_rows(struct rig *r, const struct layer_rig *l, int32_t first, int32_t n)
{
    return run_counted(r, l, first, n, &(struct expert_load){0});
}

/* Whether shape i is the first or the last of its formats, which every instruction set
 * tries. */
static bool at_an_end(size_t i)
{
    bool earlier = false, later = false;

    for (size_t k = 0; k < ARRAY_LEN(SHAPES); k++) {
        bool alike = SHAPES[k].quant == SHAPES[i].quant && SHAPES[k].down == SHAPES[i].down;
        earlier |= alike && k < i;
        later |= alike && k > i;
    }
    return !earlier || !later;
}

static void experts_are_those_of_the_definition(void **state)
{
    struct rig r;

    (void)state;
    rig_open(&r);
    for (size_t i = 0; i < ARRAY_LEN(SHAPES); i++) {
        const struct shape *t = &SHAPES[i];
        if (!takes(&r, t) || !(whole_takes(i, ARRAY_LEN(SHAPES)) || at_an_end(i))) {
            continue;
        }
        struct values v = values_of_shape(&r, i);
        struct layer_rig l = make_layer(&r, t, &v);
        struct expert_load load;
        float *got = run_counted(&r, &l, 0, t->rows, &load);
        bool fixed = t->quant && t->quant->act == ACT_SCALE_TENSOR &&
                     rig_rounds_inputs(&r, l.e.up, t->rows, 5);
        double limit = limit_of(&r, t), error;
        if (fixed) {
            error = error_by(got, v.x, NULL, &v, t, true);
        } else {
            error = nmse(got, wanted_of_shape(i, &v), (int64_t)t->rows * t->hidden);
            if (error > limit && t->quant && t->quant->act != ACT_AS_THEY_ARE) {
                error = error_by(got, v.x, NULL, &v, t, true);
            }
        }
        if (!(error <= limit)) {
            fail_msg("shape %zu: NMSE %.3g, allowed %.3g", i, error, limit);
        }
        check_load(load, load_of(t, &v, v.x));
        free(got);
        free_values(&v);
    }
    rig_close(&r);
}

/* The layer with the experts [first, first + held) alone; of codes, their values become
 * those of new ones. */
static void hold(struct rig *r, const struct shape *t, const struct values *v, struct layer_rig *l,
                 int32_t first, int32_t held)
{
    int64_t up = (int64_t)first * 2 * t->width, down = (int64_t)first * t->hidden;

    l->e.up = up_weight(r, t, held, v->up + up * t->hidden);
    l->e.down = down_weight(r, t, held, v->down + down * t->width);
    if (t->biases) {
        l->e.up_bias = bias(r, held * 2 * t->width, v->up_bias + up);
        l->e.down_bias = bias(r, held * t->hidden, v->down_bias + down);
    }
    l->e.first = first;
    l->e.held = held;
}

/* With some of the experts on each of three ranks, one of which has a single one; the
 * shared expert is the first one's. */
static void shares_of_ranks_add_up(void **state)
{
    struct rig r;

    (void)state;
    rig_open(&r);
    for (size_t i = 0; i < ARRAY_LEN(SHAPES); i++) {
        const struct shape *t = &SHAPES[i];
        if (!takes(&r, t) || !whole_takes(i, ARRAY_LEN(SHAPES))) {
            continue;
        }
        int32_t cut[] = {0, t->n / 2, t->n - 1, t->n};
        int64_t n = (int64_t)t->rows * t->hidden;
        struct values v = values_of_shape(&r, i);
        struct layer_rig l = make_layer(&r, t, &v);
        float *sum = rig_alloc((size_t)n * sizeof(*sum));
        for (int32_t k = 0; k < 3; k++) {
            if (cut[k + 1] == cut[k]) {
                continue;
            }
            hold(&r, t, &v, &l, cut[k], cut[k + 1] - cut[k]);
            if (k > 0) {
                l.e.shared_up = l.e.shared_down = l.e.shared_gate = (struct mat){0};
            }
            struct expert_load load;
            float *part = run_counted(&r, &l, 0, t->rows, &load);
            check_load(load, load_of(t, &v, v.x)); /* of all experts, not of those held here */
            for (int64_t j = 0; j < n; j++) {
                sum[j] += part[j];
            }
            free(part);
        }
        double limit = 2 * limit_of(&r, t); /* each part is rounded */
        double error = t->quant ? error_of(sum, v.x, NULL, &v, t, limit)
                                : nmse(sum, wanted_of_shape(i, &v), n);
        if (!(error <= limit)) {
            fail_msg("shape %zu: NMSE %.3g, allowed %.3g", i, error, limit);
        }
        free(sum);
        free_values(&v);
    }
    rig_close(&r);
}

static void a_row_alone_is_the_same_row(void **state)
{
    struct rig r;

    (void)state;
    rig_open_deterministic(&r);
    const char *isa = getenv("QUIRE_CPU_ISA");
    bool plain = strcmp(rig_device, "cpu") == 0 && isa && strcmp(isa, "plain") == 0;
    for (size_t i = 0; i < ARRAY_LEN(SHAPES) && !plain; i++) {
        const struct shape *t = &SHAPES[i];
        if (!takes(&r, t) || !whole_takes(i, ARRAY_LEN(SHAPES))) {
            continue;
        }
        struct values v = values_of_shape(&r, i);
        struct layer_rig l = make_layer(&r, t, &v);
        float *all = run_rows(&r, &l, 0, t->rows);
        for (int32_t k = 0; k < t->rows; k += 1 + t->rows / 8) {
            float *one = run_rows(&r, &l, k, 1);
            assert_memory_equal(one, all + (int64_t)k * t->hidden,
                                (size_t)t->hidden * sizeof(*one));
            free(one);
        }
        free(all);
        free_values(&v);
    }
    rig_close(&r);
}

/* ---- steps that repeat ---- */

enum { REPEATS = 3 };

/* The end of a layer in decode steps: x += a product of attn and its norm, the experts,
 * x += y and its norm. */
struct decode_rig {
    struct rig *r;
    const struct shape *t;
    const struct layer_rig *l;
    struct mat x, h, after; /* the residual stream, norms before and behind */
    struct mat attn, o, product;
    float *o_values; /* [hidden, hidden] */
    struct norm norm;
};

static void call_layer(const struct decode_rig *d)
{
    const struct backend_ops *ops = d->r->b->ops;

    ops->linear(d->r->b, d->product, d->attn, d->o, NULL);
    ops->add_norm(d->r->b, d->h, d->x, d->product, &d->norm, false);
    ops->experts(d->r->b, d->l->y, d->h, &d->l->e, &d->l->s);
    ops->add_norm(d->r->b, d->after, d->x, d->l->y, &d->norm, false);
}

/* One token and one sample per sequence: the kind of step that a device may record and
 * replay. */
static struct expert_load run_decode(const struct decode_rig *d)
{
    enum { MOST = 64 };
    static const struct sample_row plain = {
        .kind = SAMPLE_TOKEN, .repetition_penalty = 1, .mask_first = -1};
    int32_t zero[MOST] = {0}, one[MOST], minus[MOST], up_to[MOST + 1], n = d->t->rows;
    struct sample_row sample[MOST];

    for (int32_t i = 0; i < MOST; i++) {
        one[i] = 1;
        minus[i] = -1;
        up_to[i] = i;
        sample[i] = plain;
        sample[i].logits_row = i;
    }
    up_to[MOST] = MOST;
    struct batch b = {.n_tokens = n,
                      .token = zero,
                      .token_src = minus,
                      .position = zero,
                      .slot = minus,
                      .n_seqs = n,
                      .n_decode = n,
                      .q_start = up_to,
                      .kv_len = one,
                      .row = up_to,
                      .lcp_blocks = zero,
                      .n_logits = n,
                      .logits_token = up_to,
                      .n_samples = n,
                      .sample = sample};
    rig_begin(d->r, &b);
    if (!d->r->b->ops->replay || !d->r->b->ops->replay(d->r->b, &b)) {
        call_layer(d);
    }
    return rig_end(d->r).experts;
}

static void check_norm(const struct decode_rig *d, const char *what, struct mat got, const float *x,
                       const float *weight)
{
    int32_t n = d->t->hidden;
    float *have = rig_download(d->r, got);
    double *want = rig_alloc((size_t)(d->t->rows * n) * sizeof(*want));

    for (int32_t r = 0; r < d->t->rows; r++) {
        double squares = 0;
        for (int32_t i = r * n; i < (r + 1) * n; i++) {
            squares += (double)x[i] * x[i] / n;
        }
        for (int32_t i = r * n; i < (r + 1) * n; i++) {
            want[i] = x[i] / sqrt(squares + 1e-5) * weight[i % n];
        }
    }
    assert_nmse(what, have, want, (int64_t)d->t->rows * n, got.dtype);
    free(have);
    free(want);
}

/* x += the product of attn. */
static void add_product(const struct decode_rig *d, float *x)
{
    int32_t n = d->t->hidden;
    float *attn = rig_download(d->r, d->attn);

    for (int32_t i = 0; i < d->t->rows * n; i++) {
        double y = dot(attn + (int64_t)(i / n) * n, d->o_values + (int64_t)(i % n) * n, n);
        x[i] = (float)(x[i] + y);
    }
    free(attn);
}

/* After a step that began with x: every result, from the operands that the device
 * itself made. */
static void check_layer(const struct decode_rig *d, const struct values *v, const float *weight,
                        float *x, struct expert_load load)
{
    const struct shape *t = d->t;
    float *h = rig_download(d->r, d->h), *sum = rig_download(d->r, d->x);

    add_product(d, x);
    check_norm(d, "norm before", d->h, x, weight);
    /* x is small beside y, which need not be stored; the sum is rounded too */
    double limit = 2 * limit_of(d->r, t), error = error_of(sum, h, x, v, t, limit);
    if (!(error <= limit)) {
        fail_msg("%d rows, %d of %d experts, hidden %d: NMSE %.3g, allowed %.3g", t->rows, t->top,
                 t->n, t->hidden, error, limit);
    }
    check_norm(d, "norm behind", d->after, sum, weight);
    check_load(load, load_of(t, v, h));
    free(h);
    free(sum);
}

/* Steps have this many rows of the matrices. */
static void show_rows(struct decode_rig *d, struct layer_rig *l, int32_t rows)
{
    struct mat *all[] = {&d->x, &d->h, &d->after, &d->attn, &d->product, &l->y, &l->s.scores};

    for (size_t i = 0; i < ARRAY_LEN(all); i++) {
        all[i]->rows = rows;
    }
    if (l->e.shared_up.data) {
        l->s.shared_up.rows = l->s.shared_act.rows = rows;
    }
}

/* Shapes that a device may run as one launch, and some that it may not. Each has a
 * backend of its own, because a recorded step holds the addresses of its operands. */
static void layers_of_decode_steps_follow_float64(void **state)
{
    static const struct shape shapes[] = {
        {1, 16, 2, 128, 64, 0, true, .skew = 0},
        {1, 16, 8, 512, 768, 0, true, .skew = 0},
        {8, 128, 8, 64, 192, 0, true, .skew = 0},
        {5, 16, 4, 576, 576, 0, true, .skew = 0, .biases = true, .limit = 0.5F},
        {7, 16, 6, 192, 1088, 0, false, .skew = 0, .sigmoid = true, .choice_bias = true,
         .factor = 2},
        {8, 16, 3, 256, 128, 0, true, .skew = 40},
        {2, 16, 16, 64, 1600, 0, false, .skew = 0, .biases = true},
        {4, 40, 6, 288, 160, 0, true, .skew = 0},
        {8, 200, 8, 2400, 32, 0, true, .skew = 0},
        {6, 32, 4, 2880, 96, 0, true, .skew = 0, .biases = true, .limit = 7},
        {8, 16, 9, 128, 64, 0, true, .skew = 0},
        {4, 16, 2, 128, 64, 64, true, .skew = 0},
        {16, 16, 2, 128, 64, 0, true, .skew = 0},
        {3, 16, 4, 512, 768, 0, true, .skew = 0, .quant = &FP8_ROWS},
        {8, 32, 8, 256, 640, 0, true, .skew = 0, .biases = true, .quant = &FP8_ROWS},
        {7, 16, 4, 256, 256, 0, true, .skew = 0, .quant = &FP8_BLOCKS},
        {5, 16, 4, 1024, 896, 0, true, .skew = 0, .biases = true, .quant = &FP8_BLOCKS},
        {1, 16, 4, 2880, 192, 0, true, .skew = 0, .biases = true, .limit = 7,
         .quant = &INT4_GROUPS},
        {8, 32, 8, 256, 640, 0, true, .skew = 0, .quant = &INT4_WIDE},
        {3, 16, 4, 768, 832, 0, true, .skew = 0, .quant = &INT4_MIDDLE},
        {12, 16, 4, 1600, 128, 0, true, .skew = 0, .biases = true, .quant = &INT4_ROWS},
        {12, 16, 4, 256, 384, 0, true, .skew = 0, .quant = &FP8_TOKENS},
        {16, 16, 4, 640, 128, 0, true, .skew = 0, .biases = true, .quant = &FP8_GROUPS},
        {1, 16, 4, 2880, 192, 0, true, .skew = 0, .biases = true, .limit = 7, .quant = &FP4_GROUPS},
        {8, 32, 8, 256, 640, 0, true, .skew = 0, .quant = &FP4_GROUPS},
        {3, 16, 4, 768, 832, 0, true, .skew = 0, .quant = &FP4_GROUPS},
        {12, 16, 4, 1600, 128, 0, true, .skew = 0, .biases = true, .quant = &FP4_GROUPS},
        /* a sparse mixer, for which all are near: no rounding takes one out */
        {3, 16, 2, 512, 192, 0, false, .skew = 0, .jitter = 1},
        {8, 40, 2, 64, 48, 0, false, .skew = 0, .jitter = 1},
        {16, 16, 2, 128, 64, 0, false, .skew = 0, .jitter = 1},
        {1, 64, 6, 512, 352, 704, false, .skew = 0, .ungated = true},
        {4, 16, 2, 128, 64, 64, true, .skew = 0, .ungated = true},
        {13, 16, 4, 192, 128, 256, true, .skew = 0, .ungated = true},
        {16, 16, 4, 128, 64, 64, true, .skew = 0},
        {14, 200, 8, 1056, 32, 0, true, .skew = 0, .biases = true},
        {3, 16, 4, 192, 128, 160, true, .skew = 0, .ungated = true},
        {7, 16, 4, 256, 384, 0, true, .skew = 0, .quant = &FP8_TOKENS},
        {1, 16, 4, 256, 768, 0, true, .large = 5, .quant = &FP8_ROWS},
        {8, 16, 4, 256, 640, 0, true, .large = 3, .quant = &FP8_ROWS},
        {6, 24, 6, 384, 896, 0, true, .biases = true, .large = 130, .quant = &FP8_ROW_GROUPS},
        {3, 16, 4, 2176, 256, 0, true, .large = 2, .quant = &FP8_ROW_GROUPS},
        {4, 16, 4, 256, 320, 0, true, .large = 4},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(shapes); i++) {
        const struct shape *t = &shapes[i];
        struct rig r;
        rig_open(&r);
        if (takes(&r, t) && whole_takes(i, ARRAY_LEN(shapes))) {
            struct shape room = *t; /* a recorded step may be padded */
            room.rows = MAX(t->rows, 16);
            struct values v = make_values(&r, &room);
            struct layer_rig l = make_layer(&r, &room, &v);
            enum dtype act = act_of(&r, DTYPE_BF16);
            int64_t n = (int64_t)t->rows * t->hidden;
            float *weight = rig_floats(&r, t->hidden, 1, DTYPE_BF16);
            struct decode_rig d = {.r = &r,
                                   .t = t,
                                   .l = &l,
                                   .x = rig_mat(&r, room.rows, t->hidden, act, v.x),
                                   .h = rig_mat(&r, room.rows, t->hidden, act, v.x),
                                   .after = rig_mat(&r, room.rows, t->hidden, act, v.x),
                                   .attn = rig_mat(&r, room.rows, t->hidden, act, v.x),
                                   .product = rig_mat(&r, room.rows, t->hidden, act, v.x),
                                   .o_values = rig_floats(&r, (int64_t)t->hidden * t->hidden,
                                                          0.03125F / (float)t->hidden, DTYPE_BF16),
                                   .norm = {.kind = NORM_RMS, .eps = 1e-5F}};
            d.o = linear_weight(&r, t->hidden, t->hidden, d.o_values);
            d.product.transient = true;
            show_rows(&d, &l, t->rows);
            weight[0] = 1; /* of the column that carries a skew */
            d.norm.weight = rig_weight(&r, WEIGHT_VECTOR, DTYPE_BF16, 1, t->hidden, weight);
            for (int k = 0; k < REPEATS; k++) {
                float *x = rig_floats(&r, n, 0.0625F, act);
                for (int32_t j = 0; j < t->rows && t->skew > 0; j++) {
                    x[j * t->hidden] = 0.0625F;
                }
                rig_upload(&r, d.x, x);
                struct expert_load load = run_decode(&d);
                check_layer(&d, &v, weight, x, load);
                free(x);
            }
            free(weight);
            free(d.o_values);
            free_values(&v);
        }
        rig_close(&r);
    }
}

/* Equal scores go to the smaller indices; scores that are no numbers give results that
 * are none. */
static void ties_and_broken_scores(void **state)
{
    struct shape t = {3, 6, 2, 32, 24, 0, true, .skew = 0};
    struct rig r;

    (void)state;
    rig_open(&r);
    if (r.b->ops->experts) {
        struct values v = make_values(&r, &t);
        memset(v.router, 0, (size_t)(t.n * t.hidden) * sizeof(*v.router));
        v.x[2 * t.hidden] = NAN;
        struct layer_rig l = make_layer(&r, &t, &v);
        float *got = run_rows(&r, &l, 0, t.rows);
        double want[32] = {0};
        for (int32_t i = 0; i < 2; i++) {
            struct mlp m = expert_mlp(&v, &t, i);
            add_mlp(want, v.x, &m, 0.5);
        }
        assert_true(nmse(got, want, t.hidden) < 1e-4);
        assert_true(isnan(got[2 * t.hidden]));
        free(got);
        free_values(&v);
    }
    rig_close(&r);
}

static int group(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(experts_are_those_of_the_definition),
        cmocka_unit_test(shares_of_ranks_add_up),
        cmocka_unit_test(a_row_alone_is_the_same_row),
        cmocka_unit_test(layers_of_decode_steps_follow_float64),
        cmocka_unit_test(ties_and_broken_scores),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

int main(int argc, char **argv)
{
    return rig_main(argc, argv, group);
}
