/* HTTP bodies: whatever the bytes, a body is refused with one sentence, or what it
 * became is inside every limit. The first byte chooses: 0 completion, 1 chat, 2
 * tokenize, 3 detokenize (of its lowest bits); 0x80: unknown fields refused; 0x40: a
 * model that fills gaps (suffix). covers: server/api/api.c server/api/api_chat.c
 * server/api/api_fields.c server/api/api_values.c server/api/api_lists.c
 * server/api/api_prompt.c server/api/json_fields.c server/api/json_names.c */
#include <math.h>
#include <stdio.h>

#include "tests/unit/api_context.h"

#define CHECK(x)                                                 \
    do {                                                         \
        if (!(x)) {                                              \
            fprintf(stderr, "fuzz_api: %s does not hold\n", #x); \
            abort();                                             \
        }                                                        \
    } while (0)

static void check_ids(const int32_t *id, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        CHECK(id[i] >= 0 && id[i] < test_context.info.vocab);
    }
}

static void check_params(const struct gen_params *p)
{
    CHECK(p->n >= 1 && p->n <= LIMIT_CHOICES && p->best_of >= p->n && p->best_of <= LIMIT_CHOICES);
    CHECK(p->beam_width == 0 || (p->beam_width >= p->n && p->beam_width <= LIMIT_CHOICES));
    CHECK(p->max_tokens >= (p->echo ? 0 : 1) && p->min_tokens >= 0 &&
          p->min_tokens <= p->max_tokens);
    CHECK(p->temperature >= 0 && p->temperature <= 2 && p->top_p > 0 && p->top_p <= 1 &&
          p->min_p >= 0 && p->min_p <= 1);
    CHECK(p->top_k >= 0 && isfinite(p->length_penalty) && isfinite(p->repetition_penalty) &&
          p->repetition_penalty > 0);
    CHECK(p->n_logprobs >= -1 && p->n_logprobs <= 20 && p->n_prompt_logprobs >= -1 &&
          p->n_prompt_logprobs <= 20);
    check_ids(p->stop_token, p->n_stop_token);
    check_ids(p->allowed_token, p->n_allowed);
    for (int32_t i = 0; i < p->n_bias; i++) {
        check_ids(&p->bias[i].token, 1);
        CHECK(p->bias[i].bias >= -100 && p->bias[i].bias <= 100);
    }
    for (int32_t i = 0; i < p->n_stop; i++) {
        CHECK(p->stop_len[i] > 0 && p->stop[i][p->stop_len[i]] == '\0');
    }
}

static void check_completion(struct completion *c)
{
    CHECK(c->n_prompts >= 1 && c->n_prompts <= LIMIT_PROMPTS);
    for (int32_t i = 0; i < c->n_prompts; i++) {
        CHECK(c->prompt[i].n >= 1 &&
              c->prompt[i].n + c->params.max_tokens <= test_context.info.max_model_len);
        check_ids(c->prompt[i].id, c->prompt[i].n);
    }
    check_params(&c->params);
    completion_release(c);
}

/* A template that writes down everything it is given, and refuses what holds a '%'. */
static int render_chat(void *arg, const char *context, size_t len, struct buf *out, struct err *e)
{
    (void)arg;
    if (memchr(context, '%', len)) {
        return err_set(e, ERR_INVALID, "the chat template says no");
    }
    return buf_append(out, context, len) == 0 ? 0 : err_nomem(e, "the chat");
}

static void check_refusal(const struct err *e)
{
    CHECK(e->code < 0 && e->text[0] && !strchr(e->text, '\n'));
    CHECK(http_status_of(e->code) >= 400);
    struct buf b;
    buf_init(&b, 1 << 16);
    api_error(&b, http_status_of(e->code), e->param, e->text);
    CHECK(!b.failed);
    buf_release(&b);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct api_context context = test_context;
    struct completion c;
    struct tokenize t;
    struct err e = {0};

    if (size < 1) {
        return 0;
    }
    const char *body = (const char *)data + 1;
    context.reject_unknown = data[0] & 0x80;
    context.render_chat = render_chat;
    if (data[0] & 0x40) {
        context.fim = (struct engine_fim){
            .there = true, .prefix = 2, .suffix = 3, .middle = 4, .end = 5, .bos = 1};
    }
    switch (data[0] & 3) {
    default:
        if (completion_parse(&c, body, size - 1, &context, &e) == 0) {
            check_completion(&c);
        } else {
            check_refusal(&e);
        }
        break;
    case 1:
        if (chat_parse(&c, body, size - 1, &context, &e) == 0) {
            check_completion(&c);
        } else {
            check_refusal(&e);
        }
        break;
    case 2:
        if (tokenize_parse(&t, body, size - 1, &context, &e) == 0) {
            tokenize_release(&t);
        } else {
            check_refusal(&e);
        }
        break;
    case 3:
        if (detokenize_parse(&t, body, size - 1, &context, &e) == 0) {
            tokenize_release(&t);
        } else {
            check_refusal(&e);
        }
    }
    return 0;
}
