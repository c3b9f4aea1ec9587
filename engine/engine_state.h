/* The engine's internal state, shared by engine.c (start, stop, state), loop.c (its
 * thread), submit.c, request.c, pinned_prefixes.c and kv_snapshot.c. The members are
 * grouped by the thread that may touch them. */
#ifndef QUIRE_ENGINE_ENGINE_STATE_H
#define QUIRE_ENGINE_ENGINE_STATE_H

#include <pthread.h>

#include "engine/engine.h"
#include "engine/grammars.h"
#include "engine/kv_snapshot_feed.h"
#include "engine/loop/inbox.h"
#include "engine/loop/launch_delay.h"
#include "engine/loop/masks.h"
#include "engine/output/output.h"
#include "engine/output/reaper.h"
#include "engine/sched/decode/decode.h"
#include "engine/sched/decode/forced.h"
#include "engine/sched/decode/pack.h"
#include "engine/speculate/draft_model.h"
#include "engine/speculate/mixed.h"
#include "engine/speculate/replay.h"
#include "engine/speculate/script.h"
#include "engine/speculate/text/suffix.h"
#include "engine/workers/executor.h"
#include "models/model.h"

enum {
    ENGINE_MAX_DEPTH = 7,
    /* Deferred deltas (final reports) that go out at once; more than a group has
     * choices. */
    ENGINE_PORTION = 512,
    /* For drafts: memory of the indices of running sequences at most, tokens of recent
     * answers, and contexts whose followers are counted. */
    DRAFT_BYTES = 256 << 20,
    DRAFT_STORE_TOKENS = 1 << 20,
    DRAFT_FOLLOWER_SETS = 1 << 18,
};

struct engine {
    /* Set at start, constant afterwards. */
    struct tokenizer *tokenizer;
    struct chat_template *chat;            /* NULL: none (null model, tests) */
    const struct chat_format *chat_format; /* of tool calls and reasoning; static */
    struct engine_chat chat_abilities;     /* found by engine_chat_open */
    bool skips_vision;                     /* as in struct engine_chat */
    struct executor *executor;
    struct executor *draft_executor;  /* the draft model; NULL: none */
    char *draft_path;                 /* of its files */
    struct model_config draft_config; /* its configuration */
    struct step_cost draft_cost;      /* of its steps; all 0: unknown */
    struct grammars *grammars;        /* NULL: the executor takes no masks */
    struct sched_config config;
    struct generation_defaults defaults;
    char *model_name, *model_path;
    char fingerprint[32];
    int64_t created; /* unix seconds */
    int64_t step_timeout_us;
    int64_t max_queue;
    int32_t max_draft; /* 0: no speculation */
    int speculate;     /* enum speculate */

    /* The engine's thread. */
    struct sched *sched;
    struct suffix_drafts *drafts;     /* NULL: none of these */
    struct draft_model *model_drafts; /* NULL: none of these */
    struct mixed_drafts mixed;        /* of both, if there are */
    struct forced_drafts forced;      /* in front of them */
    struct replay *replay;            /* instead, in benchmarks; else NULL */
    struct script *script;            /* in benchmarks; else NULL */
    bool draft_died;                  /* the draft model's device failed, which was logged */
    struct packer *packer;
    struct masks *masks; /* NULL: the executor takes none */
    /* used in rotation: plan i belongs to steps i, i + depth + 1, … */
    struct plan plan[ENGINE_MAX_DEPTH + 1];
    uint64_t n_launched, n_committed; /* steps */
    struct launch_delay launch_delay;
    struct delta_out deltas;
    int64_t step_cells;   /* cells of the output ring that a step fills at most */
    int32_t portion_left; /* deferred deltas that the current portion may still send */
    /* where the portion's last deltas begin in the ring: once the output side reaches
     * them, the next portion may go */
    uint64_t portion_mark;
    int64_t known_waiting; /* groups in the scheduler that the inbox still counts as waiting */
    int64_t host_us;       /* this thread's own time since the last commit */
    /* When the last step ended, clock_us; 0: there was nothing to do since. And from
     * when on the device waited for the step that was not planned ahead; 0: not for
     * this thread. */
    int64_t step_end_us, gap_from_us;
    pthread_t thread;
    bool thread_started;

    /* Shared by several threads. */
    struct inbox inbox;
    struct kv_feed kv_feed;
    struct output_stage *output;
    struct reaper reaper;
    struct sink *sink;
    struct engine_stats stats;
    _Atomic int64_t active;                       /* requests accepted and not ended */
    _Atomic int64_t tenant_active[LIMIT_TENANTS]; /* the same, by tenant */
    /* enum engine_health without STALLED, which engine_health derives from
     * busy_since */
    atomic_int state;
    _Atomic int64_t busy_since; /* clock_us when the current turn began; 0: asleep */
    _Atomic uint64_t heartbeat;
    atomic_bool stopping;
    char death[512]; /* written before `state` becomes DEAD */
};

/* engine_open with an executor and a tokenizer made by the caller (tests, benchmarks).
 * The engine owns both from then on, also if this fails. */
int engine_open_on(struct engine **ret, const struct settings *s, struct executor *x,
                   struct tokenizer *t, struct sink *sink, struct err *err);

/* chat.c: choose the format, by `name` if that is not NULL, and find what the chat
 * template can render. ERR_INVALID: there is no format of that name. */
int engine_chat_open(struct engine *e, const char *name, struct err *err);

/* loop.c: the thread's body; `arg` is the engine. */
void *engine_main(void *arg);

#endif
