/* A snapshot of the KV pool and of the requests, for observers: the
 * route /debug/kv sends it, the page at / draws it. */
#ifndef QUIRE_ENGINE_KV_SNAPSHOT_H
#define QUIRE_ENGINE_KV_SNAPSHOT_H

#include "config/base/base.h"

struct engine;

/* Bounds of a snapshot; items beyond them are counted, not listed. */
enum {
    KV_SNAPSHOT_GROUPS = 256,
    KV_SNAPSHOT_SEQS = 1024,
    KV_SNAPSHOT_ENTRIES = 1 << 16,
    KV_SNAPSHOT_EVENTS = 512
};
/* A block's state in kv_snapshot.block: KV_FREE, KV_CACHED, or the number of block
 * tables that hold it (KV_MANY: that many or more). */
enum { KV_FREE = 0, KV_MANY = 254, KV_CACHED = 255 };
enum kv_group_state { KV_RUNNING, KV_SWAPPED, KV_WAITING };
enum kv_event_kind { KV_COPY, KV_SWAP_OUT, KV_SWAP_IN };

/* A request that is running, swapped out or waiting. Holds nothing of its text, key or
 * id; `tag` lets its owner recognise it. */
struct kv_group {
    uint64_t order;                /* arrival number */
    uint32_t tag;                  /* FNV-1a, 32 bits, of the request's id */
    int32_t state;                 /* enum kv_group_state */
    int32_t priority, preemptions; /* the request's priority; times it was preempted */
    int32_t width, n_live;         /* sequences that it may hold, that are live */
    bool beam;                     /* beam search */
    int32_t n_prompt, max_tokens, cached_tokens; /* cached: prompt tokens from the prefix cache */
    int64_t arrival_us;                          /* clock_us */
    int32_t first_seq, n_seqs; /* its range of kv_snapshot.seq; a waiting group has none */
};

struct kv_seq {
    int32_t group, index; /* index in kv_snapshot.group; choice of the request */
    /* tokens, including the one in flight; tokens with computed keys and values */
    int32_t n_tokens, n_computed;
    int32_t n_blocks; /* blocks that its tables hold, of all KV groups one after the other */
    /* its range of kv_snapshot.entry; fewer than n_blocks once the snapshot is full */
    int32_t first_entry, n_entries;
};

/* An event since the previous snapshot: a block was copied on write, or moved between
 * device and host. */
struct kv_event {
    int32_t kind;     /* enum kv_event_kind */
    int32_t from, to; /* block ids */
};

/* Taken between two steps, so its members are consistent: a block's count is the number
 * of tables that hold it (plus one if it belongs to a pinned prefix). */
struct kv_snapshot {
    int64_t taken_us, cost_us; /* clock_us; time that the engine's thread spent on it */
    uint64_t step;             /* steps launched so far */
    int32_t block_size, n_blocks, n_host_blocks;   /* tokens a block; sizes of both pools */
    int32_t n_used, n_cached, n_host_used;         /* blocks */
    int32_t n_running, n_swapped, n_waiting;       /* all groups, listed or not */
    int32_t n_groups, n_seqs, n_entries, n_events; /* entries of the arrays below */
    int64_t events_lost;                           /* events that did not fit */
    uint8_t *block;                                /* [n_blocks] KV_FREE … */
    uint8_t *host;                                 /* the same for the swap space */
    struct kv_group *group; /* [n_groups] running, then swapped (oldest first), then waiting */
    struct kv_seq *seq;     /* [n_seqs] live sequences */
    /* [n_entries] block tables: device blocks, or host blocks of a swapped group */
    int32_t *entry;
    struct kv_event event[KV_SNAPSHOT_EVENTS]; /* [n_events] oldest first */
};
/* An empty snapshot, sized for this engine's pools. */
int kv_snapshot_new(struct kv_snapshot **ret, const struct engine *e, struct err *err);
void kv_snapshot_free(struct kv_snapshot *p);
/* Has the engine's thread fill `p` at its next turn. That thread never waits for the
 * caller, and records no events while there are no observers. Any thread but the
 * sink's, and not once engine_free has begun. ERR_TIMEOUT: a step took longer than
 * timeout_us. */
int engine_kv_snapshot(struct engine *e, struct kv_snapshot *p, int64_t timeout_us,
                       struct err *err);

#endif
