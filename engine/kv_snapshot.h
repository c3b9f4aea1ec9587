/* A snapshot of the KV pool and of the requests, for those who watch it: /watch and the
 * page draw it.
 */
#ifndef QUIRE_ENGINE_KV_SNAPSHOT_H
#define QUIRE_ENGINE_KV_SNAPSHOT_H

#include "config/base/base.h"

struct engine;

/* Bounds of a snapshot: of what is beyond, only the number is told. */
enum {
    KV_SNAPSHOT_GROUPS = 256,
    KV_SNAPSHOT_SEQS = 1024,
    KV_SNAPSHOT_ENTRIES = 1 << 16,
    KV_SNAPSHOT_EVENTS = 512
};
/* kv_snapshot.block: free, cached, or else how many tables hold it (KV_MANY: that many
 * or more). */
enum { KV_FREE = 0, KV_MANY = 254, KV_CACHED = 255 };
enum kv_group_state { KV_RUNNING, KV_SWAPPED, KV_WAITING };
enum kv_event_kind { KV_COPY, KV_SWAP_OUT, KV_SWAP_IN };

/* A request that runs, is swapped out or waits. Says nothing of its text, key or id;
 * `tag` lets its owner find it. */
struct kv_group {
    uint64_t order; /* arrival number */
    uint32_t tag;   /* FNV-1a, 32 bits, of the request's id */
    int32_t state;  /* enum kv_group_state */
    int32_t priority, preemptions;
    int32_t width, n_live; /* sequences it may hold, that go on */
    bool beam;
    int32_t n_prompt, max_tokens, cached_tokens;
    int64_t arrival_us;        /* clock_us */
    int32_t first_seq, n_seqs; /* of kv_snapshot.seq; a waiting group has none */
};

struct kv_seq {
    int32_t group, index; /* of kv_snapshot.group; choice */
    /* tokens, the one in flight included; those whose keys and values are computed */
    int32_t n_tokens, n_computed;
    int32_t n_blocks; /* of its block table */
    /* of kv_snapshot.entry; fewer than n_blocks once the snapshot is full */
    int32_t first_entry, n_entries;
};

/* Since the snapshot before: a block copied on write, or moved between device and
 * host. */
struct kv_event {
    int32_t kind; /* enum kv_event_kind */
    int32_t from, to;
};

/* Taken between two steps, so all parts agree: a block's count is the number of tables
 * that hold it (a prefix that the settings pin holds one more). */
struct kv_snapshot {
    int64_t taken_us, cost_us; /* clock_us; the engine's time for it */
    uint64_t step;             /* steps launched */
    int32_t block_size, n_blocks, n_host_blocks;
    int32_t n_used, n_cached, n_host_used;
    int32_t n_running, n_swapped, n_waiting; /* groups in all */
    int32_t n_groups, n_seqs, n_entries, n_events;
    int64_t events_lost;    /* that found no room */
    uint8_t *block;         /* [n_blocks] KV_FREE … */
    uint8_t *host;          /* [n_host_blocks] the same of the swap space */
    struct kv_group *group; /* [n_groups] running, then swapped, oldest first; then waiting ones */
    struct kv_seq *seq;     /* [n_seqs] live ones */
    int32_t *entry; /* [n_entries] block tables: device blocks, host blocks of a swapped group */
    struct kv_event event[KV_SNAPSHOT_EVENTS];
};
/* A snapshot with room for this engine's pools, empty. */
int kv_snapshot_new(struct kv_snapshot **ret, const struct engine *e, struct err *err);
void kv_snapshot_free(struct kv_snapshot *p);
/* Have the engine's thread fill `p` at its next turn; it never waits for the caller,
 * and nothing is recorded while nobody asks. Any thread but the sink's, and not after
 * engine_free began. ERR_TIMEOUT: a step took longer than timeout_us. */
int engine_kv_snapshot(struct engine *e, struct kv_snapshot *p, int64_t timeout_us,
                       struct err *err);

#endif
