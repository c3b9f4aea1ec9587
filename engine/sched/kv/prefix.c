#include "engine/sched/kv/prefix.h"

#include <assert.h>
#include <string.h>

#include <xxhash.h>

#include "config/base/limits.h"

#define SALT_MARK (UINT64_C(1) << 63)

static struct prefix_name name_after(const struct prefix *px, struct prefix_name parent,
                                     const int32_t *token)
{
    /* The parent seeds the hash; both halves enter, one as the seed and one folded into
     * the result's seed. */
    XXH128_hash_t h = XXH3_128bits_withSeed(token, (size_t)px->block_size * sizeof(*token),
                                            parent.lo ^ px->secret);
    XXH128_hash_t mixed = XXH3_128bits_withSeed(&h, sizeof(h), parent.hi);

    return (struct prefix_name){mixed.low64 & px->name_mask.lo, mixed.high64 & px->name_mask.hi};
}

static bool same_name(struct prefix_name a, struct prefix_name b)
{
    return a.lo == b.lo && a.hi == b.hi;
}

static int32_t *block_tokens(const struct prefix *px, int32_t block)
{
    return px->token + (int64_t)block * px->block_size;
}

static int32_t *bucket_of(const struct prefix *px, struct prefix_name name)
{
    return &px->bucket[(uint32_t)name.lo & px->bucket_mask];
}

/* The entry of `name`, whatever it stands on; -1: none. */
static int32_t lookup(const struct prefix *px, struct prefix_name name)
{
    for (int32_t b = *bucket_of(px, name); b >= 0; b = px->entry[b].next) {
        if (same_name(px->entry[b].name, name)) {
            return b;
        }
    }
    return -1;
}

static bool proven(const struct prefix *px, int32_t b, const struct prefix_chain *chain,
                   const int32_t *token)
{
    const struct prefix_entry *x = &px->entry[b];

    return x->parent_serial == chain->serial && same_name(x->parent_name, chain->name) &&
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
    ret->salt = (struct prefix_name){a.low64, a.high64};
    ret->salt_serial = SALT_MARK | b.low64;
}

/* From here on the chain is its salt's own: name and serial are hashes of those of the
 * last shared block and the salt. */
static void enter_salt(const struct prefix *px, struct prefix_chain *chain)
{
    if (chain->salt_serial == 0) {
        return;
    }
    const uint64_t mixed[] = {chain->name.lo, chain->name.hi, chain->serial,
                              chain->salt.lo, chain->salt.hi, chain->salt_serial};
    XXH128_hash_t a = XXH3_128bits_withSeed(mixed, sizeof(mixed), px->secret);
    XXH128_hash_t b = XXH3_128bits_withSeed(mixed, sizeof(mixed), ~px->secret);
    chain->name = (struct prefix_name){a.low64, a.high64};
    chain->serial = SALT_MARK | b.low64;
    chain->salt = (struct prefix_name){0};
    chain->salt_serial = 0;
}

static void advance(struct prefix_chain *chain, struct prefix_name name, uint64_t serial)
{
    chain->name = name;
    chain->serial = serial;
    chain->n_blocks++;
}

/* The entry that follows `chain` with these tokens, among those of its salt or, before
 * the salt has entered, the shared ones; *ret_name is its name. -1: none. */
static int32_t find_next(const struct prefix *px, struct prefix_chain *chain, const int32_t *token,
                         struct prefix_name *ret_name)
{
    if (chain->salt_serial != 0) {
        *ret_name = name_after(px, chain->name, token);
        int32_t b = lookup(px, *ret_name);
        if (b >= 0 && px->entry[b].shared && proven(px, b, chain, token)) {
            return b;
        }
        enter_salt(px, chain);
    }
    *ret_name = name_after(px, chain->name, token);
    int32_t b = lookup(px, *ret_name);
    return b >= 0 && proven(px, b, chain, token) ? b : -1;
}

int32_t prefix_find(const struct prefix *px, struct prefix_chain *chain, const int32_t *token)
{
    struct prefix_name name;
    int32_t b = find_next(px, chain, token, &name);

    if (b >= 0) {
        advance(chain, name, px->entry[b].serial);
    }
    return b;
}

void prefix_publish(struct prefix *px, struct prefix_chain *chain, int32_t block,
                    const int32_t *token)
{
    struct prefix_name name;
    int32_t known = find_next(px, chain, token, &name);

    if (known >= 0) {
        advance(chain, name, px->entry[known].serial);
        return;
    }
    /* What stands under this name hangs on a parent that is gone (or collides): the
     * newer one is reachable. But what is shared keeps its name, and the newer one
     * stays without. */
    known = lookup(px, name);
    if (known >= 0 && px->entry[known].shared) {
        advance(chain, name, ++px->last_serial);
        return;
    }
    if (known >= 0) {
        prefix_drop(px, known);
    }
    prefix_drop(px, block);
    struct prefix_entry *x = &px->entry[block];
    int32_t *bucket = bucket_of(px, name);
    *x = (struct prefix_entry){.name = name,
                               .parent_name = chain->name,
                               .serial = ++px->last_serial,
                               .parent_serial = chain->serial,
                               .next = *bucket};
    *bucket = block;
    memcpy(block_tokens(px, block), token, (size_t)px->block_size * sizeof(*token));
    kvpool_name(px->pool, block, true);
    advance(chain, name, x->serial);
}

void prefix_share(struct prefix *px, int32_t block)
{
    assert(px->entry[block].serial != 0);
    px->entry[block].shared = true;
}

void prefix_drop(struct prefix *px, int32_t block)
{
    struct prefix_entry *x = &px->entry[block];

    if (x->serial == 0) {
        return;
    }
    int32_t *link = bucket_of(px, x->name);
    while (*link != block) {
        link = &px->entry[*link].next;
    }
    *link = x->next;
    *x = (struct prefix_entry){.next = -1};
    kvpool_name(px->pool, block, false);
}

static bool in_bucket(const struct prefix *px, int32_t block)
{
    int32_t steps = 0;

    for (int32_t b = *bucket_of(px, px->entry[block].name); b >= 0 && steps <= px->pool->n_blocks;
         steps++) {
        if (b == block) {
            return true;
        }
        b = px->entry[b].next;
    }
    return false;
}

const char *prefix_check(const struct prefix *px)
{
    for (int32_t b = 0; b < px->pool->n_blocks; b++) {
        const struct prefix_entry *x = &px->entry[b];
        if ((x->serial != 0) != px->pool->block[b].named) {
            return "X1: a block is named in the pool or in the cache, not in both";
        }
        if (x->serial == 0) {
            continue;
        }
        if (!in_bucket(px, b)) {
            return "X2: a named block is not in the bucket of its name";
        }
        if (!same_name(x->name, name_after(px, x->parent_name, block_tokens(px, b)))) {
            return "X3: a name is not the hash of its parent and tokens";
        }
    }
    return NULL;
}
