/* Whether a step fits a backend, before anything of it is computed. */
#include "kernels/batch_check.h"

static int check_sizes(const struct backend_config *c, const char *name, const struct batch *b,
                       struct err *e)
{
    if (b->n_tokens >= 0 && b->n_tokens <= c->max_tokens && b->n_seqs >= 0 &&
        b->n_seqs <= c->max_seqs && b->n_samples >= 0 && b->first_sample >= 0 &&
        b->n_samples <= c->max_samples - b->first_sample && b->n_logits <= b->n_tokens &&
        b->n_decode <= b->n_seqs) {
        return 0;
    }
    return err_set(e, ERR_INVALID,
                   "%s: step %llu is too large: %d tokens (of %d), %d sequences (of %d), %d "
                   "samples (of %d)",
                   name, (unsigned long long)b->step, b->n_tokens, c->max_tokens, b->n_seqs,
                   c->max_seqs, b->n_samples, c->max_samples);
}

static bool update_fits(const struct backend_config *c, const struct batch *b,
                        const struct table_update *u)
{
    return u->group >= 0 && u->group < backend_kv_groups(c) && u->row >= 0 &&
           u->row < c->max_seqs && u->index >= 0 && u->count >= 0 &&
           u->count <= c->max_blocks_per_seq - u->index && u->first >= 0 &&
           u->count <= b->n_table_block - u->first;
}

int batch_check(const struct backend_config *c, const char *name, int64_t noted_tokens,
                const struct batch *b, struct err *e)
{
    int rc = check_sizes(c, name, b, e);

    for (int32_t i = 0; rc == 0 && i < b->n_table_update; i++) {
        if (!update_fits(c, b, &b->table_update[i])) {
            rc = err_set(e, ERR_INVALID, "%s: step %llu: block-table update out of range", name,
                         (unsigned long long)b->step);
        }
    }
    if (rc == 0 && b->n_group_slots != (backend_kv_groups(c) - 1) * b->n_tokens) {
        rc = err_set(e, ERR_INVALID, "%s: step %llu: slots of %d KV groups are needed", name,
                     (unsigned long long)b->step, backend_kv_groups(c));
    }
    for (int32_t i = 0; rc == 0 && i < b->n_samples; i++) {
        const struct sample_row *s = &b->sample[i];
        if (sample_penalised(s) &&
            (s->row < 0 || s->row >= c->max_seqs || s->position > noted_tokens)) {
            rc = err_set(e, ERR_INVALID, "%s: step %llu: penalties of tokens out of range", name,
                         (unsigned long long)b->step);
        }
    }
    return rc;
}
