/* Drafts from what was written before: where the last tokens of a sequence stood
 * earlier, in its own prompt and answer or in a recent answer of the server, the tokens
 * that followed there are drafted.
 *
 * Answers are remembered in a ring of bounded size, and found only by requests of the
 * same cache_salt, as blocks of the prefix cache are. How likely drafts are to hold is
 * learned by the length of the match and by where it was found, for all sequences and
 * then for each.
 *
 * It runs on the engine's thread and allocates nothing after start. The work for a
 * sequence in a step is bounded: some thousand tokens are indexed, some dozen positions
 * compared.
 */
#ifndef QUIRE_ENGINE_SPECULATE_TEXT_SUFFIX_H
#define QUIRE_ENGINE_SPECULATE_TEXT_SUFFIX_H

#include "engine/sched/draft.h"
#include "engine/sched/sched.h"

struct suffix_config {
    int32_t n_seqs;       /* sequences that draft at a time */
    int32_t max_len;      /* tokens of the longest */
    int64_t bytes;        /* for their indices, at most */
    int32_t store_tokens; /* of recent answers; 0: none */
    /* contexts of one to three tokens whose followers are counted, a power of two;
     * 0: none */
    int32_t follower_sets;
    uint64_t secret; /* keys the hashes of salts */
};

struct suffix_drafts;
/* ERR_NOMEM. The source borrows nothing. */
int suffix_open(struct suffix_drafts **ret, const struct suffix_config *c, struct err *e);
/* NULL: nothing. */
void suffix_free(struct suffix_drafts *d);
/* For sched_speculate. */
struct draft_source *suffix_source(struct suffix_drafts *d);

#endif
