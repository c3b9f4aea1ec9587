/* From plan to batch: flat arrays, nothing else. Pure; allocates in packer_new only.
 *
 * Block tables live with the backend, one a slot. The packer keeps a shadow copy of
 * each and sends only the entries that changed, as runs: usually one entry every
 * block_size steps of a sequence. For penalties no token lists are sent: the backend
 * finds a sequence's tokens through its block table. Look-ahead appears here as
 * token_src: a token that step N samples is not known while N+1 is packed, so the batch
 * names the sampling row of N that will hold it.
 *
 * Biases are sent as lists, allowed ids as masks of one bit an id. Both arrays are
 * sized for all slots at their limits, so no group ever waits for them.
 */
#ifndef QUIRE_ENGINE_SCHED_DECODE_PACK_H
#define QUIRE_ENGINE_SCHED_DECODE_PACK_H

#include "engine/sched/sched.h"

struct packer;
int packer_new(struct packer **ret, const struct sched_config *c, struct err *e);
void packer_free(struct packer *p);
/* `plan` has items. The arrays of `ret` belong to the packer and the plan; they are
 * valid until the next call. */
void pack_batch(struct packer *p, const struct plan *plan, struct batch *ret);

#endif
