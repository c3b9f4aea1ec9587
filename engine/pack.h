/* From plan (stage 5) to batch (stage 6): flat arrays, nothing else. Pure, no allocation after packer_new.
 *
 * Block tables live with the backend. The packer keeps a shadow of what each row holds there and sends only the
 * entries that changed, as runs: usually one entry every block_size steps of a sequence. Look-ahead shows here as
 * token_src and prev_sample: a token that step N draws is not known while N+1 is packed, so the batch names the
 * sampling row of N that will hold it.
 */
#ifndef QUIRE_ENGINE_PACK_H
#define QUIRE_ENGINE_PACK_H

#include "engine/sched.h"

struct packer;
int packer_new(struct packer **ret, const struct sched_config *c, struct err *e);
void packer_free(struct packer *p);
/* `plan` has items. The arrays of `ret` belong to the packer and the plan and hold until the next call. */
void pack_batch(struct packer *p, const struct plan *plan, struct batch *ret);

/* Entries of the side arrays that a packer holds: what running groups may reserve together (struct side_need). */
void pack_side_capacity(const struct sched_config *c, struct side_need *ret);

#endif
