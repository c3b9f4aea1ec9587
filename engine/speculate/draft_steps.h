/* Steps of a draft model: the tokens that its cache lacks, then draft after draft for
 * all sequences at once. */
#ifndef QUIRE_ENGINE_SPECULATE_DRAFT_STEPS_H
#define QUIRE_ENGINE_SPECULATE_DRAFT_STEPS_H

#include "engine/speculate/draft_cache.h"
#include "engine/workers/executor.h"

/* Known tokens of a sequence that are computed at once. In a step of them all rows are
 * sampled, as where drafts are verified, so that a GPU runs it as decodes. */
enum { DRAFT_FEW = 8 };

/* What the draft model computes for a sequence. */
struct draft_job {
    const struct seq *seq;
    struct draft_seq *state;
    int32_t first, n; /* known tokens, from position `first` on */
    int32_t n_drafts; /* to be drafted behind them; 0: there are more known tokens */
    /* Sampling row of draft i in row[i % 2]; -1: none. Of drafts in one step, row[0] is
     * that of the first. */
    int32_t row[2];
};

struct draft_steps {
    struct executor *executor; /* borrowed */
    uint64_t step;             /* the last one launched */
    int32_t vocab;             /* ids that may be drafted: those of both models */
    /* -1: a step for each draft. Else all of a sequence's drafts are made in the step
     * of its known tokens, of rows behind them with this token, whose keys and values
     * are no token's. */
    int32_t mask_token;
    /* Arrays of struct batch, by the executor's limits. */
    int32_t *token, *token_src, *position, *slot;
    int32_t *q_start, *kv_len, *row, *lcp_blocks, *logits_token;
    struct sample_row *sample;
    struct batch batch; /* the step that is being put together */
};

/* vocab: ids of the target. mask_token: as in the struct. */
int draft_steps_init(struct draft_steps *s, struct executor *x, int32_t vocab, int32_t mask_token,
                     struct err *e);
void draft_steps_release(struct draft_steps *s);

/* Compute n jobs, and their drafts into state->token, state->n_drafts. The blocks to be
 * written were taken for step s->step + 1. ERR_DEVICE. */
int draft_steps_run(struct draft_steps *s, struct draft_cache *c, struct draft_job *job, int32_t n,
                    struct err *e);

#endif
