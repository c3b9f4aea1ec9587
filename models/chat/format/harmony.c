/* See format.h: answers as a row of messages, each with a header that names its channel
 * and recipient (OpenAI's harmony):
 *
 *     <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary
 *     to=functions.f <|constrain|>json<|message|>{…}<|call|>
 *
 * The channel "analysis" is reasoning, others are content; a message to a function is a
 * call, one to anything else is dropped, as nothing here can take it. The prompt ends
 * behind <|start|>assistant, so that the answer begins inside a header. */
#include <string.h>

#include "models/chat/format/format.h"

enum { H_START, H_HEADER, H_CONTENT, H_REASONING, H_DROP, H_BEGIN, H_CALL, H_DONE };
enum { HEADER_BYTES = 512 };

static const char MESSAGE[] = "<|message|>", CHANNEL[] = "<|channel|>";
static const char *const ENDS[] = {"<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>"};

static bool is_space(char c)
{
    return c == ' ' || c == '\n' || c == '\r' || c == '\t';
}

static bool may_begin(const struct buf *word)
{
    static const char *const BEGINS[] = {"<|channel|>", "<|start|>",     "<|message|>",
                                         "<|end|>",     "<|constrain|>", "to="};
    const char *text = word->data + strspn(word->data, " \n");

    for (size_t i = 0; i < ARRAY_LEN(BEGINS); i++) {
        if (strncmp(text, BEGINS[i], MIN(strlen(text), strlen(BEGINS[i]))) == 0) {
            return true;
        }
    }
    return false;
}

static void content(struct chat_parser *p)
{
    parser_put(p, CHAT_CONTENT, p->word.data, p->word.len);
    buf_clear(&p->word);
    p->step = H_CONTENT;
}

/* A header is whole: what its message is. */
static void take_header(struct chat_parser *p)
{
    const char *header = p->word.data, *to = strstr(header, "to="), *channel = header;
    bool function = false, other = false;

    for (const char *at = header; (at = strstr(at, CHANNEL)) != NULL;) {
        at += strlen(CHANNEL);
        channel = at;
    }
    if (to) {
        size_t len = strcspn(to + 3, " \n<");
        len = MIN(len, sizeof(p->name) - 1);
        memcpy(p->name, to + 3, len);
        p->name[len] = '\0';
        function = strncmp(p->name, "functions.", 10) == 0;
        if (function) {
            memmove(p->name, p->name + 10, strlen(p->name + 10) + 1);
        }
        bool known = tools_find(p->tools, p->name) >= 0;
        function = p->calls_on && (function || known);
        other = !function && strcmp(p->name, "assistant") != 0 && strcmp(p->name, "user") != 0;
    }
    p->step = strncmp(channel, "analysis", 8) == 0 ? H_REASONING : H_CONTENT;
    if (other) {
        p->step = H_DROP;
    } else if (function) {
        p->step = call_begin(p, p->name, NULL) ? H_BEGIN : H_DROP;
        memset(&p->scan, 0, sizeof(p->scan));
    }
    buf_clear(&p->word);
}

static void header_byte(struct chat_parser *p, char c)
{
    buf_putc(&p->word, c);
    if (p->word.failed) {
        p->nomem = true;
        return;
    }
    if (p->step == H_START && !may_begin(&p->word)) {
        content(p);
        return;
    }
    size_t len = sizeof(MESSAGE) - 1;
    if (p->word.len >= len && memcmp(p->word.data + p->word.len - len, MESSAGE, len) == 0) {
        take_header(p);
    } else if (p->word.len >= HEADER_BYTES) {
        content(p);
    }
}

static void arguments_byte(struct chat_parser *p, char c)
{
    if (p->step == H_DONE || (p->step == H_BEGIN && is_space(c))) {
        return;
    }
    if (p->step == H_BEGIN && c != '{') {
        call_break(p);
        p->step = H_DONE;
        return;
    }
    p->step = H_CALL;
    enum json_scan_rc rc = call_json_byte(p, c);
    if (rc == SCAN_BAD || rc == SCAN_DONE) {
        p->step = H_DONE;
    }
}

static void message_byte(struct chat_parser *p, char c)
{
    if (p->step >= H_BEGIN) {
        arguments_byte(p, c);
    } else if (p->step != H_DROP) {
        parser_put(p, p->step == H_REASONING ? CHAT_REASONING : CHAT_CONTENT, &c, 1);
    }
}

/* A message has ended. */
static void message_end(struct chat_parser *p)
{
    if (p->step == H_BEGIN) {
        call_arguments(p, "{}", 2);
        call_end(p);
    } else if (p->step == H_CALL) {
        call_break(p);
    }
    p->step = H_HEADER;
}

void harmony_byte(struct chat_parser *p, char c)
{
    int32_t which;

    p->step = p->step == HARMONY_REASONING ? H_REASONING : p->step;
    if (p->step <= H_HEADER) {
        header_byte(p, c);
        return;
    }
    if (!p->n_hold && c != '<') {
        message_byte(p, c);
        return;
    }
    p->hold[p->n_hold++] = c;
    while (p->n_hold) {
        enum mark_rc rc = parser_mark(p, ENDS, ARRAY_LEN(ENDS), &which);
        if (rc == MARK_PART) {
            return;
        }
        if (rc == MARK_WHOLE) {
            p->n_hold = 0;
            message_end(p);
            if (which == 4) {
                buf_puts(&p->word, CHANNEL);
            }
            return;
        }
        message_byte(p, p->hold[0]);
        memmove(p->hold, p->hold + 1, (size_t)--p->n_hold);
    }
}

void harmony_end(struct chat_parser *p)
{
    if (p->step > H_HEADER) {
        for (int32_t i = 0; i < p->n_hold; i++) {
            message_byte(p, p->hold[i]);
        }
    } else if (p->step == H_START && p->word.len) {
        content(p);
    }
    if (p->step == H_BEGIN) {
        message_end(p);
    }
}

bool harmony_reasoning(const struct chat_parser *p)
{
    return p->step == H_REASONING || p->step == HARMONY_REASONING;
}
