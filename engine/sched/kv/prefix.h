/* The prefix cache: full KV blocks found again by what they hold.
 *
 * A full block is named by the 128-bit xxHash3 of (its parent's name, its tokens); the
 * first block's parent is the name of the salt. A hash is never proof: a hit compares
 * the tokens, and the parent by serial number. Every entry gets a serial of its own
 * when it is published, and holds the serial of its parent's entry, so a chain matches
 * only if each block was computed on top of exactly the one before; an entry whose
 * parent was dropped can no longer be reached and ages out. The salt is compared in 191
 * bits of hash keyed by a secret drawn at start.
 *
 * A shared block (prefix_share: the texts that the settings pin) is found whatever the
 * salt, as long as only shared blocks stand before it: a chain begins without its salt,
 * which enters its name where the shared blocks end. What is shared must stay named,
 * and be shared before the first salted chain begins.
 *
 * Entries are indexed by block id, so there is nothing to allocate. The caller walks a
 * prompt block by block with a `struct prefix_chain`, which also carries a running
 * sequence's place, so nothing is hashed twice.
 *
 * Invariants (prefix_check): a named block's entry is in the bucket of its name; its
 * name equals the hash of its parent's name and its tokens; exactly the pool's named
 * blocks have entries.
 */
#ifndef QUIRE_ENGINE_SCHED_KV_PREFIX_H
#define QUIRE_ENGINE_SCHED_KV_PREFIX_H

#include "engine/sched/kv/kvpool.h"

struct prefix_name {
    uint64_t lo, hi;
};

/* Where a sequence stands in its chain of named blocks. */
struct prefix_chain {
    struct prefix_name name; /* of the last block, or of the salt */
    uint64_t serial;         /* of the last block's entry, or a salt's mark (top bit set) */
    int32_t n_blocks;        /* blocks behind us */
    struct prefix_name salt; /* that has not entered the name yet */
    uint64_t salt_serial;    /* the same; 0: there is none, or it has entered */
};

struct prefix_entry {
    struct prefix_name name;
    struct prefix_name parent_name;
    uint64_t serial; /* 0: no entry */
    uint64_t parent_serial;
    int32_t next; /* in the bucket; -1: last */
    bool shared;  /* found behind shared blocks whatever the salt */
};

struct prefix {
    struct kvpool *pool;
    struct prefix_entry *entry; /* [n_blocks] by block id */
    int32_t *token;             /* [n_blocks, block_size] */
    int32_t *bucket;            /* [n_buckets] first block of the bucket, -1: empty */
    uint32_t bucket_mask;
    int32_t block_size;
    uint64_t last_serial;
    /* bits of a name that count: all, but in tests that want collisions */
    struct prefix_name name_mask;
    uint64_t secret; /* seed of the hashes */
};

/* `name_bits`: how many bits of a name count; 0: all 128. */
int prefix_init(struct prefix *px, struct kvpool *pool, int32_t block_size, int32_t name_bits,
                uint64_t secret, struct err *e);
void prefix_release(struct prefix *px);

/* The start of a chain. `salt` may be NULL. */
void prefix_start(const struct prefix *px, struct prefix_chain *ret, const char *salt);
/* The block that holds token[0 .. block_size) after `chain`, or -1. On a hit the chain
 * moves on, else its salt enters; no count changes. */
int32_t prefix_find(const struct prefix *px, struct prefix_chain *chain, const int32_t *token);
/* `block`, which the caller holds, contains the tokens after `chain`. Becomes its name
 * unless an equal block has one already; the chain moves on either way. */
void prefix_publish(struct prefix *px, struct prefix_chain *chain, int32_t block,
                    const int32_t *token);
/* A named block of a chain without a salt is found with any. The caller holds it for
 * good. */
void prefix_share(struct prefix *px, int32_t block);
/* Forget the block's name (before it is taken for something else). No-op for a nameless
 * one. */
void prefix_drop(struct prefix *px, int32_t block);

/* NULL, or the sentence of the first invariant that does not hold. */
const char *prefix_check(const struct prefix *px);

#endif
