/* Answers as they are put together: whatever the pieces, each event is one line of JSON
 * that gives back the text, and so is the body that is collected of the same pieces.
 * The first two bytes are the style; then pieces: a byte of flags, a byte of length,
 * the text. covers: server/stream/sse.c server/stream/collect.c */
#include <math.h>
#include <stdio.h>

#include "config/base/utf8.h"
#include "server/api/json_fields.h"
#include "server/stream/collect.h"
#include "tests/unit/api_context.h"

#define CHECK(x)                                                 \
    do {                                                         \
        if (!(x)) {                                              \
            fprintf(stderr, "fuzz_sse: %s does not hold\n", #x); \
            abort();                                             \
        }                                                        \
    } while (0)

enum { MAX_TOKENS = 3, MAX_TOP = 2 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct piece {
    struct output o;
    struct token_out token[MAX_TOKENS];
    int32_t top_id[MAX_TOP];
    float top_logprob[MAX_TOP];
    char text[256];
};

/* Whole characters without NUL, of at most `len` bytes of what is left. */
static size_t take_text(char *to, const uint8_t *data, size_t len)
{
    size_t at = 0;

    for (size_t n; at < len && data[at] && (n = utf8_char_len(data + at, len - at)) > 0;) {
        at += n;
    }
    memcpy(to, data, at);
    to[at] = '\0';
    return at;
}

/* Token 0 is the byte NUL, which a string that cJSON reads cannot hold. */
static int32_t token_of(int32_t number)
{
    return 1 + number % (test_context.info.vocab - 1);
}

static float logprob_of(uint8_t b)
{
    return b == 255 ? NAN : b == 254 ? -INFINITY : -(float)b / 7;
}

/* The next piece of the input; false: no more. */
static bool next_piece(struct piece *p, const uint8_t **at, const uint8_t *end)
{
    if (end - *at < 3) {
        return false;
    }
    uint8_t flags = (*at)[0], number = (*at)[1];
    size_t len = MIN((size_t)(*at)[2], (size_t)(end - *at - 3));
    size_t n = take_text(p->text, *at + 3, MIN(len, sizeof(p->text) - 1));
    *at += 3 + len;
    for (int i = 0; i < MAX_TOP; i++) {
        p->top_id[i] = token_of(number + i * 7);
        p->top_logprob[i] = logprob_of((uint8_t)(number + i));
    }
    for (int i = 0; i < MAX_TOKENS; i++) {
        p->token[i] = (struct token_out){.id = token_of(number * 3 + i),
                                         .text_offset = number,
                                         .logprob = logprob_of((uint8_t)(number + i)),
                                         .n_top = flags % (MAX_TOP + 1),
                                         .top_id = p->top_id,
                                         .top_logprob = p->top_logprob};
    }
    p->o = (struct output){.text = p->text,
                           .text_len = n,
                           .token = p->token,
                           .n_tokens = flags / 4 % (MAX_TOKENS + 1),
                           .prompt = flags & 0x80,
                           .finish = flags & 0x40 ? (enum finish_reason)(number % 3) : FINISH_NONE,
                           .stop_string = flags & 0x20 ? p->text : NULL,
                           .stop_string_len = flags & 0x20 ? (int32_t)strlen(p->text) : 0,
                           .stop_token = flags & 0x10 ? number : -1};
    return true;
}

/* choices[0] of the one event in `b`. */
static cJSON *read_event(struct buf *b)
{
    struct err e = {0};

    CHECK(!b->failed && b->len > 8 && memcmp(b->data, "data: ", 6) == 0 &&
          memcmp(b->data + b->len - 2, "\n\n", 2) == 0);
    CHECK(!memchr(b->data, '\n', b->len - 2));
    CHECK(json_check(b->data + 6, b->len - 8, &e) == 0);
    cJSON *tree = cJSON_ParseWithLength(b->data + 6, b->len - 8);
    CHECK(tree);
    return tree;
}

static const char *text_of(const cJSON *tree, bool chat, const char *holder)
{
    const cJSON *choice = cJSON_GetArrayItem(cJSON_GetObjectItem(tree, "choices"), 0);
    const cJSON *text = chat ? cJSON_GetObjectItem(cJSON_GetObjectItem(choice, holder), "content")
                             : cJSON_GetObjectItem(choice, "text");

    CHECK(cJSON_IsString(text));
    return text->valuestring;
}

/* Made in portions an event is the same. */
static void check_portions(const struct buf *whole, const struct sse_style *s,
                           const struct piece *p, const struct prompt_ids *ids,
                           const struct usage *total)
{
    struct sse_cursor c = {0};
    int32_t portion = 1 + p->o.n_tokens, units = portion;
    struct buf b;

    if (p->o.finish == FINISH_NONE && !s->logprobs && !s->token_ids && !s->continuous_usage &&
        !p->o.prompt) {
        return; /* plain text has no portions */
    }
    buf_init(&b, 1 << 20);
    sse_open(&b, s, 0);
    while (!sse_middle(&b, s, &p->o, ids, &c, &units)) {
        units = portion;
    }
    CHECK(sse_close(&b, s, total) == 0);
    CHECK(b.len == whole->len && memcmp(b.data, whole->data, b.len) == 0);
    sse_cursor_release(&c);
    buf_release(&b);
}

static void check_event(const struct sse_style *s, const struct piece *p)
{
    struct usage total = {3, 4, 1};
    int32_t ids[] = {0, 1, 2};
    struct prompt_ids prompt = {ids, 3};
    struct buf b;

    buf_init(&b, 1 << 20);
    CHECK(sse_piece(&b, s, 0, &p->o, s->token_ids ? ids : NULL, 3, &total) == 0);
    check_portions(&b, s, p, s->token_ids ? &prompt : NULL, &total);
    cJSON *tree = read_event(&b);
    CHECK(strcmp(text_of(tree, s->chat, "delta"), p->text) == 0);
    cJSON_Delete(tree);
    buf_release(&b);
}

/* What stands around the pieces. */
static void check_frame(const struct sse_style *s, int32_t index)
{
    struct usage total = {3, 4, 1};
    struct buf b;

    buf_init(&b, 1 << 16);
    CHECK(sse_usage(&b, s, &total) == 0);
    cJSON_Delete(read_event(&b));
    buf_clear(&b);
    if (s->chat) {
        CHECK(sse_role(&b, s, index) == 0);
        cJSON_Delete(read_event(&b));
        buf_clear(&b);
    }
    CHECK(sse_error(&b, 500, "it \"broke\"\n") == 0);
    cJSON_Delete(read_event(&b));
    buf_clear(&b);
    CHECK(sse_keepalive(&b) == 0 && sse_done(&b) == 0 &&
          strcmp(b.data, ": keepalive\n\ndata: [DONE]\n\n") == 0);
    buf_release(&b);
}

static void check_body(const struct sse_style *s, struct collector *c, const char *text)
{
    struct usage total = {3, 4, 1};
    int32_t ids[] = {0, 1, 2};
    struct prompt_ids prompt = {ids, 3};
    struct err e = {0};
    struct buf b;

    buf_init(&b, 1 << 22);
    CHECK(collector_body(&b, c, s, &prompt, 1, &total) == 0);
    CHECK(json_check(b.data, b.len, &e) == 0);
    cJSON *tree = cJSON_ParseWithLength(b.data, b.len);
    CHECK(tree && strcmp(text_of(tree, s->chat, "message"), text) == 0);
    cJSON_Delete(tree);
    buf_release(&b);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 2) {
        return 0;
    }
    uint8_t flags = data[0];
    struct sse_style events = {.chat = flags & 1,
                               .logprobs = flags & 2,
                               .echo_logprobs = flags & 4,
                               .prompt_logprobs = flags & 8,
                               .token_ids = flags & 16,
                               .continuous_usage = flags & 32,
                               .token_bytes = test_token_bytes};
    struct sse_style whole = events;
    whole.whole = true;
    struct collector c;
    struct buf text;
    buf_init(&text, 1 << 20);
    CHECK(sse_style_init(&events, "cmpl-1", 5, "m\"x", "fp", NULL) == 0);
    CHECK(sse_style_init(&whole, "cmpl-1", 5, "m\"x", "fp", NULL) == 0);
    collector_init(&c, 1);
    struct piece p;
    for (const uint8_t *at = data + 2; next_piece(&p, &at, data + size);) {
        check_event(&events, &p);
        CHECK(collector_add(&c, &whole, 0, &p.o) == 0);
        CHECK(buf_append(&text, p.text, p.o.text_len) == 0);
    }
    check_frame(&events, data[1]);
    check_body(&whole, &c, text.data ? text.data : "");
    buf_release(&text);
    collector_release(&c);
    sse_style_release(&events);
    sse_style_release(&whole);
    return 0;
}
