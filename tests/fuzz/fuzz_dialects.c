/* Answers of agents' APIs: whatever a model writes and in whatever order, every event
 * and every body is valid JSON, events are numbered, and items that begin also end. The
 * first byte: 0x01 messages, else responses; 0x02: one body; the next ones give the
 * events, each a kind, a length and a text. covers: server/stream/agents/answer_items.c
 * server/stream/agents/responses_dialect.c server/stream/agents/messages_dialect.c */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/api/json_fields.h"
#include "server/stream/agents/dialects.h"

#define CHECK(x)                                                      \
    do {                                                              \
        if (!(x)) {                                                   \
            fprintf(stderr, "fuzz_dialects: %s does not hold\n", #x); \
            abort();                                                  \
        }                                                             \
    } while (0)

static const struct usage USAGE = {.prompt_tokens = 10, .completion_tokens = 4, .cached_tokens = 6};

static int count(const char *text, const char *word)
{
    int n = 0;

    for (const char *at = text; (at = strstr(at, word)); at++) {
        n++;
    }
    return n;
}

/* Every event has two lines, whose names are the same; JSON has no line ends inside. */
static void check_events(const char *text, bool numbered)
{
    int64_t n = 0;

    while (*text) {
        const char *line = strchr(text, '\n'), *end = strstr(text, "\n\n");
        CHECK(line && end);
        if (strncmp(text, "data: [DONE]", 12) == 0) {
            CHECK(end[2] == '\0');
            return;
        }
        CHECK(strncmp(text, "event: ", 7) == 0 && strncmp(line, "\ndata: ", 7) == 0);
        CHECK(json_check(line + 7, (size_t)(end - line) - 7, NULL) == 0);
        char want[64];
        snprintf(want, sizeof(want), "\"sequence_number\":%lld,", (long long)n++);
        CHECK(!numbered || memmem(line, (size_t)(end - line), want, strlen(want)));
        text = end + 2;
    }
}

static void add(const struct dialect *d, struct buf *b, void *state, const uint8_t **at,
                const uint8_t *end)
{
    static const char *const names[] = {"look", "n\"ame", ""};
    size_t len = (size_t)(*at)[1] % 64;
    uint8_t kind = (*at)[0];

    *at += 2;
    len = (size_t)(end - *at) < len ? (size_t)(end - *at) : len;
    struct answer_event e = {.kind = (enum answer_kind)(kind % 5),
                             .text = (const char *)*at,
                             .len = len,
                             .name = names[kind / 5 % 3],
                             .id = "call_7"};
    CHECK(d->event(b, state, 0, &e) == 0);
    *at += len;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct buf b;

    if (size < 2) {
        return 0;
    }
    bool messages = data[0] & 1, whole = data[0] & 2;
    const struct dialect *d = messages ? &messages_dialect : &responses_dialect;
    struct answer_info info = {.id = messages ? "msg_1" : "resp_1",
                               .model = "m\"",
                               .fingerprint = "fp",
                               .n_choices = 1,
                               .whole = whole,
                               .echo = messages ? "" : "\"store\":false,"};
    const uint8_t *at = data + 2, *end = data + size;
    void *state = calloc(1, d->state_bytes);
    buf_init(&b, 1 << 24);
    CHECK(state && d->init(state, &info, NULL) == 0);
    CHECK(d->begin(&b, state, &USAGE) == 0);
    while (end - at > 2) {
        add(d, &b, state, &at, end);
    }
    if (data[1] & 0x80 && !whole) {
        CHECK(d->error(&b, state, 500, "it \"failed\"") == 0);
    } else {
        CHECK(d->finish(&b, state, 0, (enum finish_reason)(1 + data[1] % 5),
                        data[1] & 0x40 ? "st\"op" : NULL, data[1] & 0x20) == 0);
        CHECK(d->end(&b, state, &USAGE) == 0);
        CHECK(whole || !messages ||
              count(b.data, "event: content_block_start\n") ==
                  count(b.data, "event: content_block_stop\n"));
        CHECK(whole || messages ||
              count(b.data, "event: response.output_item.added\n") ==
                  count(b.data, "event: response.output_item.done\n"));
    }
    CHECK(!b.failed);
    if (whole) {
        CHECK(json_check(b.data, b.len, NULL) == 0);
    } else {
        check_events(b.data, !messages);
    }
    d->release(state);
    free(state);
    buf_release(&b);
    return 0;
}
