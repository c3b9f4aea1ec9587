/* From plan (stage 5) to batch (stage 6): flat arrays, nothing else. Pure, no
 * allocation after packer_new.
 *
 * Block tables live with the backend. The packer keeps a shadow of what each row holds
 * there and sends only the entries that changed, as runs: usually one entry every
 * block_size steps of a sequence. Penalties need no more than where a sequence's tokens
 * stand: the backend has them beside their keys and values. Look-ahead shows here as
 * token_src: a token that step N draws is not known while N+1 is packed, so the batch
 * names the sampling row of N that will hold it.
 *
 * Biases are sent as lists and allowed ids as masks of one bit an id. Both arrays have
 * room for what all rows may need at their limits, so no group ever waits for them.
 */
#ifndef QUIRE_ENGINE_SCHED_DECODE_PACK_H
#define QUIRE_ENGINE_SCHED_DECODE_PACK_H

#include "engine/sched/sched.h"

struct packer;
int packer_new(struct packer **ret, const struct sched_config *c, struct err *e);
void packer_free(struct packer *p);
/* `plan` has items. The arrays of `ret` belong to the packer and the plan and hold
 * until the next call. */
void pack_batch(struct packer *p, const struct plan *plan, struct batch *ret);

#endif
