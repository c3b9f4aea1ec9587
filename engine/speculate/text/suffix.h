/* Drafts from what was written before, by two searches:
 *
 * - matches (ngram.h, store.h): where the last tokens of a sequence stood earlier, in
 *   its own prompt and answer or in a recent answer of the server, the tokens that
 *   followed there are drafted;
 * - followers (followers.h): where no such place is found or its tokens are less likely
 *   to hold, the token that mostly followed the last one to three in answers.
 *
 * Answers are remembered, and followers counted, in tables of bounded size, and found
 * only by requests of the same cache_salt, as blocks of the prefix cache are.
 *
 * Chances: how often the first token of a match and the likeliest follower are right is
 * learned from every token that comes, drafted or not. Of matches it is by their length
 * and where they were found, for all sequences and then for each; of followers by how
 * often they were seen. At each place of a draft the likelier of the two is taken.
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
