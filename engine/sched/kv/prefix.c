#include "engine/sched/kv/prefix.h"

#include <assert.h>
#include <string.h>

#include <xxhash.h>

#include "config/base/limits.h"

#define SALT_MARK (UINT64_C(1) << 63)

static struct block_hash hash_after(const struct prefix *px, struct block_hash parent,
                                    const int32_t *token)
{
    /* Both halves of the parent's hash enter: one seeds the hash of the tokens, the
     * other the hash of that. */
    XXH128_hash_t h = XXH3_128bits_withSeed(token, (size_t)px->block_size * sizeof(*token),
                                            parent.lo ^ px->secret);
    XXH128_hash_t mixed = XXH3_128bits_withSeed(&h, sizeof(h), parent.hi);

    return (struct block_hash){mixed.low64 & px->hash_mask.lo, mixed.high64 & px->hash_mask.hi};
}

static bool same_hash(struct block_hash a, struct block_hash b)
{
    return a.lo == b.lo && a.hi == b.hi;
}

static int32_t *block_tokens(const struct prefix *px, int32_t block)
{
    return px->token + (int64_t)block * px->block_size;
}

static int32_t *bucket_of(const struct prefix *px, struct block_hash hash)
{
    return &px->bucket[(uint32_t)hash.lo & px->bucket_mask];
}

/* The block whose entry has this hash, whatever its parent; -1: none. */
static int32_t lookup(const struct prefix *px, struct block_hash hash)
{
    for (int32_t b = *bucket_of(px, hash); b >= 0; b = px->entry[b].next) {
        if (same_hash(px->entry[b].hash, hash)) {
            return b;
        }
    }
    return -1;
}

static bool proven(const struct prefix *px, int32_t b, const struct prefix_chain *chain,
                   const int32_t *token)
{
    const struct prefix_entry *x = &px->entry[b];

    return x->n_tail == 0 && x->parent_serial == chain->serial &&
           same_hash(x->parent_hash, chain->hash) &&
           memcmp(block_tokens(px, b), token, (size_t)px->block_size * sizeof(*token)) == 0;
}

void prefix_start(const struct prefix *px, struct prefix_chain *ret, const char *salt)
{
    *ret = (struct prefix_chain){.serial = SALT_MARK};
    if (!salt) {
        return;
    }
    size_t len = 0;
    while (len < LIMIT_PREFIX_SALT_BYTES && salt[len]) {
        len++;
    }
    XXH128_hash_t a = XXH3_128bits_withSeed(salt, len, px->secret);
    XXH128_hash_t b = XXH3_128bits_withSeed(salt, len, ~px->secret);
    ret->salt = (struct block_hash){a.low64, a.high64};
    ret->salt_serial = SALT_MARK | b.low64;
}

/* Mix the salt in: hash and serial of the chain become hashes of the last shared
 * block's and the salt's, so that from here on only chains of the same salt match. */
static void mix_salt(const struct prefix *px, struct prefix_chain *chain)
{
    if (chain->salt_serial == 0) {
        return;
    }
    const uint64_t mixed[] = {chain->hash.lo, chain->hash.hi, chain->serial,
                              chain->salt.lo, chain->salt.hi, chain->salt_serial};
    XXH128_hash_t a = XXH3_128bits_withSeed(mixed, sizeof(mixed), px->secret);
    XXH128_hash_t b = XXH3_128bits_withSeed(mixed, sizeof(mixed), ~px->secret);
    chain->hash = (struct block_hash){a.low64, a.high64};
    chain->serial = SALT_MARK | b.low64;
    chain->salt = (struct block_hash){0};
    chain->salt_serial = 0;
}

static void advance(struct prefix_chain *chain, struct block_hash hash, uint64_t serial)
{
    chain->hash = hash;
    chain->serial = serial;
    chain->n_blocks++;
}

/* The block that follows `chain` with these tokens, among those of its salt or, before
 * the salt is mixed in, the shared ones; -1: none. *ret_hash is its hash. */
static int32_t find_next(const struct prefix *px, struct prefix_chain *chain, const int32_t *token,
                         struct block_hash *ret_hash)
{
    if (chain->salt_serial != 0) {
        *ret_hash = hash_after(px, chain->hash, token);
        int32_t b = lookup(px, *ret_hash);
        if (b >= 0 && px->entry[b].shared && proven(px, b, chain, token)) {
            return b;
        }
        mix_salt(px, chain);
    }
    *ret_hash = hash_after(px, chain->hash, token);
    int32_t b = lookup(px, *ret_hash);
    return b >= 0 && proven(px, b, chain, token) ? b : -1;
}

int32_t prefix_find(const struct prefix *px, struct prefix_chain *chain, const int32_t *token)
{
    struct block_hash hash;
    int32_t b = find_next(px, chain, token, &hash);

    if (b >= 0) {
        advance(chain, hash, px->entry[b].serial);
    }
    return b;
}

/* Give the block, which contains the n tokens after `chain`, an entry. One with the
 * same hash has a parent that was dropped, is an older tail, or collides: the newer
 * block replaces it, being reachable. But a shared block keeps its entry, and the newer
 * one gets none: false. */
static bool enter(struct prefix *px, const struct prefix_chain *chain, struct block_hash hash,
                  int32_t block, const int32_t *token, int32_t n)
{
    int32_t known = lookup(px, hash);

    if (known >= 0 && px->entry[known].shared) {
        return false;
    }
    if (known >= 0) {
        prefix_drop(px, known);
    }
    prefix_drop(px, block);
    int32_t *bucket = bucket_of(px, hash);
    px->entry[block] = (struct prefix_entry){.hash = hash,
                                             .parent_hash = chain->hash,
                                             .serial = ++px->last_serial,
                                             .parent_serial = chain->serial,
                                             .next = *bucket,
                                             .n_tail = n < px->block_size ? n : 0};
    *bucket = block;
    memcpy(block_tokens(px, block), token, (size_t)n * sizeof(*token));
    kvpool_set_hashed(px->pool, block, true);
    return true;
}

int32_t prefix_publish(struct prefix *px, struct prefix_chain *chain, int32_t block,
                       const int32_t *token)
{
    struct block_hash hash;
    int32_t known = find_next(px, chain, token, &hash);

    if (known >= 0) {
        advance(chain, hash, px->entry[known].serial);
        return known;
    }
    if (!enter(px, chain, hash, block, token, px->block_size)) {
        advance(chain, hash, ++px->last_serial);
        return -1;
    }
    advance(chain, hash, px->entry[block].serial);
    return block;
}

void prefix_fetch(const struct prefix *px, const struct prefix_chain *chain, int32_t block,
                  const int32_t *token)
{
    __builtin_prefetch(&px->entry[block], 1);
    __builtin_prefetch(block_tokens(px, block), 1);
    if (chain->salt_serial == 0) {
        __builtin_prefetch(bucket_of(px, hash_after(px, chain->hash, token)), 1);
    }
}

/* ---- tails ---- */

int32_t prefix_least_tail(const struct prefix *px)
{
    enum { NAMING = 16 };

    return MIN(NAMING, MAX(px->block_size / 2, 1));
}

/* The hash of a tail by the tokens that name it; never that of a full block. */
static struct block_hash hash_of_tail(const struct prefix *px, struct block_hash parent,
                                      const int32_t *token)
{
    size_t n_bytes = (size_t)prefix_least_tail(px) * sizeof(*token);
    XXH128_hash_t h = XXH3_128bits_withSeed(token, n_bytes, parent.hi ^ px->secret);
    XXH128_hash_t mixed = XXH3_128bits_withSeed(&h, sizeof(h), ~parent.lo);

    return (struct block_hash){mixed.low64 & px->hash_mask.lo, mixed.high64 & px->hash_mask.hi};
}

int32_t prefix_find_tail(const struct prefix *px, const struct prefix_chain *chain,
                         const int32_t *token, int32_t n, int32_t *ret_n)
{
    struct prefix_chain at = *chain;

    if (n < prefix_least_tail(px)) {
        return -1;
    }
    mix_salt(px, &at);
    int32_t b = lookup(px, hash_of_tail(px, at.hash, token));
    const struct prefix_entry *x = b >= 0 ? &px->entry[b] : NULL;
    if (!x || x->n_tail == 0 || x->n_tail > n || x->parent_serial != at.serial ||
        !same_hash(x->parent_hash, at.hash) ||
        memcmp(block_tokens(px, b), token, (size_t)x->n_tail * sizeof(*token)) != 0) {
        return -1;
    }
    *ret_n = x->n_tail;
    return b;
}

bool prefix_publish_tail(struct prefix *px, const struct prefix_chain *chain, int32_t block,
                         const int32_t *token, int32_t n)
{
    struct prefix_chain at = *chain;

    assert(n >= prefix_least_tail(px) && n < px->block_size);
    mix_salt(px, &at);
    return enter(px, &at, hash_of_tail(px, at.hash, token), block, token, n);
}

void prefix_attach(struct prefix *px, int32_t entry, int32_t k, int32_t block)
{
    int32_t *peer = &px->peer[(int64_t)entry * px->n_peers + k - 1];

    if (*peer >= 0) {
        return;
    }
    assert(px->owner[block] < 0); /* hashes are unique, and so are entries */
    *peer = block;
    px->owner[block] = entry;
    kvpool_set_hashed(px->pool, block, true);
}

static void detach(struct prefix *px, int32_t *peer)
{
    int32_t block = *peer;

    if (block < 0) {
        return;
    }
    *peer = px->owner[block] = -1;
    kvpool_set_hashed(px->pool, block, false);
}

/* End the block's being a peer, or having some. */
static void drop_peers(struct prefix *px, int32_t block)
{
    int32_t owner = px->owner[block];

    for (int32_t i = 0; i < px->n_peers; i++) {
        detach(px, &px->peer[(int64_t)block * px->n_peers + i]);
        if (owner >= 0 && px->peer[(int64_t)owner * px->n_peers + i] == block) {
            detach(px, &px->peer[(int64_t)owner * px->n_peers + i]);
        }
    }
}

void prefix_share(struct prefix *px, int32_t block)
{
    assert(px->entry[block].serial != 0);
    px->entry[block].shared = true;
}

void prefix_drop(struct prefix *px, int32_t block)
{
    struct prefix_entry *x = &px->entry[block];

    if (px->n_peers > 0) {
        drop_peers(px, block);
    }
    if (x->serial == 0) {
        return;
    }
    int32_t *link = bucket_of(px, x->hash);
    while (*link != block) {
        link = &px->entry[*link].next;
    }
    *link = x->next;
    *x = (struct prefix_entry){.next = -1};
    kvpool_set_hashed(px->pool, block, false);
}

static bool in_bucket(const struct prefix *px, int32_t block)
{
    int32_t steps = 0;

    for (int32_t b = *bucket_of(px, px->entry[block].hash); b >= 0 && steps <= px->pool->n_blocks;
         steps++) {
        if (b == block) {
            return true;
        }
        b = px->entry[b].next;
    }
    return false;
}

static bool peers_agree(const struct prefix *px, int32_t block)
{
    bool has_entry = px->entry[block].serial != 0;
    int32_t owner = px->n_peers > 0 ? px->owner[block] : -1, n_links = 0;

    for (int32_t i = 0; i < px->n_peers; i++) {
        int32_t peer = px->peer[(int64_t)block * px->n_peers + i];
        if (peer >= 0 && (!has_entry || px->owner[peer] != block)) {
            return false;
        }
        n_links += owner >= 0 && px->peer[(int64_t)owner * px->n_peers + i] == block;
    }
    return owner < 0 || (!has_entry && n_links == 1);
}

const char *prefix_check(const struct prefix *px)
{
    for (int32_t b = 0; b < px->pool->n_blocks; b++) {
        const struct prefix_entry *x = &px->entry[b];
        bool is_peer = px->n_peers > 0 && px->owner[b] >= 0;
        if ((x->serial != 0 || is_peer) != px->pool->block[b].hashed) {
            return "X1: a block is hashed in the pool or in the cache, not in both";
        }
        if (!peers_agree(px, b)) {
            return "X4: a peer and its entry do not name each other";
        }
        if (x->serial == 0) {
            continue;
        }
        if (!in_bucket(px, b)) {
            return "X2: a hashed block is not in the bucket of its hash";
        }
        struct block_hash right = x->n_tail > 0
                                      ? hash_of_tail(px, x->parent_hash, block_tokens(px, b))
                                      : hash_after(px, x->parent_hash, block_tokens(px, b));
        if (!same_hash(x->hash, right)) {
            return "X3: a block's hash is not that of its parent and tokens";
        }
    }
    return NULL;
}
