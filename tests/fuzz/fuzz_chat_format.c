/* Answers in every chat format: however an answer is cut, it gives the same content,
 * reasoning and calls, and the arguments of a call that has ended are a JSON object.
 * The first byte is the format, the second the mode; the rest is the answer. It is read
 * whole, byte by byte, and in two pieces: cut at one place, or one input of 64 at each.
 * max_len: 256
 * covers:
 * models/chat/format/parser.c models/chat/format/body_object.c
 * models/chat/format/body_named.c models/chat/format/body_tagged.c
 * models/chat/format/body_literal.c models/chat/format/harmony.c
 * models/chat/format/literal.c models/chat/format/json_scan.c
 * models/chat/format/schema.c models/chat/format/events.c */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config/base/json.h"
#include "models/chat/format/format.h"

#define CHECK(x)                                                         \
    do {                                                                 \
        if (!(x)) {                                                      \
            fprintf(stderr, "fuzz_chat_format: %s does not hold\n", #x); \
            abort();                                                     \
        }                                                                \
    } while (0)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { EVERY_CUT = 64, CUTS = 1 };

static char schema[] =
    "{\"type\":\"object\",\"properties\":{\"s\":{\"type\":\"string\"},\"i\":{\"type\":\"integer\"},"
    "\"b\":{\"type\":\"boolean\"},\"o\":{\"type\":\"object\"},\"l\":{\"type\":\"array\"},"
    "\"u\":{\"type\":[\"string\",\"null\"]},\"r\":{\"$ref\":\"#/$defs/n\"}},"
    "\"$defs\":{\"n\":{\"type\":\"number\"}}}";
static char names[2][8] = {"f", "get"};
static struct chat_tool tool[] = {{names[0], schema, false}, {names[1], NULL, false}};
static const struct chat_tools tools = {.tool = tool, .n = 2, .parallel = true};

struct answer {
    struct buf events; /* text of each kind, merged: equal bytes, equal events */
    struct buf arguments;
    int kind;
    bool open;
};

static void valid_object(const struct buf *b)
{
    struct err e = {0};
    struct json j;

    CHECK(b->len >= 2 && b->data[0] == '{');
    CHECK(json_scan_all(b->data, b->len));
    json_init(&j, b->data, b->len, "arguments", &e);
    CHECK(json_peek(&j) == JSON_OBJECT);
}

static void take(void *arg, const struct chat_event *ev)
{
    struct answer *a = arg;

    if (a->kind != (int)ev->kind || ev->kind == CHAT_CALL || ev->kind == CHAT_CALL_END) {
        buf_printf(&a->events, "%c%d", 0, (int)ev->kind);
        a->kind = (int)ev->kind;
    }
    if (ev->kind == CHAT_CALL) {
        CHECK(ev->name && ev->name[0]);
        buf_printf(&a->events, "%s|%s", ev->name, ev->id ? ev->id : "");
        buf_clear(&a->arguments);
        a->open = true;
    } else if (ev->kind == CHAT_CALL_END) {
        CHECK(a->open);
        valid_object(&a->arguments);
        a->open = false;
    } else {
        CHECK(ev->len > 0);
        buf_append(&a->events, ev->text, ev->len);
        if (ev->kind == CHAT_ARGUMENTS) {
            CHECK(a->open);
            buf_append(&a->arguments, ev->text, ev->len);
        }
    }
}

static void parse(struct answer *a, const struct chat_format *f, uint8_t mode, const char *text,
                  size_t len, size_t cut, bool bytes)
{
    struct chat_parser *p;
    struct err e = {0};

    buf_init(&a->events, (size_t)1 << 26);
    buf_init(&a->arguments, (size_t)1 << 26);
    a->kind = -1;
    a->open = false;
    CHECK(chat_parser_new(&p, f, mode & 2 ? NULL : &tools, mode & 1, &e) == 0);
    for (size_t i = 0; bytes && i < len; i++) {
        CHECK(chat_parser_feed(p, text + i, 1, take, a) == 0);
    }
    if (!bytes) {
        CHECK(chat_parser_feed(p, text, cut, take, a) == 0);
        CHECK(chat_parser_feed(p, text + cut, len - cut, take, a) == 0);
    }
    CHECK(chat_parser_end(p, take, a) == 0);
    CHECK(!(mode & 2) || chat_parser_calls(p) == 0);
    chat_parser_free(p);
    CHECK(!a->events.failed && !a->arguments.failed);
}

static void release(struct answer *a)
{
    buf_release(&a->events);
    buf_release(&a->arguments);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct answer whole, other;
    int32_t n;
    const struct chat_format *f = chat_formats(&n);

    if (size < 3) {
        return 0;
    }
    f += data[0] % n;
    const char *text = (const char *)data + 2;
    size_t len = size - 2;
    uint64_t drawn = name_hash(text, len);
    bool every = drawn % EVERY_CUT == 0;
    parse(&whole, f, data[1], text, len, 0, false);
    for (size_t i = 0; i <= (every ? len : CUTS); i++) {
        size_t cut = every || !i ? i : (drawn >> 8 * i) % len;
        parse(&other, f, data[1], text, len, cut, i == 0);
        CHECK(other.events.len == whole.events.len);
        CHECK(!whole.events.len ||
              memcmp(other.events.data, whole.events.data, whole.events.len) == 0);
        release(&other);
    }
    release(&whole);
    return 0;
}
