#include "engine/speculate/replay.h"

#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

/* One answer. */
struct record {
    uint64_t key; /* of its prompt and seed */
    int32_t *token, n;
};

struct replay {
    struct draft_source base;
    struct draft_model *drafter; /* NULL: none */
    struct draft_source *model;  /* its source */
    float acceptance[LIMIT_DRAFT]; /* of a step's drafts, by their places */
    int32_t most;                  /* drafts of a step; 0: none */
    float sum;                     /* of them that hold on average */
    int32_t vocab;
    struct record *record; /* [cap] */
    int32_t n, cap;        /* of these */
};

static struct replay *replay_of(struct draft_source *base)
{
    return CONTAINER_OF(base, struct replay, base);
}

static uint64_t key_of(const struct seq *q)
{
    const struct request *r = q->group->request;

    return XXH3_64bits_withSeed(r->prompt, (size_t)r->n_prompt * sizeof(*r->prompt), q->seed);
}

/* The answer recorded for a sequence, which notes the record's number; NULL: none. */
static const struct record *record_of(const struct replay *r, struct seq *q)
{
    uint64_t key = q->draft_state == 0 ? key_of(q) : 0;

    for (int32_t i = 0; i < r->n && q->draft_state == 0; i++) {
        q->draft_state = r->record[i].key == key ? i + 1 : 0;
    }
    q->draft_state = q->draft_state == 0 ? -1 : q->draft_state;
    return q->draft_state > 0 ? &r->record[q->draft_state - 1] : NULL;
}

static float expect(struct draft_source *base, struct seq *q)
{
    const struct replay *r = replay_of(base);

    if (r->most == 0 || !record_of(r, q)) {
        return 0;
    }
    return r->model ? r->model->expect(r->model, q) : r->sum;
}

/* Uniform in [0, 1), by the sequence and the position. */
static double chance(const struct seq *q, int32_t position)
{
    uint64_t at = (uint64_t)position;

    return (double)(XXH3_64bits_withSeed(&at, sizeof(at), q->seed) >> 11) * 0x1p-53;
}

static int32_t draft(struct draft_source *base, struct seq *q, int32_t most, int32_t *token,
                     float *prob)
{
    const struct replay *r = replay_of(base);
    const struct record *a = record_of(r, q);
    float all = 1;
    int32_t n = 0;

    most = MIN(most, r->most);
    if (r->model && most > 0) {
        most = r->model->draft(r->model, q, most, token, prob);
    }
    while (a && n < most && q->n_out + n < a->n) {
        bool right = chance(q, q->n_out + n) < (double)r->acceptance[n];
        int32_t t = a->token[q->n_out + n];
        token[n] = right ? t : (t + 1) % r->vocab;
        all *= r->acceptance[n];
        prob[n] = r->model ? prob[n] : all;
        n++;
    }
    if (r->model) {
        draft_model_replace(r->drafter, q, n, token);
    }
    return n;
}

static void verified(struct draft_source *base, struct seq *q, int32_t n, int32_t n_accepted)
{
    const struct replay *r = replay_of(base);

    if (r->model) {
        r->model->verified(r->model, q, n, n_accepted);
    }
}

static void outlook(struct draft_source *base, const struct draft_step *step, int32_t n)
{
    const struct replay *r = replay_of(base);

    if (r->model) {
        r->model->outlook(r->model, step, n);
    }
}

static double prepare(struct draft_source *base, struct draft_want *want, int32_t n,
                      const struct draft_step *step)
{
    const struct replay *r = replay_of(base);
    int32_t kept = 0;

    for (int32_t i = 0; i < n && r->model && r->most > 0; i++) {
        if (record_of(r, want[i].seq)) {
            want[kept] = want[i];
            want[kept].most = MIN(want[kept].most, r->most);
            kept++;
        }
    }
    return kept > 0 ? r->model->prepare(r->model, want, kept, step) : 0;
}

/* Record the answer, unless memory is short. */
static void keep(struct replay *r, const struct seq *q)
{
    size_t n_bytes = (size_t)q->n_out * sizeof(*q->out);

    if (r->n == r->cap) {
        int32_t cap = MAX(2 * r->cap, 64);
        struct record *more = realloc(r->record, (size_t)cap * sizeof(*more));
        if (!more) {
            return;
        }
        r->record = more;
        r->cap = cap;
    }
    int32_t *token = malloc(n_bytes);
    if (token) {
        memcpy(token, q->out, n_bytes);
        r->record[r->n++] = (struct record){key_of(q), token, q->n_out};
    }
}

static void ended(struct draft_source *base, struct group *g)
{
    struct replay *r = replay_of(base);

    for (int32_t i = 0; i < g->n_seqs; i++) {
        if (g->seq[i].n_out > 0 && !record_of(r, &g->seq[i])) {
            keep(r, &g->seq[i]);
        }
    }
}

static void observed(struct draft_source *base, int32_t n_rows, double estimate_us, double us)
{
    const struct replay *r = replay_of(base);

    if (r->model) {
        r->model->observed(r->model, n_rows, estimate_us, us);
    }
}

int replay_open(struct replay **ret, int32_t vocab, struct draft_model *model, struct err *e)
{
    struct replay *r = calloc(1, sizeof(*r));

    if (!r) {
        return err_nomem(e, "recorded answers");
    }
    r->base = (struct draft_source){
        .expect = expect, .draft = draft, .verified = verified, .ended = ended};
    if (model) {
        r->base.outlook = outlook;
        r->base.prepare = prepare;
        r->base.observed = observed;
    }
    r->drafter = model;
    r->model = model ? draft_model_source(model) : NULL;
    r->vocab = vocab;
    *ret = r;
    return 0;
}

void replay_set(struct replay *r, const float *acceptance, int32_t n)
{
    const float MOST = 0.98f; /* what never fails would be endless */
    float all = 1;

    r->most = n == 1 ? LIMIT_DRAFT : n;
    r->sum = n == 1 ? MIN(acceptance[0], MOST) / (1 - MIN(acceptance[0], MOST)) : 0;
    for (int32_t i = 0; i < r->most; i++) {
        r->acceptance[i] = acceptance[n == 1 ? 0 : i];
        all *= r->acceptance[i];
        r->sum += n > 1 ? all : 0;
    }
}

void replay_free(struct replay *r)
{
    if (!r) {
        return;
    }
    for (int32_t i = 0; i < r->n; i++) {
        free(r->record[i].token);
    }
    free(r->record);
    free(r);
}

struct draft_source *replay_source(struct replay *r)
{
    return &r->base;
}
