/* What a stage of a pipeline hands to the next (pipeline.h), on the CPU.
 *
 *     part i:  receive x ─► layers ─► send x               a stage
 *              tokens of part i ─► every rank of stage 0   the last one, when the part ends
 *
 * The first stage works ahead: it takes the tokens of earlier parts when a part reads them, and in any case so that no more
 * parts are on their way than there are stages to work on them. So what waits between two stages stays bounded, and the few
 * bytes of the tokens never keep the last stage waiting: the ring cannot stand still.
 */
#include "kernels/cpu/cpu.h"
#include "kernels/pipeline.h"

static bool usable(const struct cpu_backend *c)
{
    return c->config.pipeline != NULL && c->failed.code == 0;
}

static void check(struct cpu_backend *c, int rc, const struct err *e)
{
    if (rc < 0) {
        cpu_fail(c, rc, e->text);
    }
}

/* A mat of ours has no gaps between its rows, or is sent row by row. */
static size_t run_of(struct mat x, int32_t *ret_runs)
{
    bool whole = x.stride == x.cols;
    *ret_runs = whole ? 1 : x.rows;
    return (size_t)(whole ? (int64_t)x.rows * x.cols : x.cols) * sizeof(float);
}

void cpu_stage_receive(struct backend *b, struct mat x)
{
    struct cpu_backend *c = cpu_of(b);
    struct pipeline *p = c->config.pipeline;
    struct err e;
    int32_t n;
    size_t n_bytes = run_of(x, &n);
    for (int32_t r = 0; r < n && usable(c); r++) {
        check(c, p->ops->receive(p, mat_row(x, r), n_bytes, &e), &e);
    }
}

void cpu_stage_send(struct backend *b, struct mat x)
{
    struct cpu_backend *c = cpu_of(b);
    struct pipeline *p = c->config.pipeline;
    struct err e;
    int32_t n;
    size_t n_bytes = run_of(x, &n);
    for (int32_t r = 0; r < n && usable(c); r++) {
        check(c, p->ops->send(p, p->at.rank, mat_row_const(x, r), n_bytes, &e), &e);
    }
}

/* ---- tokens ----------------------------------------------------------------------------------------------------------- */

static bool is_first(const struct cpu_backend *c)
{
    return c->config.pipeline != NULL && c->config.pipeline->at.stage == 0;
}

static const struct cpu_awaited *oldest(const struct cpu_backend *c)
{
    return c->n_awaited > 0 ? &c->awaited[c->awaited_first % CPU_AWAITED] : NULL;
}

static void take_oldest(struct cpu_backend *c)
{
    const struct cpu_awaited *a = oldest(c);
    struct pipeline *p = c->config.pipeline;
    struct err e;
    if (usable(c)) {
        check(c, p->ops->receive(p, a->drawn->token + a->first, (size_t)a->n * sizeof(*a->drawn->token), &e), &e);
    }
    c->awaited_first++;
    c->n_awaited--;
}

void cpu_settle_tokens(struct cpu_backend *c, const struct cpu_drawn *old)
{
    for (const struct cpu_awaited *a = oldest(c); a != NULL && a->drawn == old; a = oldest(c)) {
        take_oldest(c);
    }
}

/* The last sampling row of the step before that a token of this part comes from; -1: none does. */
static int32_t last_source(const struct batch *b)
{
    int32_t last = -1;
    for (int32_t i = 0; b->token_src != NULL && i < b->n_tokens; i++) {
        last = MAX(last, b->token_src[i]);
    }
    return last;
}

void cpu_take_tokens(struct cpu_backend *c)
{
    const struct batch *b = &c->batch;
    struct cpu_drawn *now = cpu_drawn_now(c);
    if (!is_first(c)) {
        return;
    }
    int32_t last = last_source(b);
    uint32_t n_stages = (uint32_t)c->config.pipeline->at.n_stages;
    for (const struct cpu_awaited *a = oldest(c); a != NULL; a = oldest(c)) {
        if (c->n_awaited < n_stages && (a->drawn == now || a->first > last)) {
            break;
        }
        take_oldest(c);
    }
    if (b->n_samples > 0) {
        uint32_t at = (c->awaited_first + c->n_awaited++) % CPU_AWAITED;
        c->awaited[at] = (struct cpu_awaited){.drawn = now, .first = b->first_sample, .n = b->n_samples};
    }
}

void cpu_return_tokens(struct cpu_backend *c)
{
    struct pipeline *p = c->config.pipeline;
    const struct batch *b = &c->batch;
    struct err e;
    if (p == NULL || !pipeline_is_last(&p->at) || p->at.rank > 0 || b->n_samples == 0) {
        return;
    }
    const int32_t *token = cpu_drawn_now(c)->token + b->first_sample;
    for (int32_t i = 0; i < p->at.n_ranks && usable(c); i++) {
        check(c, p->ops->send(p, i, token, (size_t)b->n_samples * sizeof(*token), &e), &e);
    }
}
