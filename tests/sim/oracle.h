/* The oracle: an executor whose KV cache holds token ids.
 *
 * It keeps block tables from the updates that it is sent and writes each token to its
 * slot, with a hash of the context that it was computed on. It samples the next token
 * from a hash of the context that it reads back through these tables, and both hashes
 * must agree. So one wrong slot, stale table entry, lost copy or block reused too early
 * changes its results. With several KV groups each has its own tables and slots; a
 * token is computed on, and sampled from, what is visible of its context in every
 * group, which must be the same text. It also refuses a batch that breaks a rule of
 * kernels/batch.h: launch fails with the rule.
 */
#ifndef QUIRE_TESTS_SIM_ORACLE_H
#define QUIRE_TESTS_SIM_ORACLE_H

#include "engine/workers/executor.h"

struct oracle_config {
    /* As in struct executor_info: */
    int32_t vocab, max_len, n_blocks, n_host_blocks, block_size;
    int32_t n_kv_groups, kv_window[LIMIT_KV_GROUPS];
    bool kv_chunked;
    int32_t max_num_seqs, max_num_batched_tokens, max_samples;
    int32_t depth; /* launches that may be outstanding when another is made */

    /* It is a draft head of this oracle, borrowed, whose cells are the hidden states
     * that it reads; NULL: it is a model. */
    struct executor *head_of;
    uint64_t fail_at; /* from this step on every sample is TOKEN_NO_NUMBER; 0: never */
};
int oracle_open(struct executor **ret, const struct oracle_config *c, struct err *e);

#endif
