/* What multiplies a weight, and why that is a slow way, for the log. */
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/fused_decode/heuristics_fused.h"
#include "kernels/cuda/mixed/mixed.h"
#include "kernels/cuda/quant/groups.h"

/* Why a weight of codes is widened for each product. */
static const char *why_widened(const struct cuda_backend *c, struct mat w)
{
    const struct quant_weight *q = w.priv;
    bool fp4 = q->format == FORMAT_FP4, integers = q->format == FORMAT_INT4;

    return q->logits                                ? "slow: its products are float32"
           : c->config.deterministic                ? "slow: `deterministic`"
           : !c->small_squares.sum[0]               ? "slow: no kernel for this device"
           : w.dtype != DTYPE_BF16                  ? "slow: activations that are not bfloat16"
           : w.rows % MIXED_ROWS != 0               ? "slow: rows that are no multiple of 64"
           : fp4 && w.cols % QUANT_SEGMENT != 0     ? "slow: columns that are no multiple of 512"
           : integers && w.cols % 64 != 0           ? "slow: columns that are no multiple of 64"
           : !integers && w.cols % MIXED_GROUP != 0 ? "slow: columns that are no multiple of 128"
                                                    : "slow: groups or scales that no kernel takes";
}

/* Whether mixed-input products take the weight. */
static bool by_mixed(const struct cuda_backend *c, struct mat w)
{
    int32_t format = fused_format_of(w, w.dtype);
    struct fused_op p = {.n = w.rows, .k = w.cols};

    const struct quant_weight *q = w.priv;

    return cuda_groups_run(c) && format > FUSED_16 && (!q->logits || q->layout == QUANT_GROUPS) &&
           small_mixed_tile(&p, format, SMALL_ROWS, c->n_sms).width > 0;
}

static struct weight_use use_of_codes(const struct cuda_backend *c, struct mat w)
{
    const struct quant_weight *q = w.priv;

    if (q->layout == QUANT_GROUPS && q->embedded) {
        return (struct weight_use){.kernel = "embedding as codes"};
    }
    if (q->layout == QUANT_PANELS) {
        return (struct weight_use){.kernel = "experts as codes"};
    }
    if (q->quantises && !q->logits) {
        return (struct weight_use){
            .kernel = "e4m3 tensor cores, bf16 ones up to 8 rows",
            .why = q->act_scale > 0 ? "activations by the file's input_scale, up to 8 rows as "
                                      "they are"
                                    : NULL};
    }
    if (by_mixed(c, w)) {
        return (struct weight_use){
            .kernel = "bf16 tensor cores up to 256 rows, widened above",
            .why = q->format == FORMAT_FP8 && q->n_groups > 1
                       ? "blocks of 128x128, activations as they are"
                   : q->act_scale > 0 ? "activations as they are, not by the file's input_scale"
                                      : NULL};
    }
    return (struct weight_use){.kernel = "products of bf16, widened for each",
                               .why = why_widened(c, w)};
}

struct weight_use cuda_weight_use(const struct backend *b, struct mat w, int32_t row)
{
    const struct cuda_backend *c = (const struct cuda_backend *)b;

    if (cuda_is_parted(w, row, &w)) { /* w becomes the part */
        return cuda_weight_use(b, w, 0);
    }
    for (int32_t i = 0; i < c->n_decoded && !w.format; i++) {
        if (c->decoded[i].data == w.data) {
            return (struct weight_use){
                .kernel = "tensor cores", .why = c->decoded[i].why, .decoded = true};
        }
    }
    return w.format ? use_of_codes(c, w) : (struct weight_use){.kernel = "tensor cores"};
}
