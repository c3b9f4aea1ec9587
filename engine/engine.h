/* The engine's public interface: for the server, `quire bench` and tests.
 *
 * Life of a request: the caller fills a `struct request` (request_new), submits it, and
 * receives `struct output`s through the engine's sink until one has `last` set. The
 * request is reference-counted: the caller holds one reference from request_new, the
 * engine another from submit until `last` was emitted. */
#ifndef QUIRE_ENGINE_ENGINE_H
#define QUIRE_ENGINE_ENGINE_H

#include "config/base/buf.h"
#include "config/base/hist.h"
#include "config/base/limits.h"
#include "config/settings/settings.h"
#include "engine/constrain/constrain.h"
#include "engine/request.h"
#include "models/chat/chat_format.h"

struct engine;

/* The API's defaults, overridden by the model's generation_config. */
void gen_params_init(struct gen_params *p, const struct engine *engine);
/* One token of an output. */
struct token_out {
    int32_t id; /* in the vocabulary */
    /* where its text begins: code points from the start of the choice's text, echo
     * included */
    int32_t text_offset;
    float logprob;            /* NaN for the first prompt token */
    int32_t n_top;            /* entries of the two arrays */
    const int32_t *top_id;    /* [n_top] token ids, best first */
    const float *top_logprob; /* [n_top] */
    bool drafted;             /* it was a draft that held (speculate) */
};

struct usage {
    /* completion: of all choices; cached: prompt tokens that the prefix cache had */
    int32_t prompt_tokens, completion_tokens, cached_tokens;
    int32_t reasoning_tokens; /* of the completion; the engine leaves it 0 */
};

/* The memory behind a choice's last piece, each block from malloc. A sink that sets
 * `taken` takes over all four and frees them with free(), which saves it a copy. */
struct output_memory {
    void *text, *token, *top_id, *top_logprob; /* token: array of token_out */
    bool taken;                                /* set by the sink */
};

/* A piece of one choice. The text is whole UTF-8 characters and never part of a stop
 * string that may still match. */
struct output {
    struct request *request; /* the one submitted; its `user` leads back to the caller */
    int32_t choice;          /* 0 .. n-1; -1: about the whole request (`last`, `error`) */
    const char *text;        /* [text_len] not NUL-terminated; may be empty */
    size_t text_len;         /* bytes */
    /* [n_tokens] the tokens behind the text, with log-probabilities where the request
     * asked for them */
    const struct token_out *token;
    int32_t n_tokens; /* of `token`, or of the prompt if `prompt` is set */
    /* set on a choice's last piece; NULL: the sink must copy what it keeps */
    struct output_memory *memory;
    /* The piece stands for the prompt (echo or prompt_logprobs) and precedes every
     * other piece of the choice. `text` and `token` are empty; a prompt_walk reads
     * the n_tokens. */
    bool prompt;
    enum finish_reason finish; /* why the choice ended; FINISH_NONE before its last piece */
    const char *stop_string;   /* [stop_string_len] the stop string that matched, or NULL */
    int32_t stop_string_len;   /* in bytes */
    /* the stop token that matched; -1: none, or the end-of-sequence token */
    int32_t stop_token;
    struct usage usage; /* of the request so far; final with `last` */
    /* A sentence for the client: set with FINISH_ERROR, FINISH_ABORT and
     * FINISH_IMPOSSIBLE (there a static string). */
    const char *error;
    bool last; /* the request's final output */
};

/* Receives outputs. Called by one of the engine's threads at a time; must not block.
 * Pointers are valid during the call only. */
struct sink {
    void (*emit)(struct sink *s, const struct output *o); /* once for each piece */
    /* After the outputs of a step: wake the readers, once for all of them. */
    void (*flush)(struct sink *s);
    /* (optional) The engine died (engine_health, engine_death) and every request's last
     * output has been queued. Called on the engine's thread. */
    void (*died)(struct sink *s);
};

/* Reads the model, sizes the KV pool and starts the threads. Blocks until the engine is
 * ready or has failed. `sink` must outlive the engine. */
int engine_open(struct engine **ret, const struct settings *s, struct sink *sink, struct err *e);
/* While another thread is in engine_open: whether it quantises, which may take
 * minutes. */
bool engine_opening_is_slow(void);
/* Ends that before the process ends, so that no files are left. */
void engine_opening_stop(void);
/* Stops at once: every request ends with FINISH_ABORT; the threads are joined. */
void engine_free(struct engine *e);

/* Announces that a request will be submitted within some tens of microseconds; wakes a
 * sleeping engine early. Any thread. */
void engine_expect(struct engine *e);
/* Submits a request. 0; ERR_FULL: the queue is full; ERR_DRAINING; ERR_INVALID: it can
 * never fit (the text has the numbers); ERR_DEVICE. Any thread. */
int engine_submit(struct engine *e, struct request *r, struct err *err);
/* Whether n more requests of the tenant would be accepted at this moment: 0, or the
 * error that engine_submit_all would return for their number: ERR_FULL, ERR_INVALID
 * (more than the queue ever holds), ERR_DRAINING, ERR_DEVICE. Lets a caller refuse
 * before it does work for them. */
int engine_check_capacity(const struct engine *e, int32_t tenant, int32_t n, struct err *err);
/* Submits the prompts of one HTTP request, which are of one tenant: all of them are
 * queued or none. */
int engine_submit_all(struct engine *e, struct request **r, int32_t n, struct err *err);
/* For benchmarks, while no request is at work: instead of by the setting speculate,
 * tokens are drafted as the last answer to the same prompt and seed has them, draft i
 * of a step right with the chance acceptance[i]; one chance stands for any number of
 * drafts, and with n 0 nothing is drafted. ERR_NOMEM, or ERR_INVALID: speculate is off,
 * or n > LIMIT_DRAFT. */
int engine_replay(struct engine *e, const float *acceptance, int32_t n, struct err *err);
/* For benchmarks, before the first request: one with this prompt is answered so,
 * whatever the model samples, at the model's speed. ERR_NOMEM, ERR_INVALID: an id is
 * outside the vocabulary. */
int engine_script(struct engine *e, const int32_t *prompt, int32_t n_prompt, const int32_t *answer,
                  int32_t n_answer, struct err *err);
/* Cancels a request, which is freed within a step. Outputs may still arrive until
 * `last`. Any thread. */
void engine_cancel(struct engine *e, struct request *r);
/* Suspends or resumes a request. Any thread. */
void engine_park(struct engine *e, struct request *r, enum request_parking how);
/* Refuses new requests; accepted ones are finished. */
void engine_drain(struct engine *e);
/* Requests accepted that have not ended. */
int64_t engine_active(const struct engine *e);

enum engine_health { HEALTH_STARTING, HEALTH_READY, HEALTH_DRAINING, HEALTH_STALLED, HEALTH_DEAD };
enum engine_health engine_health(const struct engine *e); /* never blocks */
const char *engine_health_name(enum engine_health h);
/* Why the engine is dead, as a sentence; "" unless HEALTH_DEAD. */
const char *engine_death(const struct engine *e);
/* Increases while steps progress or the engine is idle and alive: feeds the
 * watchdog. */
uint64_t engine_heartbeat(const struct engine *e);

struct engine_info {
    const char *model_name;       /* the name it is served under */
    const char *model_path;       /* directory or GGUF file */
    const char *fingerprint;      /* system_fingerprint */
    const char *device;           /* "cpu: …", "cuda: NVIDIA H200" */
    const char *dtype;            /* of the weights on the device: "bfloat16", … */
    const char *kv_dtype;         /* of cached keys and values, likewise; "": none */
    int64_t kv_token_bytes;       /* that the cache takes for a token, on a rank */
    int64_t created;              /* unix seconds */
    int32_t max_model_len, vocab; /* vocab: width of the logits */
    /* of a text, that one token of it can stand for at most; 0: not bounded */
    int64_t token_text_bytes;
    /* tokens a KV block; blocks on the device, in swap space */
    int32_t block_size, n_blocks, n_host_blocks;
    int32_t n_ranks; /* processes that share the model; 1: not sharded */
    int32_t max_num_seqs, max_num_batched_tokens; /* limits of a step */
};
void engine_info(const struct engine *e, struct engine_info *ret);
/* Whether a rank in [0, n_ranks) is ready to compute. Any thread. */
bool engine_rank_up(const struct engine *e, int32_t rank);

/* Reads a request's echoed or scored prompt token by token; all choices share the data.
 * Usable from the first output with `prompt` set for as long as the request exists, on
 * any thread. */
struct prompt_walk;
int prompt_walk_new(struct prompt_walk **ret, const struct request *r, struct err *e);
void prompt_walk_free(struct prompt_walk *w);
/* Reads the next token; with echo, its text is appended to `text`. 0; ERR_NOT_FOUND
 * past the last token; ERR_NOMEM. */
int prompt_walk_next(struct prompt_walk *w, struct token_out *ret, struct buf *text);

/* The tokenizer, for encode (stage 3) and the /tokenize routes. Any thread. `ret_ids`
 * is malloc'd; the caller frees it. */
int engine_encode(const struct engine *e, const char *text, size_t len, bool add_special,
                  int32_t max_tokens, int32_t **ret_ids, int32_t *ret_n, struct err *err);
int engine_decode(const struct engine *e, const int32_t *ids, int32_t n, bool skip_special,
                  struct buf *out, struct err *err);
/* The bytes of one token; may be part of a character. */
const char *engine_token_bytes(const struct engine *e, int32_t id, size_t *ret_len);

/* The model's chat template, and the format in which the model writes tool calls and
 * reasoning. What the template renders is found by rendering short chats at start. */
struct engine_chat {
    /* why chat is unavailable, a sentence for clients; NULL: it is available */
    const char *missing;
    bool wants_parts;     /* the template expects a message's content as a list of parts */
    bool knows_developer; /* the template has the role `developer` */
    bool knows_tools;     /* it renders the definitions of `tools` */
    bool knows_calls;     /* it renders tool_calls of assistant messages */
    /* it takes the arguments of a call as an object; false: as JSON text */
    bool object_arguments;
    bool null_content;   /* it takes calls in a message whose content is null */
    bool skips_vision;   /* the model is the text part of one that sees; that part is not loaded */
    bool thinking;       /* it reads past reasoning as `thinking` */
    bool reasons, calls; /* the format has reasoning; tool calls */
    const char *format;  /* its name */
    int32_t id_chars;    /* letters and digits that a call's id has; 0: any id will do */
};
void engine_chat(const struct engine *e, struct engine_chat *ret);
/* Appends the prompt that the template renders from `context`, a JSON object with
 * messages, add_generation_prompt and the template's other variables. Any thread.
 * ERR_INVALID: the template rejects them; ERR_UNSUPPORTED: the model has no usable
 * template. */
int engine_render_chat(const struct engine *e, const char *context, size_t len, struct buf *out,
                       struct err *err);

/* Whether a rendered prompt ends inside reasoning, which the template opened. */
bool engine_chat_opens_reasoning(const struct engine *e, const char *prompt, size_t len);
/* The functions of chat_format.h, with the model's format. */
int engine_chat_grammar(const struct engine *e, const struct chat_tools *t, const char *answer,
                        bool reasoning, struct buf *out, bool *ret_needed, struct err *err);
int engine_chat_parser_new(const struct engine *e, struct chat_parser **ret,
                           const struct chat_tools *tools, bool reasoning, struct err *err);
int engine_chat_parser_feed(struct chat_parser *p, const char *text, size_t len, chat_event_fn *fn,
                            void *arg);
int engine_chat_parser_end(struct chat_parser *p, chat_event_fn *fn, void *arg);
void engine_chat_parser_free(struct chat_parser *p);
size_t engine_chat_parser_bytes(const struct chat_parser *p);
bool engine_chat_parser_reasoning(const struct chat_parser *p);

/* Compile a grammar for the model's vocabulary: for gen_params.grammar, which takes
 * over the reference. Any thread. ERR_INVALID, ERR_UNSUPPORTED, ERR_NOMEM: as
 * grammar_new with the limits for text of clients. `work`: steps that compiling it may
 * take, from which those it took are taken off; NULL: as many as one text may. */
int engine_grammar_new(const struct engine *e, enum grammar_kind kind, const char *text, size_t len,
                       int64_t *work, struct grammar **ret, struct err *err);

/* How a text fares under a grammar. */
struct grammar_walk {
    int32_t most;     /* tokens that are walked, at most */
    int64_t until_us; /* of clock_us: no mask is begun later */
    /* [most + 1] of the caller: how many tokens may come in front of each token, and
     * behind the last one; n_allowed of them */
    int32_t *allowed;
    int32_t n, n_allowed; /* tokens that were taken; counts */
    /* why it ended: the whole text was taken; a token is not allowed, or nothing may
     * follow; `most` or `until_us` */
    enum { WALK_WHOLE, WALK_REFUSED, WALK_TIME } end;
    bool complete; /* what was taken is a sentence */
};
/* Walk through the tokens id[n]; `ret` has its limits. Any thread. ERR_NOMEM, ERR_FULL:
 * as constraint_mask. */
int engine_grammar_walk(const struct engine *e, struct grammar *g, const int32_t *id, int32_t n,
                        struct grammar_walk *ret, struct err *err);

/* Fill-in-the-middle tokens. A prompt with a gap is encoded as: `prefix`, the text
 * before the gap, `suffix`, the text after it, `middle`. */
struct engine_fim {
    bool there;                     /* the vocabulary has these tokens */
    int32_t prefix, suffix, middle; /* token ids */
    int32_t end; /* ends the generated middle unless that is the end-of-sequence token; -1: none */
    int32_t bos; /* begins every prompt; -1: none */
};
void engine_fim(const struct engine *e, struct engine_fim *ret);

/* Counters and gauges, written by the engine's and the output thread, read by /metrics
 * without locks. */
struct engine_stats {
    /* sequences running; requests waiting, swapped out */
    _Atomic int64_t running, waiting, swapped;
    /* cached: free, with reusable contents */
    _Atomic int64_t blocks_used, blocks_cached, host_blocks_used;
    /* preempt_*: preempted groups, by how their KV cache was dealt with */
    _Atomic uint64_t prompt_tokens, generation_tokens, preempt_swap, preempt_recompute;
    /* prompt tokens: looked up in the prefix cache, found there, and the others */
    _Atomic uint64_t prefix_queries, prefix_hits, prefix_misses;
    /* verified drafts by sequence and step, their tokens, and those that held, by their
     * place */
    _Atomic uint64_t drafts, draft_tokens, accepted_tokens[LIMIT_DRAFT];
    /* of steps together, as in struct expert_load */
    _Atomic uint64_t expert_rows, expert_peak;
    _Atomic uint64_t late_masks; /* that steps went on without, by sequence and step */
    /* requests, by enum finish_reason; FINISH_IMPOSSIBLE counts as FINISH_ERROR */
    _Atomic uint64_t finished[5];
    _Atomic uint64_t steps;                                                 /* committed */
    struct hist ttft_s, itl_s, tpot_s, e2e_s, queue_s, prefill_s, decode_s; /* seconds */
    /* Tokens of a prompt and of a choice; choices a request (n); tokens a step;
     * seconds that a step takes on the engine's thread and on the device, and that
     * masks of a step take, from its tokens to the device. */
    struct hist prompt_len, generation_len, params_n, iteration_tokens, step_host_s, step_device_s;
    struct hist step_masks_s;
};
const struct engine_stats *engine_stats(const struct engine *e);

#endif
