/* The oracle: an executor whose key/value memory holds token ids.
 *
 * It keeps its own block tables from the updates it is sent, writes each token where
 * its slot says, with a hash of the context that it was computed on, and draws the next
 * token from a hash of the context read back through those tables, which must agree.
 * One wrong slot, stale table entry, lost copy or block given away too early changes
 * what it answers. It also refuses a batch that breaks a rule of kernels/batch.h:
 * launch fails and says which.
 */
#ifndef QUIRE_TESTS_SIM_ORACLE_H
#define QUIRE_TESTS_SIM_ORACLE_H

#include "engine/workers/executor.h"

struct oracle_config {
    int32_t vocab, max_len, n_blocks, n_host_blocks, block_size;
    int32_t max_num_seqs, max_num_batched_tokens, max_samples;
    int32_t depth;
    uint64_t fail_at; /* from this step on every sample is TOKEN_NO_NUMBER; 0: never */
};
int oracle_open(struct executor **ret, const struct oracle_config *c, struct err *e);

#endif
