/* Tensor parallelism on CPUs, through the backend's comm.
 *
 * Rank 0 samples: it alone gets whole rows of logits, and broadcasts its tokens, which
 * the other ranks need as inputs of the next step. So ranks on different kinds of
 * machines cannot disagree on a token.
 */
#include "kernels/comm/comm.h"
#include "kernels/cpu/cpu.h"

static void check(struct cpu_backend *c, int rc, const struct err *e)
{
    if (rc < 0) {
        cpu_fail(c, rc, e->text);
    }
}

void cpu_all_reduce(struct backend *b, struct mat x)
{
    struct cpu_backend *c = cpu_of(b);
    struct comm *m = c->config.comm;
    struct err e;

    if (m && c->failed.code == 0) {
        check(c, m->ops->all_reduce(m, x, &e), &e);
    }
}

void cpu_embed_part(struct backend *b, struct mat out, struct mat table, int32_t first, float scale)
{
    cpu_embed_range(cpu_of(b), out, table, first, scale);
    cpu_all_reduce(b, out);
}

void cpu_gather_logits(struct backend *b, struct mat logits, struct mat part)
{
    struct cpu_backend *c = cpu_of(b);
    struct comm *m = c->config.comm;
    struct err e;

    if (m && c->failed.code == 0) {
        check(c, m->ops->gather_cols(m, logits, part, &e), &e);
    }
}

bool cpu_samples_tokens(const struct cpu_backend *c)
{
    return !c->config.comm || c->config.comm->rank == 0;
}

void cpu_broadcast_tokens(struct cpu_backend *c, int32_t first, int32_t end)
{
    struct comm *m = c->config.comm;
    struct err e;

    if (m && c->failed.code == 0 && end > first) {
        int32_t *token = cpu_results_now(c)->token + first;
        check(c, m->ops->broadcast(m, token, (size_t)(end - first) * sizeof(*token), &e), &e);
    }
}
