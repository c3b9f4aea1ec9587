/* The engine as its callers see it: the server, `quire bench`, tests. Everything else
 * in engine/ is its own affair.
 *
 * Life of a request: the caller fills a `struct request` (request_new), submits it, and
 * receives `struct output`s through the engine's sink until one says `last`. The
 * request is reference-counted: the caller holds one reference from request_new, the
 * engine another from submit until `last` was emitted.
 */
#ifndef QUIRE_ENGINE_ENGINE_H
#define QUIRE_ENGINE_ENGINE_H

#include <stdatomic.h>

#include "config/buf.h"
#include "config/hist.h"
#include "config/settings.h"

struct engine;
struct stop_set;
struct word_list;

/* What is asked for: the fields of API.md that shape generation, validated, defaults
 * filled in. */
struct gen_params {
    int32_t max_tokens;     /* >= 1; 0 only with echo */
    bool max_tokens_yields; /* a default: it yields to what the KV pool holds */
    int32_t min_tokens;
    int32_t n;          /* choices returned */
    int32_t best_of;    /* >= n; sequences sampled */
    int32_t beam_width; /* 0: no beam search */
    float length_penalty;
    int8_t early_stopping; /* 0 false, 1 true, 2 "never" */
    float temperature;     /* 0: greedy */
    float top_p, min_p;
    int32_t top_k; /* 0: off */
    float presence_penalty, frequency_penalty, repetition_penalty;
    uint64_t seed;
    int32_t n_logprobs;        /* -1: none */
    int32_t n_prompt_logprobs; /* -1: none */
    bool echo, ignore_eos, include_stop_str, skip_special, spaces_between_special, stream;
    int32_t priority;

    /* Owned; see gen_params_release. */
    char **stop;       /* [n_stop], UTF-8, none empty */
    int32_t *stop_len; /* [n_stop] their bytes; NULL: each ends at its NUL */
    int32_t n_stop;
    int32_t *stop_token; /* [n_stop_token] */
    int32_t n_stop_token;
    struct gen_bias {
        int32_t token;
        float bias;
    } *bias; /* [n_bias] */
    int32_t n_bias;
    int32_t *allowed_token; /* [n_allowed] */
    int32_t n_allowed;
    char **bad_word;       /* [n_bad_words], UTF-8; encoded at submit */
    int32_t *bad_word_len; /* [n_bad_words] as stop_len */
    int32_t n_bad_words;
    char *cache_salt; /* or NULL */
};
/* Parameters that requests share, as the prompts of one HTTP request do, with what is
 * made of them once for all. Immutable but for the words, which the first engine_submit
 * encodes; so requests that share one are submitted by one thread.
 * Reference-counted. */
struct shared_params {
    atomic_int refs;
    struct gen_params params; /* owned */
    struct stop_set *stops;   /* compiled stop strings; NULL: none */
    struct word_list *words;  /* encoded bad words; NULL: none, or not yet */
    bool checked;             /* an engine has found their token ids inside its vocabulary */
};
/* Takes over `params` (zeroed in the caller's hands). ERR_INVALID names a stop string
 * that cannot be one; ERR_NOMEM. */
int shared_params_new(struct shared_params **ret, struct gen_params *params, struct err *e);
void shared_params_unref(struct shared_params *p);

/* API defaults, then the model's generation_config. */
void gen_params_init(struct gen_params *p, const struct engine *engine);
void gen_params_release(struct gen_params *p);

/* Immutable once submitted, but for the marks at its end. */
struct request {
    char id[136];             /* "cmpl-…": for logs */
    struct gen_params params; /* its lists belong to `shared` */
    /* holds a reference; NULL in a request that was not made by request_new */
    struct shared_params *shared;
    const struct stop_set *stops; /* of `shared`; NULL: no stop strings */
    uint64_t seed;                /* of its samples: params.seed unless it was given its own */
    int32_t *prompt;              /* [n_prompt] owned */
    int32_t n_prompt;
    int32_t index;      /* of the prompt in its HTTP request */
    int32_t tenant;     /* whom it counts for, < LIMIT_TENANTS; used with policy: fair */
    float weight;       /* the tenant's share; 0: 1 */
    int64_t arrival_us; /* clock_us when it was accepted */
    void *user;         /* the caller's: handed back with every output */

    struct emission *emission;     /* the output side's own, from submit to `last` */
    struct prompt_out *prompt_out; /* its prompt, where that goes out; see prompt_walk */

    atomic_int refs;
    atomic_bool cancelled; /* set by engine_cancel: the client is gone */
    atomic_int parked;     /* enum request_parking, set by engine_park */
    /* Stop marks, set by the output side: choice i ended textually after stop_at[i]
     * generated tokens; INT32_MAX: not. */
    _Atomic int32_t *stop_at; /* [max(best_of, beam_width)] */
    /* How it fared, written by the engine before it emits `last`: for logs. Times are 0
     * where it did not come so far. */
    struct request_course {
        int64_t queue_us;   /* from arrival to its first turn */
        int64_t prefill_us; /* from there to its first token */
        int64_t decode_us;  /* from its first token to its last */
        int32_t preemptions;
        /* Tokens drawn, whatever became of them: of all samples, best_of's too, up to
         * where each ended; of a beam search those of every live beam and hypothesis in
         * every step. None twice for a recompute. */
        int64_t n_drawn;
    } course;
};
/* Takes over `params` (zeroed in the caller's hands) and copies the prompt. */
int request_new(struct request **ret, struct gen_params *params, const int32_t *prompt,
                int32_t n_prompt, struct err *e);
/* The same over parameters that it shares with others: takes a reference. */
int request_new_shared(struct request **ret, struct shared_params *params, const int32_t *prompt,
                       int32_t n_prompt, struct err *e);
struct request *request_ref(struct request *r);
void request_unref(struct request *r);

/* How far a request waits while the reader of its outputs is behind. */
enum request_parking {
    PARK_NONE,
    PARK_ENDED,   /* what is left to report of a beam search that is over */
    PARK_RUNNING, /* no step is planned with it either */
};

/* FINISH_ERROR: the server failed. FINISH_IMPOSSIBLE: what the request bans leaves a
 * choice no next token; other choices go on. */
enum finish_reason {
    FINISH_NONE,
    FINISH_STOP,
    FINISH_LENGTH,
    FINISH_ABORT,
    FINISH_ERROR,
    FINISH_IMPOSSIBLE
};
/* "stop", …, "error" for the last two; or NULL */
const char *finish_reason_name(enum finish_reason f);

/* One token as a client may see it. */
struct token_out {
    int32_t id;
    int32_t text_offset; /* in characters (code points) of the choice's text, echo included */
    float logprob;       /* NaN for the first prompt token */
    int32_t n_top;
    const int32_t *top_id;    /* [n_top] best first */
    const float *top_logprob; /* [n_top] */
};

struct usage {
    int32_t prompt_tokens, completion_tokens, cached_tokens;
};

/* The memory behind a long piece, each from malloc. A sink that sets `taken` owns all
 * four then and frees them with free(); it need not copy them. */
struct output_memory {
    void *text, *token, *top_id, *top_logprob;
    bool taken;
};

/* A piece of one choice. Text is whole UTF-8 characters, never part of a stop string
 * that may yet match. */
struct output {
    struct request *request;
    int32_t choice;   /* 0 .. n-1; -1: concerns the request only (`last`, `error`) */
    const char *text; /* [text_len] not NUL-terminated; may be empty */
    size_t text_len;
    /* [n_tokens] the tokens behind the text: always the ids; logprobs where asked
     * for */
    const struct token_out *token;
    int32_t n_tokens;
    struct output_memory *memory; /* of a choice's last piece; NULL: copy what is to be kept */
    bool
        /* the prompt's n_tokens (echo or prompt_logprobs), before any other piece of
         * the choice: `text` and `token` are not given, a prompt_walk reads them */
        prompt;
    enum finish_reason finish; /* of this choice, with its last piece */
    const char *stop_string;   /* [stop_string_len] what matched, or NULL */
    int32_t stop_string_len;   /* its bytes */
    int32_t stop_token;        /* the stop id that matched, or -1 (end of sequence too) */
    struct usage usage;        /* of the request so far; complete with `last` */
    /* A sentence for the client, with FINISH_ERROR, FINISH_ABORT and, a static string,
     * with FINISH_IMPOSSIBLE. */
    const char *error;
    bool last; /* nothing more comes for this request */
};

/* Where outputs go. Called by one of the engine's threads at a time; must not block.
 * Pointers hold during the call. */
struct sink {
    void (*emit)(struct sink *s, const struct output *o);
    /* After the outputs of one step: wake those who wait, once. */
    void (*flush)(struct sink *s);
    /* (optional) The engine died (engine_health, engine_death), and every request's
     * last output is on its way. The engine's thread. */
    void (*died)(struct sink *s);
};

/* Start: read the model, size the pool, start the threads. Blocks until ready or
 * failed. `sink` must outlive the engine. */
int engine_open(struct engine **ret, const struct settings *s, struct sink *sink, struct err *e);
/* Stop at once: every request ends with FINISH_ABORT; threads are joined. */
void engine_free(struct engine *e);

/* A request is being read and will be submitted in some tens of microseconds: an engine
 * that sleeps gets up meanwhile. Any thread. */
void engine_expect(struct engine *e);
/* Hand over a request: 0, ERR_FULL (queue), ERR_DRAINING, ERR_INVALID (can never fit:
 * says the numbers), ERR_DEVICE. Any thread. */
int engine_submit(struct engine *e, struct request *r, struct err *err);
/* Whether n more requests of the tenant would be taken now: 0, or what
 * engine_submit_all would say of their number: ERR_FULL, ERR_INVALID (more than the
 * queue ever holds), ERR_DRAINING, ERR_DEVICE. To ask before work is done for them. */
int engine_check_room(const struct engine *e, int32_t tenant, int32_t n, struct err *err);
/* All or none of a set (the prompts of one HTTP request, of one tenant): either every
 * one is queued or none. */
int engine_submit_all(struct engine *e, struct request **r, int32_t n, struct err *err);
/* The client is gone: freed within a step. Any thread; outputs may still come until
 * `last`. */
void engine_cancel(struct engine *e, struct request *r);
/* Let it wait, or go on again. Any thread. */
void engine_park(struct engine *e, struct request *r, enum request_parking how);
/* No new requests; running ones go on. */
void engine_drain(struct engine *e);
/* Requests accepted and not ended. */
int64_t engine_active(const struct engine *e);

enum engine_health { HEALTH_STARTING, HEALTH_READY, HEALTH_DRAINING, HEALTH_STALLED, HEALTH_DEAD };
enum engine_health engine_health(const struct engine *e); /* never blocks */
const char *engine_health_name(enum engine_health h);
/* The sentence behind HEALTH_DEAD, or "". */
const char *engine_death(const struct engine *e);
/* Rises while steps progress or the engine is idle and alive: feeds the watchdog. */
uint64_t engine_heartbeat(const struct engine *e);

struct engine_info {
    const char *model_name; /* served */
    const char *model_path;
    const char *fingerprint; /* system_fingerprint */
    const char *device;      /* "cpu: …", "cuda: NVIDIA H200" */
    const char *dtype;
    int64_t created;              /* unix seconds */
    int32_t max_model_len, vocab; /* vocab: width of the logits */
    int32_t block_size, n_blocks, n_host_blocks;
    int32_t n_ranks; /* processes that share the model */
    int32_t max_num_seqs, max_num_batched_tokens;
};
void engine_info(const struct engine *e, struct engine_info *ret);
/* Whether rank [0, n_ranks) is there. Any thread. */
bool engine_rank_up(const struct engine *e, int32_t rank);

/* Reads a prompt that goes out, token by token; all choices share what it reads. From
 * the first output with `prompt` set on, as long as the request is there; any
 * thread. */
struct prompt_walk;
int prompt_walk_new(struct prompt_walk **ret, const struct request *r, struct err *e);
void prompt_walk_free(struct prompt_walk *w);
/* The next token; with echo its text is appended to `text`. 0, ERR_NOT_FOUND behind the
 * last one, ERR_NOMEM. */
int prompt_walk_next(struct prompt_walk *w, struct token_out *ret, struct buf *text);

/* Tokenizer, for encode (stage 3) and the /tokenize routes. Any thread. `ret_ids` is
 * malloc'd. */
int engine_encode(const struct engine *e, const char *text, size_t len, bool add_special,
                  int32_t max_tokens, int32_t **ret_ids, int32_t *ret_n, struct err *err);
int engine_decode(const struct engine *e, const int32_t *ids, int32_t n, bool skip_special,
                  struct buf *out, struct err *err);
/* The bytes of one token, for token strings; may be part of a character. */
const char *engine_token_bytes(const struct engine *e, int32_t id, size_t *ret_len);

/* The model's chat template. */
struct engine_chat {
    const char *missing;  /* why there is no chat, a sentence for clients; NULL: there is */
    bool wants_parts;     /* a message's content is to be a list of parts */
    bool knows_developer; /* the role of that name */
};
void engine_chat(const struct engine *e, struct engine_chat *ret);
/* Append the prompt that messages make. `context`: a JSON object of messages,
 * add_generation_prompt and other variables of the template. Any thread. ERR_INVALID:
 * the template refuses them; ERR_UNSUPPORTED: there is no chat. */
int engine_render_chat(const struct engine *e, const char *context, size_t len, struct buf *out,
                       struct err *err);

/* Fill-in-the-middle: a prompt with a gap is `prefix`, what stands before it, `suffix`,
 * what stands behind, `middle`. */
struct engine_fim {
    bool there; /* the model's vocabulary has these tokens */
    int32_t prefix, suffix, middle;
    int32_t end; /* ends the gap's text where that is not the end of sequence; -1: none */
    int32_t bos; /* -1: none */
};
void engine_fim(const struct engine *e, struct engine_fim *ret);

/* Counters and gauges, written by the engine and output threads, read by /metrics
 * without locks. */
struct engine_stats {
    _Atomic int64_t running, waiting, swapped; /* sequences running; requests waiting, swapped */
    _Atomic int64_t blocks_used, blocks_cached, host_blocks_used;
    _Atomic uint64_t prompt_tokens, generation_tokens, preempt_swap, preempt_recompute;
    _Atomic uint64_t prefix_queries, prefix_hits; /* tokens */
    _Atomic uint64_t finished[5]; /* by enum finish_reason; FINISH_IMPOSSIBLE as FINISH_ERROR */
    _Atomic uint64_t steps;
    struct hist ttft_s, itl_s, tpot_s, e2e_s, queue_s, prefill_s, decode_s;
    struct hist prompt_len, generation_len, params_n, iteration_tokens, step_host_s, step_device_s;
};
const struct engine_stats *engine_stats(const struct engine *e);

/* ---- a picture of the KV pool and the requests, for those who watch ---- */

/* Bounds of a picture: of what is beyond, only the number is told. */
enum {
    KV_PICTURE_GROUPS = 256,
    KV_PICTURE_SEQS = 1024,
    KV_PICTURE_ENTRIES = 1 << 16,
    KV_PICTURE_EVENTS = 512
};
/* kv_picture.block: free, cached, or else how many tables hold it (KV_MANY: that many
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
    int32_t first_seq, n_seqs; /* of kv_picture.seq; a waiting group has none */
};

struct kv_seq {
    int32_t group, index; /* of kv_picture.group; choice */
    /* tokens, the one in flight included; those whose keys and values are computed */
    int32_t n_tokens, n_computed;
    int32_t n_blocks; /* of its block table */
    /* of kv_picture.entry; fewer than n_blocks once the picture is full */
    int32_t first_entry, n_entries;
};

/* Since the picture before: a block copied on write, or moved between device and
 * host. */
struct kv_event {
    int32_t kind; /* enum kv_event_kind */
    int32_t from, to;
};

/* Taken between two steps, so all parts agree: a block's count is the number of tables
 * that hold it (a prefix that the settings pin holds one more). */
struct kv_picture {
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
    struct kv_event event[KV_PICTURE_EVENTS];
};
/* A picture with room for this engine's pools, empty. */
int kv_picture_new(struct kv_picture **ret, const struct engine *e, struct err *err);
void kv_picture_free(struct kv_picture *p);
/* Have the engine's thread fill `p` at its next turn; it never waits for the caller,
 * and nothing is recorded while nobody asks. Any thread but the sink's, and not after
 * engine_free began. ERR_TIMEOUT: a step took longer than timeout_us. */
int engine_kv_snapshot(struct engine *e, struct kv_picture *p, int64_t timeout_us, struct err *err);

/* `quire rank`, a process that ranks.c starts: arguments behind the name; the exit
 * status. */
int rank_main(int argc, char **argv);
/* `quire serve` where node_rank > 0: the ranks of this node, until rank 0 stops (0) or
 * one fails (ERR_DEVICE; without a text where that rank has logged why). */
int node_run(const struct settings *s, struct err *e);
/* `quire bench kernels`: arguments behind the word kernels; the exit status. */
int kernels_main(int argc, char **argv);
/* `quire simulate`: arguments behind the subcommand's name; the exit status. */
int simulate_main(int argc, char **argv);

#endif
