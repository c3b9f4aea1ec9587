/* Bodies of /v1/responses and /v1/messages: whatever the bytes, a body is refused with
 * one sentence, or what it became is inside every limit. The first byte: 0x01 messages,
 * else responses; 0x02: its tokens are only counted; 0x40: a template that refuses
 * system messages behind the first; 0x80: unknown fields refused. At its end it says
 * how many bodies were read of each API. max_len: 768 covers:
 * server/api/agents/translate.c server/api/agents/responses.c
 * server/api/agents/responses_input.c server/api/agents/messages.c
 * server/api/agents/messages_input.c */
#include <stdio.h>

#include "server/api/json_fields.h"
#include "server/stream/agents/dialects.h"
#include "tests/fuzz/json_mutate.h"
#include "tests/unit/api_context.h"

#define CHECK(x)                                                       \
    do {                                                               \
        if (!(x)) {                                                    \
            fprintf(stderr, "fuzz_translate: %s does not hold\n", #x); \
            abort();                                                   \
        }                                                              \
    } while (0)

/* ---- bodies by their trees ---- */

/* What stands in bodies besides the names of the tables' fields. */
static const char *const values[] = {
    "type",
    "role",
    "content",
    "text",
    "name",
    "id",
    "call_id",
    "arguments",
    "output",
    "input",
    "user",
    "assistant",
    "system",
    "developer",
    "tool",
    "message",
    "reasoning",
    "function_call",
    "function_call_output",
    "item_reference",
    "custom_tool_call",
    "input_text",
    "output_text",
    "input_image",
    "refusal",
    "summary",
    "summary_text",
    "reasoning_text",
    "encrypted_content",
    "tool_use",
    "tool_use_id",
    "tool_result",
    "is_error",
    "thinking",
    "redacted_thinking",
    "signature",
    "server_tool_use",
    "web_search_tool_result",
    "image",
    "document",
    "function",
    "custom",
    "web_search",
    "parameters",
    "input_schema",
    "description",
    "strict",
    "format",
    "schema",
    "json_schema",
    "json_object",
    "effort",
    "none",
    "low",
    "high",
    "auto",
    "any",
    "required",
    "allowed_tools",
    "mode",
    "tools",
    "disable_parallel_tool_use",
    "enabled",
    "disabled",
    "adaptive",
    "budget_tokens",
    "verbosity",
    "message.output_text.logprobs",
    "x-anthropic-billing-header: a\nb",
    "object",
    "string",
    "properties",
    "{}",
    "{\"a\":1}",
    "m",
};

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max, unsigned seed)
{
    enum { MOST = 128 };
    const struct field_table *tables[] = {&responses_fields, &messages_fields};
    const char *words[MOST];
    int n = 0;

    if (size < 1 || max < 2 || seed % 64 == 0) {
        return LLVMFuzzerMutate(data, size, max);
    }
    for (; n < (int)ARRAY_LEN(values); n++) {
        words[n] = values[n];
    }
    const struct field_table *t = tables[data[0] & 1];
    for (int i = 0; i < t->n && n < MOST; i++) {
        words[n++] = t->field[i].name;
    }
    return 1 + mutate_json(data + 1, size - 1, max - 1, seed, words, n);
}

/* ---- what is counted ---- */

static long n_bodies[2], n_read[2];

static void say_counts(void)
{
    fprintf(stderr, "fuzz_translate: %ld of %ld bodies of responses read, %ld of %ld of messages\n",
            n_read[0], n_bodies[0], n_read[1], n_bodies[1]);
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc, (void)argv;
    return atexit(say_counts);
}

/* ---- what must hold ---- */

/* Templates that write down everything they are given, which must be JSON. */
static int render_all(void *arg, const char *context, size_t len, struct buf *out, struct err *e)
{
    (void)arg;
    CHECK(json_check(context, len, NULL) == 0);
    return buf_append(out, context, len) == 0 ? 0 : err_nomem(e, "the chat");
}

static int render_strictly(void *arg, const char *context, size_t len, struct buf *out,
                           struct err *e)
{
    static const char late[] = "},{\"role\":\"system\"";

    if (memmem(context, len, late, sizeof(late) - 1)) {
        return err_set(e, ERR_INVALID, "the chat template says no");
    }
    return render_all(arg, context, len, out, e);
}

/* What an answer repeats of the request must be members of an object. */
static void check_echo(const char *echo)
{
    struct buf b;

    buf_init(&b, 1 << 26);
    buf_printf(&b, "{%s\"end\":0}", echo);
    CHECK(!b.failed && json_check(b.data, b.len, NULL) == 0);
    buf_release(&b);
}

static void check_refusal(const struct err *e)
{
    struct buf b;

    CHECK(e->code < 0 && e->text[0] && !strchr(e->text, '\n'));
    buf_init(&b, 1 << 16);
    messages_error_body(&b, http_status_of(e->code), e->param, e->text);
    CHECK(!b.failed && json_check(b.data, b.len, NULL) == 0);
    buf_release(&b);
}

static void check_completion(struct completion *c)
{
    const struct gen_params *p = &c->params;

    CHECK(c->chat && c->n_prompts == 1 && c->prompt[0].n >= 1 && p->n == 1 && p->best_of == 1);
    CHECK(p->max_tokens >= 1 && c->prompt[0].n + p->max_tokens <= test_context.info.max_model_len);
    CHECK(p->n_logprobs >= -1 && p->n_logprobs <= LIMIT_LOGPROBS && p->beam_width == 0 && !p->echo);
    CHECK(p->n_logprobs == -1 || c->api == API_RESPONSES);
    CHECK((c->echo != NULL) == (c->api == API_RESPONSES));
    if (c->echo) {
        check_echo(c->echo);
    }
    completion_release(c);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct api_context context = test_context;
    struct completion c;
    struct err e = {0};
    char ignored[256];
    int32_t n = 0;

    if (size < 1) {
        return 0;
    }
    const char *body = (const char *)data + 1;
    n_bodies[data[0] & 1]++;
    enum api_kind api = data[0] & 1 ? API_MESSAGES : API_RESPONSES;
    context.reject_unknown = data[0] & 0x80;
    context.render_chat = data[0] & 0x40 ? render_strictly : render_all;
    context.chat.knows_tools = context.chat.knows_calls = context.chat.calls = true;
    context.chat.object_arguments = context.chat.null_content = true;
    if (data[0] & 2) {
        if (count_parse(api, &n, ignored, body, size - 1, &context, &e) == 0) {
            CHECK(n >= 1);
            n_read[data[0] & 1]++;
        } else {
            check_refusal(&e);
        }
        return 0;
    }
    int rc = api == API_MESSAGES ? messages_parse(&c, body, size - 1, &context, &e)
                                 : responses_parse(&c, body, size - 1, &context, &e);
    if (rc == 0) {
        n_read[data[0] & 1]++;
        check_completion(&c);
    } else {
        check_refusal(&e);
    }
    return 0;
}
