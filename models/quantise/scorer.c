/* Windows of text through a model (see scorer.h). */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "config/base/limits.h"
#include "models/families/layers.h"
#include "models/quantise/scorer.h"

enum { BLOCK = 16, N_TABLE = SCORER_WINDOW / BLOCK, LOGITS_ROWS = 64 };

/* The arrays of a step. */
struct window {
    struct batch b;
    int32_t src[SCORER_WINDOW], position[SCORER_WINDOW], slot[SCORER_WINDOW];
    int32_t group_slot[SCORER_WINDOW * LIMIT_KV_GROUPS];
    int32_t block[N_TABLE * LIMIT_KV_GROUPS];
    struct table_update update[LIMIT_KV_GROUPS];
    int32_t q_start[2], kv_len, row, lcp;
};

/* ---- opening ---- */

static int open_cache(struct scorer *s, struct err *e)
{
    struct kv_layout kv[LIMIT_KV_GROUPS];

    model_kv_layouts(kv, &s->config, &s->options, BLOCK,
                     backend_act_dtype(s->backend, s->options.dtype));
    return s->backend->ops->kv_create(s->backend, kv, s->groups.n * N_TABLE, 0, e);
}

static int open_model(struct scorer *s, const char *dir, int32_t threads, struct err *e)
{
    struct generation_defaults gen;
    int rc = model_config_read(&s->config, &gen, dir, e);

    if (rc < 0) {
        return rc;
    }
    s->options.dtype = s->config.dtype;
    model_kv_groups(&s->groups, &s->config, &s->options);
    struct backend_config bc = {.threads = threads,
                                .max_tokens = SCORER_WINDOW,
                                .max_seqs = 1,
                                .max_samples = 1,
                                .max_blocks_per_seq = N_TABLE,
                                .n_kv_groups = s->groups.n};
    s->logits = calloc((size_t)LOGITS_ROWS * (size_t)s->config.vocab, sizeof(*s->logits));
    rc = s->logits ? backend_open(&s->backend, "cpu", &bc, e) : err_nomem(e, dir);
    rc = rc < 0 ? rc : model_open(&s->model, dir, &s->config, &s->options, s->backend, e);
    rc = rc < 0 ? rc : open_cache(s, e);
    return rc < 0 || !s->backend->ops->ready ? rc : s->backend->ops->ready(s->backend, e);
}

int scorer_init(struct scorer *s, const char *dir, const struct model_options *how, int32_t threads,
                struct err *e)
{
    *s = (struct scorer){.options = how ? *how : (struct model_options){0}};
    s->options.max_tokens = SCORER_WINDOW;
    s->options.max_logits = LOGITS_ROWS;
    s->options.max_len = SCORER_WINDOW;
    s->options.n_ranks = 1;
    s->options.n_stages = 1;
    int rc = open_model(s, dir, threads, e);
    if (rc < 0) {
        scorer_release(s);
    }
    return rc;
}

void scorer_release(struct scorer *s)
{
    if (s->backend) {
        s->backend->ops->free(s->backend);
    }
    model_free(s->model);
    free(s->logits);
    memset(s, 0, sizeof(*s));
}

/* ---- a window ---- */

static void pack(struct scorer *s, struct window *w, const int32_t *token, int32_t n)
{
    struct batch *b = &w->b;

    for (int32_t g = 0; g < s->groups.n; g++) {
        w->update[g] =
            (struct table_update){.group = g, .count = N_TABLE, .first = b->n_table_block};
        for (int32_t k = 0; k < N_TABLE; k++) {
            w->block[b->n_table_block++] = g * N_TABLE + k;
        }
    }
    for (int32_t i = 0; i < n; i++) {
        w->src[i] = -1;
        w->position[i] = i;
        w->slot[i] = i; /* group g has the blocks from g * N_TABLE on */
        for (int32_t g = 1; g < s->groups.n; g++) {
            w->group_slot[b->n_group_slots++] = g * N_TABLE * BLOCK + i;
        }
    }
    w->q_start[1] = w->kv_len = n;
    b->step = ++s->n_steps;
    b->n_tokens = b->n_logits = n;
    b->n_seqs = 1;
    b->n_decode = n == 1;
    b->n_table_update = s->groups.n;
    b->token = token, b->token_src = w->src, b->position = w->position, b->slot = w->slot;
    b->group_slot = w->group_slot, b->logits_token = w->position;
    b->q_start = w->q_start, b->kv_len = &w->kv_len, b->row = &w->row, b->lcp_blocks = &w->lcp;
    b->table_update = w->update, b->table_block = w->block;
}

static int compute(struct scorer *s, const struct batch *b, scorer_fn *fn, void *ctx, struct err *e)
{
    struct model *m = s->model;
    const struct backend_ops *ops = s->backend->ops;
    struct results results;
    int rc = ops->step_begin(s->backend, b, e);

    if (rc < 0) {
        return rc;
    }
    m->family->forward(m, b);
    int given = 0;
    for (int32_t first = 0; first < b->n_logits && given == 0; first += LOGITS_ROWS) {
        int32_t rows = MIN(b->n_logits - first, LOGITS_ROWS);
        struct mat gathered = mat_rows(m->gathered, 0, rows), logits = mat_rows(m->logits, 0, rows);
        ops->gather(s->backend, gathered, mat_rows(m->hidden, 0, b->n_tokens), first);
        transformer_head(m, logits, gathered);
        given = ops->download(s->backend, logits, s->logits, e);
        given = given < 0 ? given : fn(ctx, first, rows, s->logits, e);
    }
    rc = given < 0 ? given : ops->step_end(s->backend, e);
    return rc < 0 ? rc : ops->step_wait(s->backend, &results, e);
}

int scorer_window(struct scorer *s, const int32_t *token, int32_t n, scorer_fn *fn, void *ctx,
                  struct err *e)
{
    if (n < 1 || n > SCORER_WINDOW) {
        return err_set(e, ERR_INVALID, "a window of %" PRId32 " tokens", n);
    }
    for (int32_t i = 0; i < n; i++) {
        if (token[i] < 0 || token[i] >= s->config.vocab) {
            return err_set(e, ERR_INVALID, "token %" PRId32 " of a vocabulary of %" PRId32,
                           token[i], s->config.vocab);
        }
    }
    struct window *w = calloc(1, sizeof(*w));
    if (!w) {
        return err_nomem(e, "a window");
    }
    pack(s, w, token, n);
    int rc = compute(s, &w->b, fn, ctx, e);
    free(w);
    return rc;
}

/* ---- loss ---- */

struct loss {
    const int32_t *token; /* of the window */
    int32_t n, vocab;
    double sum;
};

static double log_of_sum(const float *x, int32_t n)
{
    float most = x[0];
    double sum = 0;

    for (int32_t i = 1; i < n; i++) {
        most = fmaxf(most, x[i]);
    }
    for (int32_t i = 0; i < n; i++) {
        sum += expf(x[i] - most);
    }
    return log(sum) + most;
}

static int add_loss(void *ctx, int32_t first, int32_t rows, const float *logits, struct err *e)
{
    struct loss *l = ctx;

    for (int32_t i = 0; i < rows && first + i + 1 < l->n; i++) {
        const float *x = logits + (ptrdiff_t)i * l->vocab;
        l->sum += log_of_sum(x, l->vocab) - x[l->token[first + i + 1]];
    }
    return isfinite(l->sum) ? 0 : err_set(e, ERR_INVALID, "logits are no numbers");
}

int scorer_loss(struct scorer *s, const int32_t *token, int32_t n, double *ret, int32_t *ret_n,
                struct err *e)
{
    double sum = 0;
    int32_t count = 0;
    int rc = 0;

    for (int32_t at = 0; at + 1 < n && rc == 0; at += SCORER_WINDOW) {
        struct loss l = {
            .token = token + at, .n = MIN(n - at, SCORER_WINDOW), .vocab = s->config.vocab};
        if (l.n > 1) {
            rc = scorer_window(s, l.token, l.n, add_loss, &l, e);
            sum += l.sum;
            count += l.n - 1;
        }
    }
    if (rc == 0) {
        *ret = sum;
        *ret_n = count;
    }
    return rc;
}
