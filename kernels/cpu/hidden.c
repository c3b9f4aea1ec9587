/* Hidden states of draft heads: a model's step keeps them in the blocks of its cache,
 * behind keys and values, and a head's step reads them there. All are float32, as
 * activations are. */
#include <math.h>
#include <string.h>

#include "kernels/cpu/cpu.h"

void cpu_hidden_store(struct backend *b, struct mat x, int32_t first)
{
    struct cpu_backend *c = cpu_of(b);
    const struct kv_layout *l = &c->kv[0];
    int64_t block_bytes = kv_layout_block_bytes(l);

    if (!c->kv_data || l->hidden_dtype != DTYPE_F32 || first + x.cols > l->hidden) {
        cpu_fail(c, ERR_INVALID, "the cache has no room for hidden states");
        return;
    }
    for (int32_t i = 0; i < x.rows; i++) {
        int32_t slot = c->batch.slot[i];
        if (slot >= 0) {
            char *block = c->kv_data + slot / l->block_size * block_bytes + l->hidden_offset;
            float *to = (float *)block + (int64_t)(slot % l->block_size) * l->hidden + first;
            memcpy(to, mat_row(x, i), (size_t)x.cols * sizeof(*to));
        }
    }
}

struct hidden_pool cpu_hidden_pool(struct backend *b)
{
    const struct cpu_backend *c = cpu_of(b);
    const struct kv_layout *l = &c->kv[0];

    if (!c->kv_data || l->hidden == 0) {
        return (struct hidden_pool){0};
    }
    return (struct hidden_pool){.data = c->kv_data + l->hidden_offset,
                                .block_bytes = kv_layout_block_bytes(l),
                                .block_size = l->block_size,
                                .width = l->hidden,
                                .dtype = l->hidden_dtype};
}

void cpu_hidden_load(struct backend *b, struct mat out, const struct hidden_pool *p)
{
    const struct cpu_backend *c = cpu_of(b);

    for (int32_t i = 0; i < out.rows; i++) {
        int32_t slot = MAX(c->batch.slot[i], 0);
        const char *block = (const char *)p->data + slot / p->block_size * p->block_bytes;
        const float *from = (const float *)block + (int64_t)(slot % p->block_size) * p->width;
        memcpy(mat_row(out, i), from, (size_t)out.cols * sizeof(*from));
    }
}

void cpu_hidden_own(struct backend *b, struct mat out, struct mat own)
{
    const struct cpu_backend *c = cpu_of(b);

    for (int32_t i = 0; i < out.rows; i++) {
        int32_t src = c->batch.token_src ? c->batch.token_src[i] : -1;
        if (src >= 0 && src < own.rows) {
            memcpy(mat_row(out, i), mat_row(own, src), (size_t)out.cols * sizeof(float));
        } else {
            memset(mat_row(out, i), 0, (size_t)out.cols * sizeof(float));
        }
    }
}

void cpu_hidden_masked(struct backend *b, struct mat out, struct mat row)
{
    const struct cpu_backend *c = cpu_of(b);

    for (int32_t i = 0; i < out.rows; i++) {
        if (c->batch.token_src && c->batch.token_src[i] == TOKEN_MASKED) {
            memcpy(mat_row(out, i), row.data, (size_t)out.cols * sizeof(float));
        }
    }
}

void cpu_spread(struct backend *b, struct mat out, struct mat x, struct mat id)
{
    const float *column = id.data;

    (void)b;
    for (int32_t r = 0; r < out.rows; r++) {
        float *to = mat_row(out, r);
        const float *from = mat_row(x, r);
        for (int32_t i = 0; i < out.cols; i++) {
            to[i] = -INFINITY;
        }
        for (int32_t i = 0; i < x.cols; i++) {
            to[(int32_t)column[i]] = from[i];
        }
    }
}
