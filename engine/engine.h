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

#include "config/base/buf.h"
#include "config/base/hist.h"
#include "config/settings/settings.h"
#include "engine/request.h"

struct engine;

/* API defaults, then the model's generation_config. */
void gen_params_init(struct gen_params *p, const struct engine *engine);
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

#endif
