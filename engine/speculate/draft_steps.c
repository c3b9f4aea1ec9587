#include "engine/speculate/draft_steps.h"

#include <stdlib.h>

int draft_steps_init(struct draft_steps *s, struct executor *x, int32_t vocab, int32_t mask_token,
                     struct err *e)
{
    size_t tokens = (size_t)x->info.max_num_batched_tokens, seqs = (size_t)x->info.max_num_seqs,
           samples = (size_t)x->info.max_samples, word = sizeof(int32_t);

    *s = (struct draft_steps){
        .executor = x, .vocab = MIN(vocab, x->info.vocab), .mask_token = mask_token};
    s->token = calloc(tokens, word);
    s->token_src = calloc(tokens, word);
    s->position = calloc(tokens, word);
    s->slot = calloc(tokens, word);
    s->q_start = calloc(seqs + 1, word);
    s->kv_len = calloc(seqs, word);
    s->row = calloc(seqs, word);
    s->lcp_blocks = calloc(seqs, word);
    s->logits_token = calloc(samples, word);
    s->sample = calloc(samples, sizeof(*s->sample));
    if (!s->token || !s->token_src || !s->position || !s->slot || !s->q_start || !s->kv_len ||
        !s->row || !s->lcp_blocks || !s->logits_token || !s->sample) {
        draft_steps_release(s);
        return err_nomem(e, "drafts");
    }
    return 0;
}

void draft_steps_release(struct draft_steps *s)
{
    free(s->token);
    free(s->token_src);
    free(s->position);
    free(s->slot);
    free(s->q_start);
    free(s->kv_len);
    free(s->row);
    free(s->lcp_blocks);
    free(s->logits_token);
    free(s->sample);
    *s = (struct draft_steps){0};
}

/* ---- a step ---- */

/* c: with the updates of its tables; NULL: without. */
static void begin(struct draft_steps *s, struct draft_cache *c)
{
    s->batch = (struct batch){.step = s->step + 1,
                              .token = s->token,
                              .token_src = s->token_src,
                              .position = s->position,
                              .slot = s->slot,
                              .q_start = s->q_start,
                              .kv_len = s->kv_len,
                              .row = s->row,
                              .lcp_blocks = s->lcp_blocks,
                              .logits_token = s->logits_token,
                              .sample = s->sample};
    if (c) {
        s->batch.table_update = c->update;
        s->batch.n_table_update = c->n_updates;
        s->batch.table_block = c->table_block;
        s->batch.n_table_block = c->n_table_blocks;
        c->n_updates = c->n_table_blocks = 0;
    }
}

static int launch(struct draft_steps *s, struct err *e)
{
    s->q_start[s->batch.n_seqs] = s->batch.n_tokens;
    s->step++;
    return s->executor->launch(s->executor, &s->batch, e);
}

/* The draft behind position p is drawn as the token will be, from the same noise, so
 * that both models draw the same token where they think alike. Biases and masks are
 * left out: tokens that they ban do not hold. So are a head's penalties: its cache
 * lacks the first token, which they count. */
static struct sample_row sample_of(const struct draft_cache *c, const struct seq *q, int32_t p,
                                   int32_t logits_row)
{
    struct sample_row row;

    seq_sample_row(&row, q, p + 1 + c->shift, logits_row);
    if (c->shift > 0) {
        row.presence_penalty = row.frequency_penalty = 0;
        row.repetition_penalty = 1;
    }
    return row;
}

/* Add n tokens of a job's sequence from `position` on; src: sampling row of the step
 * before that has the only one, -1: they are known. The last n_sampled are sampled
 * from. Returns the last sampling row; -1: none. */
static int32_t add(struct draft_steps *s, const struct draft_cache *c, const struct draft_job *j,
                   int32_t position, int32_t n, int32_t src, int32_t n_sampled)
{
    struct batch *b = &s->batch;
    const struct seq *q = j->seq;
    int32_t size = c->block_size, i = b->n_seqs++;

    s->q_start[i] = b->n_tokens;
    s->kv_len[i] = position + n;
    s->row[i] = q->slot;
    b->n_decode += n == 1;
    for (int32_t k = 0; k < n; k++) {
        int32_t t = b->n_tokens++, p = position + k;
        int32_t id = src >= 0 || k >= j->n ? 0 : seq_token(q, p + c->shift);
        s->token[t] = id < s->executor->info.vocab ? id : 0;
        s->token_src[t] = src;
        s->position[t] = p;
        s->slot[t] = q->table[0].block[p / size] * size + p % size;
        if (k >= n - n_sampled) {
            s->logits_token[b->n_logits] = t;
            s->sample[b->n_samples++] = sample_of(c, q, p, b->n_logits);
            b->n_logits++;
        }
    }
    return n_sampled > 0 ? b->n_samples - 1 : -1;
}

/* ---- drafts of one step ---- */

/* Add a job's known tokens, and a place for each draft but the first behind them; all
 * drafts are sampled there. */
static void add_masked(struct draft_steps *s, const struct draft_cache *c, struct draft_job *j)
{
    int32_t n_masked = MAX(j->n_drafts - 1, 0), first = s->batch.n_tokens + j->n;

    j->row[0] = s->batch.n_samples;
    add(s, c, j, j->first, j->n + n_masked, -1, j->n_drafts);
    for (int32_t t = first; t < s->batch.n_tokens; t++) {
        s->token[t] = s->mask_token;
        s->token_src[t] = TOKEN_MASKED;
    }
}

static int run_masked(struct draft_steps *s, struct draft_cache *c, struct draft_job *job,
                      int32_t n, struct err *e)
{
    struct results r;

    begin(s, c);
    for (int32_t decode = 1; decode >= 0; decode--) { /* decodes first */
        for (int32_t k = 0; k < n; k++) {
            if ((job[k].n == 1 && job[k].n_drafts <= 1) == decode) {
                add_masked(s, c, &job[k]);
            }
        }
    }
    int rc = launch(s, e);
    rc = rc ? rc : s->executor->wait(s->executor, &r, e);
    for (int32_t k = 0; rc == 0 && k < n; k++) {
        struct draft_seq *state = job[k].state;
        int32_t i = 0;
        while (i < job[k].n_drafts && r.token[job[k].row[0] + i] >= 0 &&
               r.token[job[k].row[0] + i] < s->vocab) {
            state->token[i] = r.token[job[k].row[0] + i];
            i++;
        }
        state->n_drafts = i;
    }
    return rc;
}

/* ---- known tokens ---- */

static bool is_few(const struct draft_job *j)
{
    return j->n > 1 && j->n <= DRAFT_FEW && j->n_drafts > 0;
}

/* Decodes first, then few tokens that are all sampled from, then the others. */
static int launch_known(struct draft_steps *s, struct draft_cache *c, struct draft_job *job,
                        int32_t n, struct err *e)
{
    begin(s, c);
    int32_t rows_left = s->executor->info.max_samples - n;
    for (int32_t i = 0; i < n; i++) {
        if (job[i].n == 1) {
            job[i].row[0] = add(s, c, &job[i], job[i].first, 1, -1, job[i].n_drafts > 0);
        }
    }
    for (int32_t i = 0; i < n; i++) {
        if (is_few(&job[i])) {
            int32_t n_rows = job[i].n <= rows_left ? job[i].n : 1;
            rows_left -= n_rows - 1;
            job[i].row[0] = add(s, c, &job[i], job[i].first, job[i].n, -1, n_rows);
        }
    }
    for (int32_t i = 0; i < n; i++) {
        if (job[i].n > 1 && !is_few(&job[i])) {
            job[i].row[0] = add(s, c, &job[i], job[i].first, job[i].n, -1, job[i].n_drafts > 0);
        }
    }
    return launch(s, e);
}

/* ---- drafts ---- */

/* Launch draft i of the sequences that want so many. */
static int launch_drafts(struct draft_steps *s, const struct draft_cache *c, struct draft_job *job,
                         int32_t n, int32_t i, struct err *e)
{
    begin(s, NULL);
    for (int32_t k = 0; k < n; k++) {
        struct draft_job *j = &job[k];
        j->row[i % 2] = j->n_drafts <= i
                            ? -1
                            : add(s, c, j, j->first + j->n + i - 1, 1, j->row[(i - 1) % 2], 1);
    }
    return launch(s, e);
}

/* The results of the oldest step are drafts i. One that is no token both models know
 * ends those of its sequence. */
static int take_drafts(struct draft_steps *s, struct draft_job *job, int32_t n, int32_t i,
                       struct err *e)
{
    struct results r;
    int rc = s->executor->wait(s->executor, &r, e);

    for (int32_t k = 0; rc == 0 && k < n; k++) {
        struct draft_seq *state = job[k].state;
        int32_t row = job[k].row[i % 2];
        if (row >= 0 && state->n_drafts == i) {
            state->token[i] = r.token[row];
            state->n_drafts += r.token[row] >= 0 && r.token[row] < s->vocab;
        }
    }
    return rc;
}

int draft_steps_run(struct draft_steps *s, struct draft_cache *c, struct draft_job *job, int32_t n,
                    struct err *e)
{
    int32_t most = 1, n_taken = 0;
    int32_t depth = MIN(s->executor->info.depth, 1); /* of a job, two rows are known */

    if (s->mask_token >= 0) {
        return run_masked(s, c, job, n, e);
    }
    int rc = launch_known(s, c, job, n, e);

    for (int32_t k = 0; k < n; k++) {
        most = MAX(most, job[k].n_drafts);
    }
    for (int32_t i = 1; i < most && rc == 0; i++) {
        if (i - n_taken > depth) {
            rc = take_drafts(s, job, n, n_taken++, e);
        }
        rc = rc < 0 ? rc : launch_drafts(s, c, job, n, i, e);
    }
    while (n_taken < most && rc == 0) {
        rc = take_drafts(s, job, n, n_taken++, e);
    }
    return rc;
}
