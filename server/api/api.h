/* What may be asked for: bodies of /v1/completions, /v1/chat/completions, /tokenize and
 * /detokenize, checked field by field.
 *
 * One table (api_table.c) has a row for every field: name, type, bounds, meaning. It
 * validates requests and it is what /openapi.json is printed from, so the document
 * cannot say anything else than the server does. Fields whose rule is more than a type
 * and a range have a reader of their own (api_values.c, api_lists.c, api_prompt.c).
 * Every refusal names the field, what was given and what is allowed, through `struct
 * err`.
 */
#ifndef QUIRE_SERVER_API_API_H
#define QUIRE_SERVER_API_API_H

#include <cjson/cJSON.h>

#include "config/base/limits.h"
#include "engine/engine.h"

/* What checking must know of the model and the settings; filled when the engine is
 * ready, then constant. */
struct api_context {
    struct engine_info info;
    int32_t max_logprobs;
    bool reject_unknown; /* setting unknown_fields */
    int32_t tenant;      /* whom the request counts for: set by the route in a copy of its own */
    /* As engine_check_room; NULL: there is room for any number. */
    int (*check_room)(void *arg, int32_t tenant, int32_t n, struct err *e);
    /* Defaults of a request; the seed of a prompt that brings none. */
    void (*defaults)(void *arg, struct gen_params *ret);
    uint64_t (*new_seed)(void *arg);
    /* As engine_encode, engine_token_bytes. */
    int (*encode)(void *arg, const char *text, size_t len, bool add_special, int32_t max_tokens,
                  int32_t **ret_ids, int32_t *ret_n, struct err *e);
    const char *(*token_bytes)(const void *arg, int32_t id, size_t *ret_len);
    /* As engine_render_chat; used where chat.missing is NULL. */
    int (*render_chat)(void *arg, const char *context, size_t len, struct buf *out, struct err *e);
    struct engine_chat chat;
    struct engine_fim fim;
    void *arg;
};

struct prompt {
    int32_t *id; /* [n] owned */
    int32_t n;
    uint64_t seed; /* of its samples */
};

/* A completion request, ready to be handed to the engine. */
struct completion {
    struct gen_params params;
    struct prompt *prompt; /* [n_prompts] owned */
    int32_t n_prompts;
    bool echo_logprobs; /* the prompt's log-probabilities belong into `logprobs` */
    /* the field prompt_logprobs, -1: not given; params.n_prompt_logprobs serves echo
     * too */
    int32_t n_prompt_top;
    bool include_usage, continuous_usage, return_token_ids;
    char request_id[LIMIT_REQUEST_ID_BYTES + 1]; /* "" when none was given */
    bool has_priority;
    int32_t tenant; /* whom it counts for: set by the route */
    float weight;
    char ignored[256]; /* unknown fields, comma-separated, for X-Quire-Ignored */

    /* While it is read: what the fields said, before they are checked against each
     * other. */
    bool add_special, use_beam_search, has_stream_options;
    bool has_max_tokens, has_best_of, has_beam_width, has_temperature, has_length_penalty,
        has_early_stopping;
    bool has_prompt_logprobs, has_seed;
    const cJSON *suffix; /* a string of the body's tree; NULL: none */
    int32_t truncate;    /* keep the last N prompt tokens; 0: all */

    /* Of chat requests only. */
    bool chat, chat_logprobs, add_generation_prompt, continue_final_message;
    bool has_max_completion_tokens, has_top_logprobs, has_add_generation_prompt;
    int32_t max_completion_tokens, top_logprobs;
    bool ignored_bool; /* where accepted fields that nothing uses go */
};

/* Read and check `body`. On failure nothing is left allocated and `e` says why:
 * ERR_INVALID, ERR_UNSUPPORTED (400), ERR_NOT_FOUND (model, 404), ERR_FULL (429),
 * ERR_NOMEM. Room in the queue is asked for before the body becomes a tree, and again
 * for the number of its prompts before any of them is encoded. */
int completion_parse(struct completion *ret, const char *body, size_t len,
                     const struct api_context *ctx, struct err *e);
/* The same for a body of /v1/chat/completions: `prompt` holds what the template makes
 * of the messages. */
int chat_parse(struct completion *ret, const char *body, size_t len, const struct api_context *ctx,
               struct err *e);
void completion_release(struct completion *c);

struct tokenize {
    int32_t *id; /* [n] owned */
    int32_t n;
    bool return_strings;
    char ignored[256]; /* unknown fields */
};
int tokenize_parse(struct tokenize *ret, const char *body, size_t len,
                   const struct api_context *ctx, struct err *e);
/* /detokenize: the ids into ret->id. */
int detokenize_parse(struct tokenize *ret, const char *body, size_t len,
                     const struct api_context *ctx, struct err *e);
void tokenize_release(struct tokenize *t);

/* ---- the field table ---- */

enum field_type {
    FIELD_BOOL,
    FIELD_INT,     /* int32 */
    FIELD_FLOAT,   /* float, finite */
    FIELD_STRING,  /* checked, not kept: `user` */
    FIELD_CUSTOM,  /* `read` decides */
    FIELD_MISSING, /* known to the field, not to this server: 400 */
};

/* Rows that only one of the two generating routes has. */
enum field_route { ROUTE_BOTH, ROUTE_COMPLETIONS, ROUTE_CHAT };

struct field;
/* Checks the value `v` of field `f` and keeps it in `ret`, the struct that the table
 * fills. */
typedef int field_reader(void *ret, const struct field *f, const cJSON *v,
                         const struct api_context *ctx, struct err *e);

struct field {
    const char *name;
    enum field_type type;
    enum field_route only;
    int32_t offset; /* in the struct that the table fills */
    int32_t given;  /* offset of a bool that tells it was given, or -1 */
    double lo, hi;  /* both allowed, but `lo` where `lo_open` */
    bool lo_open;
    field_reader *read;
    /* JSON Schema of a FIELD_CUSTOM; @vocab and @logprobs stand for the largest id and
     * count */
    const char *schema;
    const char *help;
};

struct field_table {
    const struct field *field;
    int n;
    enum field_route route; /* rows of the other one are passed over */
};
bool field_in(const struct field_table *t, const struct field *f);
extern const struct field_table completion_fields, chat_fields, tokenize_fields, detokenize_fields;

/* Give every member of `object` to its row of the table; null means not given. Unknown
 * names go to `ignored` (or are refused). */
int fields_read(const struct field_table *t, void *ret, const cJSON *object,
                const struct api_context *ctx, char *ignored, size_t ignored_size, struct err *e);
/* An integer inside [lo, hi] out of `v`, which stands in `name`. */
int field_integer(int32_t *ret, const char *name, const cJSON *v, double lo, double hi,
                  struct err *e);
/* `v` is not what `allowed` says. */
int field_wrong_type(const struct field *f, const cJSON *v, const char *allowed, struct err *e);
/* A string that is a name or the like holds the character NUL. */
int field_has_nul(const char *name, struct err *e);
/* Of a field that needs others, or the body's text: whoever has them reads it. */
field_reader read_later;
/* Single values (api_values.c), lists (api_lists.c). */
field_reader read_model, read_early_stopping, read_logprobs, read_prompt_logprobs, read_top_k,
    read_seed, read_cache_salt, read_request_id, read_suffix, read_response_format,
    read_top_logprobs, read_object, read_no_tools, read_tool_choice;
field_reader read_stop, read_stop_token_ids, read_allowed_token_ids, read_bad_words,
    read_logit_bias, read_stream_options;

/* Whether the engine would take n more requests now. */
int api_check_room(const struct api_context *ctx, int32_t n, struct err *e);
/* All four forms of `prompt` into c->prompt, truncated as c->truncate says. */
int prompt_read(struct completion *c, const cJSON *v, const struct api_context *ctx, struct err *e);
/* With a suffix: each prompt becomes the model's form of a text with a gap. */
int prompt_add_suffix(struct completion *c, const struct api_context *ctx, struct err *e);
/* One prompt from the text that the template made. */
int prompt_from_text(struct completion *c, const char *text, size_t len,
                     const struct api_context *ctx, struct err *e);
/* `messages` and what belongs to them, written out by the template, into c->prompt
 * (api_chat.c). */
int chat_read(struct completion *c, const cJSON *tree, const struct api_context *ctx,
              struct err *e);
/* A list of ids inside the vocabulary, 1 .. max of them. `ret` is malloc'd. */
int read_ids(int32_t **ret, int32_t *ret_n, const char *name, const cJSON *v, int32_t max,
             const struct api_context *ctx, struct err *e);

/* ---- answers ---- */

int http_status_of(int err_code);
/* A refusal may quote what the client sent: control characters in it become '?'. */
void api_one_line(struct err *e);
/* {"error":{message, type, param, code}} */
void api_error(struct buf *b, int status, const char *param, const char *message);
/* The inner object alone. */
void api_error_object(struct buf *b, int status, const char *param, const char *message);
void api_models(struct buf *b, const struct api_context *ctx);
void api_model(struct buf *b, const struct api_context *ctx);
/* /openapi.json, from the field tables. */
void api_openapi(struct buf *b, const struct api_context *ctx);

#endif
