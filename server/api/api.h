/* The API's request bodies, validated field by field.
 *
 * A table has a row for every field: name, type, bounds, meaning. That of
 * /v1/completions and /v1/chat/completions is in api_table.c, those of /tokenize and
 * /detokenize in api_prompt.c, those of /v1/responses and /v1/messages in agents/. They
 * validate requests, and /openapi.json is printed from them, so the document and the
 * server agree. A field that needs more than a type and a range has its own reader
 * (api_values.c, api_lists.c, api_prompt.c). Every error names the field, the value and
 * what is allowed, through `struct err`.
 */
#ifndef QUIRE_SERVER_API_API_H
#define QUIRE_SERVER_API_API_H

#include <cjson/cJSON.h>

#include "config/base/limits.h"
#include "engine/engine.h"

/* What validation needs of the model and the settings; filled in when the model is
 * loaded, constant afterwards. */
struct api_context {
    struct engine_info info;
    int32_t max_logprobs; /* setting of that name, at most LIMIT_LOGPROBS */
    bool reject_unknown;  /* setting unknown_fields */
    int32_t tenant;       /* the request's; each route sets it in its own copy */
    /* As engine_check_capacity; NULL: any number of requests can be queued. */
    int (*check_capacity)(void *arg, int32_t tenant, int32_t n, struct err *e);
    /* The defaults of a request; a seed for a prompt without one. */
    void (*defaults)(void *arg, struct gen_params *ret);
    uint64_t (*new_seed)(void *arg);
    /* As engine_encode, engine_token_bytes. */
    int (*encode)(void *arg, const char *text, size_t len, bool add_special, int32_t max_tokens,
                  int32_t **ret_ids, int32_t *ret_n, struct err *e);
    const char *(*token_bytes)(const void *arg, int32_t id, size_t *ret_len);
    /* As engine_render_chat; used where chat.missing is NULL. */
    int (*render_chat)(void *arg, const char *context, size_t len, struct buf *out, struct err *e);
    /* As engine_chat_opens_reasoning, engine_chat_grammar, engine_grammar_new. */
    bool (*opens_reasoning)(void *arg, const char *prompt, size_t len);
    int (*chat_grammar)(void *arg, const struct chat_tools *t, const char *answer, bool reasoning,
                        struct buf *out, bool *ret_needed, struct err *e);
    int (*grammar_new)(void *arg, enum grammar_kind kind, const char *text, size_t len,
                       int64_t *work, struct grammar **ret, struct err *e);
    struct engine_chat chat; /* the chat template's abilities */
    struct engine_fim fim;   /* the fill-in-the-middle tokens */
    void *arg;               /* for all functions above */
};

/* What else is to be said of a part of this type that is refused: of a model that sees,
 * why this one does not. "" or a clause that follows the sentence. */
const char *api_why_blind(const struct api_context *ctx, const char *type);

struct dialect;

struct prompt {
    int32_t *id; /* [n] owned */
    int32_t n;
    uint64_t seed; /* for sampling its choices */
};

/* The API that a request came by, and in whose form it is answered. */
enum api_kind { API_COMPLETIONS, API_CHAT, API_RESPONSES, API_MESSAGES };

/* A validated request of any generating route. */
struct completion {
    enum api_kind api;
    struct gen_params params; /* the prompts' common parameters */
    struct prompt *prompt;    /* [n_prompts] owned */
    int32_t n_prompts;
    bool echo_logprobs; /* `logprobs` includes the echoed prompt's tokens */
    /* The field prompt_logprobs, -1: not given. params.n_prompt_logprobs may be larger,
     * for echo_logprobs. */
    int32_t n_prompt_top;
    bool include_usage, continuous_usage, return_token_ids;
    char request_id[LIMIT_REQUEST_ID_BYTES + 1]; /* "" when none was given */
    bool has_priority; /* the field was given; else the route may clamp it */
    int32_t tenant;    /* the key's owner; set by the route */
    float weight;      /* the key's share under policy: fair; set by the route */
    char ignored[256]; /* unknown fields, comma-separated, for X-Quire-Ignored */

    /* Only while parsing: values of fields that are checked against each other, and
     * which of them were given. */
    bool add_special, use_beam_search, has_stream_options;
    bool has_max_tokens, has_best_of, has_beam_width, has_temperature, has_length_penalty,
        has_early_stopping;
    bool has_prompt_logprobs, has_seed;
    const cJSON *suffix; /* a string in the body's tree; NULL: none or empty */
    int32_t truncate;    /* keep the last N prompt tokens; 0: all */

    /* Of chat requests only. */
    bool chat, chat_logprobs, add_generation_prompt, continue_final_message;
    bool has_max_completion_tokens, has_top_logprobs, has_add_generation_prompt;
    int32_t max_completion_tokens, top_logprobs;
    bool parallel_tool_calls;
    bool ignored_bool; /* target of accepted fields that have no effect */

    /* ---- tools and reasoning, of chat requests ---- */
    struct chat_tools tools; /* owned; no tools: n is 0 */
    bool functions;          /* the tools came as `functions`: answered in that form */
    /* The answer is read by the model's format: it may hold reasoning or calls. */
    bool parsed;
    bool opens_reasoning; /* the prompt ends inside reasoning */

    /* ---- of routes that translate onto chat (translate.h) ---- */
    bool has_ceiling;    /* max_tokens was given as an upper bound, cut to what fits */
    int32_t ignored_int; /* target of accepted fields that have no effect */
    /* How the answer is written (server/stream/dialect.h); NULL: as chat completions,
     * or completions. */
    const struct dialect *dialect;
    char *echo; /* owned; answer_info.echo, or NULL */
};

/* Parse and validate `body`. On failure nothing is left allocated and `e` says why:
 * ERR_INVALID, ERR_UNSUPPORTED (400), ERR_NOT_FOUND (model, 404), ERR_FULL (429),
 * ERR_NOMEM. The queue is checked for free places before the body is parsed, and again
 * for all prompts before the first is encoded. */
int completion_parse(struct completion *ret, const char *body, size_t len,
                     const struct api_context *ctx, struct err *e);
/* The same for a body of /v1/chat/completions; the prompt is the template's rendering
 * of the messages. */
int chat_parse(struct completion *ret, const char *body, size_t len, const struct api_context *ctx,
               struct err *e);
/* The same for bodies of /v1/responses and /v1/messages, which become chats
 * (responses.c, messages.c). */
int responses_parse(struct completion *ret, const char *body, size_t len,
                    const struct api_context *ctx, struct err *e);
int messages_parse(struct completion *ret, const char *body, size_t len,
                   const struct api_context *ctx, struct err *e);
/* The tokens of the prompt that a body of either API makes. `ignored`: as that of a
 * completion. */
int count_parse(enum api_kind api, int32_t *ret_n, char ignored[256], const char *body, size_t len,
                const struct api_context *ctx, struct err *e);
void completion_release(struct completion *c);

struct tokenize {
    int32_t *id; /* [n] owned */
    int32_t n;
    bool return_strings; /* the field return_token_strs */
    char ignored[256];   /* unknown fields, comma-separated */
};
int tokenize_parse(struct tokenize *ret, const char *body, size_t len,
                   const struct api_context *ctx, struct err *e);
/* A body of /detokenize: its ids in ret->id. */
int detokenize_parse(struct tokenize *ret, const char *body, size_t len,
                     const struct api_context *ctx, struct err *e);
void tokenize_release(struct tokenize *t);

/* ---- the field table ---- */

enum field_type {
    FIELD_BOOL,
    FIELD_INT,     /* int32 */
    FIELD_FLOAT,   /* float, finite */
    FIELD_STRING,  /* validated but not stored: `user` */
    FIELD_CUSTOM,  /* validated and stored by `read` */
    FIELD_MISSING, /* of the OpenAI or vLLM API, but not supported here: 400 */
};

/* The generating routes on which a row is valid. */
enum field_route { ROUTE_BOTH, ROUTE_COMPLETIONS, ROUTE_CHAT };

struct field;
/* Validates the value `v` of field `f` and stores it in `ret`, the struct that the
 * table fills. */
typedef int field_reader(void *ret, const struct field *f, const cJSON *v,
                         const struct api_context *ctx, struct err *e);

struct field {
    const char *name;      /* of the JSON member */
    enum field_type type;  /* how the value is validated */
    enum field_route only; /* the route that has the field */
    int32_t offset;        /* of the value in the struct that the table fills */
    int32_t given;         /* offset of a bool to set if the field is given, or -1 */
    double lo, hi;         /* bounds of numbers, inclusive except for lo_open */
    bool lo_open;          /* `lo` itself is not allowed */
    field_reader *read;    /* of a FIELD_CUSTOM */
    /* JSON Schema of a FIELD_CUSTOM; @vocab, @logprobs and @suffix stand for the
     * largest token id, the most log-probabilities, and the longest suffix */
    const char *schema;
    const char *help; /* the description in /openapi.json; of a FIELD_MISSING: the feature */
};

struct field_table {
    const struct field *field; /* [n] */
    int n;
    enum field_route route; /* rows of the other route are skipped */
};
/* Whether the row applies to the table's route. */
bool field_in(const struct field_table *t, const struct field *f);
extern const struct field_table completion_fields, chat_fields, tokenize_fields, detokenize_fields;
extern const struct field_table responses_fields, messages_fields;

/* Read every member of `object` by its row of the table; null counts as not given.
 * Unknown names are appended to `ignored`, or refused. */
int fields_read(const struct field_table *t, void *ret, const cJSON *object,
                const struct api_context *ctx, char *ignored, size_t ignored_size, struct err *e);
/* Read `v`, a value of the field `name`, as an integer in [lo, hi]. */
int field_integer(int32_t *ret, const char *name, const cJSON *v, double lo, double hi,
                  struct err *e);
/* The error of a value that is not `allowed`. */
int field_wrong_type(const struct field *f, const cJSON *v, const char *allowed, struct err *e);
/* The error of a string that must not hold the character NUL. */
int field_has_nul(const char *name, struct err *e);
/* Accepts any value: the field is read later, together with others. */
field_reader read_later;
/* Readers of single values (api_values.c) and of lists (api_lists.c). */
field_reader read_model, read_early_stopping, read_logprobs, read_prompt_logprobs, read_top_k,
    read_seed, read_cache_salt, read_request_id, read_suffix, read_top_logprobs, read_any_object,
    read_list, read_tool_choice, read_word, read_modalities;
field_reader read_stop, read_stop_token_ids, read_allowed_token_ids, read_bad_words,
    read_logit_bias, read_stream_options;

/* Whether n more requests can be queued now. */
int api_check_room(const struct api_context *ctx, int32_t n, struct err *e);
/* Read any of the four forms of `prompt` into c->prompt, truncated to c->truncate. */
int prompt_read(struct completion *c, const cJSON *v, const struct api_context *ctx, struct err *e);
/* With a suffix, turn each prompt into the model's fill-in-the-middle form. */
int prompt_add_suffix(struct completion *c, const struct api_context *ctx, struct err *e);
/* Encode the text that the chat template rendered as the one prompt. */
/* A longer text has more tokens than the model's length, of which prompt_refuse_bytes
 * sets the error; 0: no length of a text says so. */
size_t prompt_most_bytes(const struct api_context *ctx);
int prompt_refuse_bytes(struct err *e, const char *name, const struct api_context *ctx);
int prompt_from_text(struct completion *c, const char *text, size_t len,
                     const struct api_context *ctx, struct err *e);
/* Render `messages` and the template's other variables and encode the text into
 * c->prompt (api_chat.c). */
int chat_read(struct completion *c, const cJSON *tree, const struct api_context *ctx,
              struct err *e);
/* Whether the request has tools that may be called. */
bool tools_active(const struct completion *c);
/* Read `tools` or `functions`, and what may be chosen of them, into c->tools
 * (api_tools.c). */
int tools_read(struct completion *c, const cJSON *tree, const struct api_context *ctx,
               struct err *e);
/* Append `,"tools":[…]` for the template; nothing without tools. */
int tools_put(struct buf *b, const cJSON *tree, struct err *e);
/* Append `"messages":[…]` for the template (api_messages.c). `mark`: the last message
 * ends with CHAT_CONTINUE_MARK. */
#define CHAT_CONTINUE_MARK "CONTINUE_FINAL_MESSAGE_TAG "
int messages_put(struct buf *b, const cJSON *messages, bool mark, const struct api_context *ctx,
                 struct err *e);
/* Refuse numbers in `v`, a value of the field `name`, that the template engine cannot
 * represent: integers beyond 64 bits, and doubles that are not finite. */
int template_numbers(const char *name, const cJSON *v, struct err *e);
/* Round such numbers to the nearest finite double instead: models write them, as
 * arguments of calls, and a conversation that holds one must be able to go on. */
int template_numbers_round(cJSON *v, struct err *e);
/* Whether the template engine reads `v` to its innermost level, `outside` levels within
 * the object of all that a template sees: LIMIT_FILE_JSON_DEPTH in all. */
bool template_reaches(const cJSON *v, int outside);
/* Read the fields that constrain the output into c->params.grammar (api_grammar.c).
 * Of a chat: after the prompt was rendered, together with its tools. */
int structured_read(struct completion *c, const cJSON *tree, const struct api_context *ctx,
                    struct err *e);
/* Append a name to the list of ignored fields, with visible ASCII only; dropped if it
 * is long or does not fit. */
void note_ignored(char *ignored, size_t size, const char *name);
/* Read a list of 1 .. max token ids of the vocabulary into *ret, which is malloc'd. */
int read_ids(int32_t **ret, int32_t *ret_n, const char *name, const cJSON *v, int32_t max,
             const struct api_context *ctx, struct err *e);

/* ---- responses ---- */

/* The HTTP status for an enum err_code. */
int http_status_of(int err_code);
/* Replace control characters by '?': an error message may quote what the client
 * sent. */
void api_one_line(struct err *e);
/* {"error":{message, type, param, code}} */
void api_error(struct buf *b, int status, const char *param, const char *message);
/* The inner object alone. */
void api_error_object(struct buf *b, int status, const char *param, const char *message);
/* The list of models; one model. */
void api_models(struct buf *b, const struct api_context *ctx);
void api_model(struct buf *b, const struct api_context *ctx);
/* The model as Codex reads it, an entry of the list's member `models`
 * (agents/codex_model.c). */
void api_codex_model(struct buf *b, const struct api_context *ctx);
/* /openapi.json, from the field tables. */
void api_openapi(struct buf *b, const struct api_context *ctx);

#endif
