/* The prefix cache: full KV blocks found again by what they hold.
 *
 * The hash of a full block is the 128-bit xxHash3 of (its parent's hash, its tokens);
 * the first block's parent is the salt. A hash is never proof: a hit compares the
 * tokens, and the parent by serial number. Every entry gets its own serial when it is
 * published and stores the serial of its parent's entry, so a chain matches only if
 * each block was computed on top of exactly the one before. An entry whose parent was
 * dropped can no longer be reached and ages out. Salts are compared as 191 bits of
 * hash, keyed with a random secret.
 *
 * A shared block (prefix_share: the prefixes that the settings pin) is found with any
 * salt, provided that only shared blocks come before it: a chain begins without its
 * salt, which is mixed in behind the last shared block. A shared block must keep its
 * entry, and must be shared before the first salted chain begins.
 *
 * The entries are of blocks of KV group 0. With further groups, an entry also names the
 * blocks that hold the same tokens in those groups, its peers, as far as they are
 * cached: they are found by the same walk, are hashed as long as they are peers, and
 * lose that with the entry. A group with a window may lack peers of early blocks.
 *
 * A sequence that ends in the middle of a block may leave a tail (prefix_publish_tail):
 * the entry of a block that is not full, by the hash of its parent and of its first few
 * tokens, so that there is one of each beginning. A tail's blocks are held by no table;
 * who goes on from it drops the entry and writes to them.
 *
 * Entries are indexed by block id, so nothing is allocated. The caller walks a prompt
 * block by block with a `struct prefix_chain`, which a running sequence keeps, so no
 * block is hashed twice.
 *
 * Invariants (prefix_check):
 *  X1  exactly the hashed blocks of the pool have entries or are peers
 *  X2  an entry is in the bucket of its hash
 *  X3  an entry's hash is that of its parent's hash and its tokens, of a tail those
 *      that name it
 *  X4  peers and their entries name each other
 */
#ifndef QUIRE_ENGINE_SCHED_KV_PREFIX_H
#define QUIRE_ENGINE_SCHED_KV_PREFIX_H

#include "engine/sched/kv/kvpool.h"

struct block_hash {
    uint64_t lo, hi; /* halves of the 128 bits */
};

/* A position in a chain of hashed blocks: the blocks of one sequence up to here. */
struct prefix_chain {
    struct block_hash hash; /* of the last block, or of the salt */
    uint64_t serial;        /* of the last block's entry, or a salt's mark (top bit set) */
    int32_t n_blocks;       /* blocks passed so far */
    struct block_hash salt; /* of a salt that was not mixed in yet */
    uint64_t salt_serial;   /* that salt's mark; 0: no salt, or it was mixed in */
};

/* What the cache knows of one block. */
struct prefix_entry {
    struct block_hash hash;
    struct block_hash parent_hash;
    uint64_t serial;        /* unique among all entries ever; 0: no entry */
    uint64_t parent_serial; /* the parent's entry's, or a salt's mark */
    int32_t next;           /* block of the bucket's next entry; -1: last */
    int32_t n_tail;         /* tokens of a tail; 0: the block is full */
    bool shared;            /* found with any salt, behind shared blocks */
};

struct prefix {
    struct kvpool *pool;        /* of the blocks; borrowed */
    struct prefix_entry *entry; /* [n_blocks] by block id */
    int32_t *token;             /* [n_blocks, block_size] contents of hashed blocks */
    int32_t *bucket;            /* [n_buckets] first block of the bucket, -1: empty */
    uint32_t bucket_mask;       /* n_buckets - 1; n_buckets is a power of two */
    int32_t block_size;         /* tokens of a block */
    int32_t n_peers;            /* KV groups behind the first */
    int32_t *peer;              /* [n_blocks, n_peers] by entry, -1: none; NULL: no peers */
    int32_t *owner;       /* [n_blocks] entry that a peer belongs to, -1: none; NULL likewise */
    uint64_t last_serial; /* of the newest entry */
    struct block_hash hash_mask; /* bits of a hash that count: all, except in tests */
    uint64_t secret;             /* seed of the hashes */
};

/* n_groups: KV groups. `hash_bits`: how many bits of a hash count; 0: all 128. */
int prefix_init(struct prefix *px, struct kvpool *pool, int32_t block_size, int32_t n_groups,
                int32_t hash_bits, uint64_t secret, struct err *e);
void prefix_release(struct prefix *px);

/* The start of a chain. `salt` may be NULL. */
void prefix_start(const struct prefix *px, struct prefix_chain *ret, const char *salt);
/* The block that holds token[0 .. block_size) after `chain`, or -1. On a hit the chain
 * advances, on a miss its salt is mixed in; no count changes. */
int32_t prefix_find(const struct prefix *px, struct prefix_chain *chain, const int32_t *token);
/* `block`, which the caller holds, contains the tokens after `chain`. It becomes hashed
 * unless an equal block is already; the chain advances either way. Returns the block
 * that has the entry; -1: none has. */
int32_t prefix_publish(struct prefix *px, struct prefix_chain *chain, int32_t block,
                       const int32_t *token);
/* Prefetches what prefix_publish with the same arguments will touch. */
void prefix_fetch(const struct prefix *px, const struct prefix_chain *chain, int32_t block,
                  const int32_t *token);
/* `block` of KV group k >= 1, which the caller holds, has the contents of the entry of
 * `entry`. It becomes its peer, unless there is one. */
void prefix_attach(struct prefix *px, int32_t entry, int32_t k, int32_t block);
/* Tokens of the shortest tail, which name it. */
int32_t prefix_least_tail(const struct prefix *px);
/* The longest tail behind `chain` that token[0 .. n) begins with, *ret_n tokens; -1:
 * none. The chain does not move, no count changes. */
int32_t prefix_find_tail(const struct prefix *px, const struct prefix_chain *chain,
                         const int32_t *token, int32_t n, int32_t *ret_n);
/* `block`, which the caller holds alone and is about to let go of, contains the n
 * tokens after `chain`, at least prefix_least_tail and fewer than a block. True: it has
 * an entry now, in place of an older tail of the same beginning. */
bool prefix_publish_tail(struct prefix *px, const struct prefix_chain *chain, int32_t block,
                         const int32_t *token, int32_t n);
/* The block of KV group k for a block with an entry; -1: none is cached. */
static inline int32_t prefix_block(const struct prefix *px, int32_t entry, int32_t k)
{
    return k == 0 ? entry : px->peer[(int64_t)entry * px->n_peers + k - 1];
}

/* A hashed block of a chain without a salt is found with any salt from now on. The
 * caller holds it for good. */
void prefix_share(struct prefix *px, int32_t block);
/* Drop the block's entry with its peers, or end its being a peer, before it is taken
 * for other contents. No-op for a block that is not hashed. */
void prefix_drop(struct prefix *px, int32_t block);

/* NULL, or a sentence about the first invariant that does not hold. */
const char *prefix_check(const struct prefix *px);

#endif
