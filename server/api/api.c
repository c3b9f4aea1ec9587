/* Parsing of a request body into a `struct completion`, or one error.
 *
 * Order: the JSON, each field by itself (api_fields.c), the fields together, and last
 * the prompts, since encoding is the only costly step. Nothing here depends on HTTP or
 * on the engine's internals.
 */
#include "server/api/api.h"

#include <stdlib.h>
#include <string.h>

#include "server/api/agents/translate.h"
#include "server/api/json_fields.h"

static int refuse(struct err *e, const char *param, const char *text)
{
    return err_set_param(e, ERR_INVALID, param, "%s", text);
}

/* ---- checks across fields ---- */

static int check_beams(struct completion *c, struct err *e)
{
    struct gen_params *p = &c->params;

    if (!c->use_beam_search) {
        return c->has_beam_width ? refuse(e, "beam_width", "beam_width needs use_beam_search: true")
               : c->has_length_penalty && p->length_penalty != 1.0f
                   ? refuse(e, "length_penalty", "length_penalty needs use_beam_search: true")
               : c->has_early_stopping && p->early_stopping
                   ? refuse(e, "early_stopping", "early_stopping needs use_beam_search: true")
                   : 0;
    }
    if (c->has_temperature && p->temperature != 0) {
        return refuse(e, "temperature",
                      "use_beam_search takes no temperature other than 0: beams are not sampled");
    }
    /* As in older APIs, best_of gives the width if beam_width is absent. */
    int32_t width = c->has_beam_width ? p->beam_width : c->has_best_of ? p->best_of : p->n;
    if (c->has_beam_width && c->has_best_of && p->best_of != p->beam_width) {
        return refuse(e, "best_of",
                      "best_of and beam_width differ; with use_beam_search give beam_width only");
    }
    if (width < p->n) {
        return err_set_param(e, ERR_INVALID, c->has_beam_width ? "beam_width" : "best_of",
                             "the beam's width is %d but must be at least n, which is %d", width,
                             p->n);
    }
    p->beam_width = width;
    p->best_of = p->n;
    p->temperature = 0;
    return 0;
}

static int check_samples(struct completion *c, struct err *e)
{
    struct gen_params *p = &c->params;

    if (c->use_beam_search) {
        return 0;
    }
    p->beam_width = 0;
    if (!c->has_best_of) {
        p->best_of = p->n;
    }
    if (p->best_of < p->n) {
        return err_set_param(e, ERR_INVALID, "best_of",
                             "best_of is %d but must be at least n, which is %d", p->best_of, p->n);
    }
    if (p->stream && p->best_of != p->n) {
        return refuse(e, "best_of",
                      "best_of must equal n with stream: the best are only known at the end");
    }
    if (p->temperature == 0 && p->best_of > 1) {
        return refuse(e, p->n > 1 ? "n" : "best_of",
                      "with temperature 0 all samples would be equal; set a temperature, n 1, or "
                      "use_beam_search");
    }
    return 0;
}

static int check_lengths(struct completion *c, struct err *e)
{
    struct gen_params *p = &c->params;

    if (p->max_tokens == 0 && !p->echo) {
        return refuse(e, "max_tokens",
                      "max_tokens is 0 but must be at least 1; 0 is allowed with echo: true");
    }
    if (c->has_max_tokens && p->min_tokens > p->max_tokens) {
        return err_set_param(e, ERR_INVALID, "min_tokens",
                             "min_tokens is %d but must be at most max_tokens, which is %d",
                             p->min_tokens, p->max_tokens);
    }
    return 0;
}

static int check_together(struct completion *c, struct err *e)
{
    struct gen_params *p = &c->params;
    int rc = check_beams(c, e);

    rc = rc ? rc : check_samples(c, e);
    rc = rc ? rc : check_lengths(c, e);
    if (!rc && c->has_stream_options && !p->stream) {
        rc = refuse(e, "stream_options", "stream_options needs stream: true");
    }
    if (!rc && c->suffix && (p->echo || c->truncate)) {
        rc = refuse(
            e, p->echo ? "echo" : "truncate_prompt_tokens",
            "suffix goes with neither echo nor truncate_prompt_tokens: the prompt has a gap");
    }
    c->echo_logprobs = p->echo && p->n_logprobs >= 0;
    c->n_prompt_top = p->n_prompt_logprobs;
    if (c->echo_logprobs) {
        p->n_prompt_logprobs = MAX(p->n_prompt_logprobs, p->n_logprobs);
    }
    return rc;
}

/* Prompt and answer together must fit the model's length. The default of max_tokens is
 * lowered to fit. */
static int check_fit(struct completion *c, const struct api_context *ctx, struct err *e)
{
    struct gen_params *p = &c->params;
    int32_t longest = 0, max_len = ctx->info.max_model_len;

    for (int32_t i = 0; i < c->n_prompts; i++) {
        longest = MAX(longest, c->prompt[i].n);
    }
    p->max_tokens_yields = !c->has_max_tokens;
    if (!c->has_max_tokens && longest < max_len) {
        p->max_tokens = MIN(p->max_tokens, max_len - longest);
    }
    if (!c->has_max_tokens && longest >= max_len) {
        p->max_tokens = MIN(p->max_tokens, 16);
    }
    if (p->max_tokens > max_len - longest) {
        return err_set_param(e, ERR_INVALID,
                             c->has_max_tokens ? "max_tokens"
                             : c->chat         ? "messages"
                                               : "prompt",
                             "prompt has %d tokens and max_tokens is %d, together %lld; this "
                             "model's maximum context length is %d tokens: reduce one of them",
                             longest, p->max_tokens, (long long)longest + p->max_tokens, max_len);
    }
    if (p->min_tokens > p->max_tokens) {
        return err_set_param(e, ERR_INVALID, "min_tokens",
                             "min_tokens is %d but must be at most max_tokens, which is %d",
                             p->min_tokens, p->max_tokens);
    }
    int64_t choices = (int64_t)c->n_prompts * MAX(p->best_of, p->beam_width);
    if (choices > LIMIT_REQUEST_CHOICES) {
        return err_set_param(e, ERR_INVALID, "n",
                             "%d prompts with %d sequences each are %lld sequences; at most %d are "
                             "allowed in one request",
                             c->n_prompts, MAX(p->best_of, p->beam_width), (long long)choices,
                             LIMIT_REQUEST_CHOICES);
    }
    return 0;
}

/* Fields that have another form in chats. */
static int check_chat(struct completion *c, struct err *e)
{
    if (c->has_top_logprobs && c->top_logprobs && !c->chat_logprobs) {
        return refuse(e, "top_logprobs", "top_logprobs needs logprobs: true");
    }
    if (c->chat_logprobs) {
        c->params.n_logprobs = c->top_logprobs;
    }
    if (c->continue_final_message && c->has_add_generation_prompt && c->add_generation_prompt) {
        return refuse(e, "continue_final_message",
                      "continue_final_message and add_generation_prompt exclude each other; give "
                      "one of them");
    }
    if (c->continue_final_message) {
        c->add_generation_prompt = false;
    }
    return 0;
}

/* Without a seed each prompt gets its own, so that equal prompts differ. */
static void give_seeds(struct completion *c, const struct api_context *ctx)
{
    for (int32_t i = 0; i < c->n_prompts; i++) {
        c->prompt[i].seed = c->has_seed ? c->params.seed : ctx->new_seed(ctx->arg);
    }
}

static int parse_tree(struct completion *c, cJSON *tree, const struct api_context *ctx,
                      struct err *e)
{
    const struct field_table *t = c->chat ? &chat_fields : &completion_fields;
    int rc = fields_read(t, c, tree, ctx, c->ignored, sizeof(c->ignored), e);

    if (c->has_max_completion_tokens) {
        c->params.max_tokens = c->max_completion_tokens;
        c->has_max_tokens = true;
    }
    rc = rc || !c->chat ? rc : check_chat(c, e);
    rc = rc ? rc : check_together(c, e);
    if (!rc) {
        rc = c->api >= API_RESPONSES ? translated_read(c, tree, ctx, e)
             : c->chat               ? chat_read(c, tree, ctx, e)
                                     : structured_read(c, tree, ctx, e);
    }
    if (!rc && !c->chat) {
        rc = prompt_read(c, cJSON_GetObjectItemCaseSensitive(tree, "prompt"), ctx, e);
    }
    rc = rc ? rc : prompt_add_suffix(c, ctx, e);
    c->suffix = NULL; /* the tree's */
    rc = rc ? rc : check_fit(c, ctx, e);
    if (!rc) {
        give_seeds(c, ctx);
    }
    return rc;
}

void api_one_line(struct err *e)
{
    for (char *c = e ? e->text : ""; *c; c++) {
        if ((unsigned char)*c < 0x20 || *c == 0x7f) {
            *c = '?';
        }
    }
}

int api_check_room(const struct api_context *ctx, int32_t n, struct err *e)
{
    return ctx->check_capacity ? ctx->check_capacity(ctx->arg, ctx->tenant, n, e) : 0;
}

/* Make a chat request of another API's body, and parse it. */
static int parse_translated(struct completion *c, cJSON *body, bool counts,
                            const struct api_context *ctx, struct err *e)
{
    struct translation t = {.c = c, .ctx = ctx, .counts = counts, .e = e};
    struct err why = {0};

    t.e = &why;
    t.chat = cJSON_CreateObject();
    t.messages = t.chat ? cJSON_AddArrayToObject(t.chat, "messages") : NULL;
    t.failed = !t.messages;
    int rc = c->api == API_RESPONSES ? responses_translate(&t, body) : messages_translate(&t, body);
    rc = t.failed ? err_nomem(&why, "the request's JSON") : rc;
    rc = rc ? rc : parse_tree(c, t.chat, ctx, &why);
    if (rc) {
        translated_error(&t, &why);
    }
    cJSON_Delete(t.chat);
    if (e) {
        *e = why;
    }
    return rc;
}

/* `counts`: of the answer only the number of the prompt's tokens is wanted. */
static int body_parse(struct completion *ret, enum api_kind api, bool counts, const char *body,
                      size_t len, const struct api_context *ctx, struct err *e)
{
    struct completion c = {.api = api,
                           .add_special = api == API_COMPLETIONS,
                           .chat = api != API_COMPLETIONS,
                           .add_generation_prompt = true,
                           .parallel_tool_calls = true};
    cJSON *tree;
    int rc = counts ? 0 : api_check_room(ctx, 1, e);

    rc = rc ? rc : json_parse(&tree, body, len, e);
    if (rc) {
        return rc;
    }
    ctx->defaults(ctx->arg, &c.params);
    /* By default a chat's answer may use the rest of the model's length. */
    c.params.max_tokens = c.chat ? INT32_MAX : c.params.max_tokens;
    rc = json_check_names(tree, e);
    if (!rc) {
        rc = api >= API_RESPONSES ? parse_translated(&c, tree, counts, ctx, e)
                                  : parse_tree(&c, tree, ctx, e);
    }
    cJSON_Delete(tree);
    if (rc) {
        completion_release(&c);
        api_one_line(e);
        return rc;
    }
    *ret = c;
    return 0;
}

int completion_parse(struct completion *ret, const char *body, size_t len,
                     const struct api_context *ctx, struct err *e)
{
    return body_parse(ret, API_COMPLETIONS, false, body, len, ctx, e);
}

int chat_parse(struct completion *ret, const char *body, size_t len, const struct api_context *ctx,
               struct err *e)
{
    return body_parse(ret, API_CHAT, false, body, len, ctx, e);
}

int responses_parse(struct completion *ret, const char *body, size_t len,
                    const struct api_context *ctx, struct err *e)
{
    return body_parse(ret, API_RESPONSES, false, body, len, ctx, e);
}

int messages_parse(struct completion *ret, const char *body, size_t len,
                   const struct api_context *ctx, struct err *e)
{
    return body_parse(ret, API_MESSAGES, false, body, len, ctx, e);
}

int count_parse(enum api_kind api, int32_t *ret_n, char ignored[256], const char *body, size_t len,
                const struct api_context *ctx, struct err *e)
{
    struct completion c;
    int rc = body_parse(&c, api, true, body, len, ctx, e);

    if (rc) {
        return rc;
    }
    *ret_n = c.prompt[0].n;
    memcpy(ignored, c.ignored, sizeof(c.ignored));
    completion_release(&c);
    return 0;
}

void completion_release(struct completion *c)
{
    for (int32_t i = 0; i < c->n_prompts; i++) {
        free(c->prompt[i].id);
    }
    free(c->prompt);
    c->prompt = NULL;
    c->n_prompts = 0;
    chat_tools_release(&c->tools);
    free(c->echo);
    c->echo = NULL;
    gen_params_release(&c->params);
}
