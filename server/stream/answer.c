/* Parsers and calls of an answer's choices. */
#include "server/stream/answer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    TEXT_A_UNIT = 64,    /* bytes of text that are read for one unit of work */
    TOKENS_AT_ONCE = 64, /* tokens that the dialect gets at once */
    MODEL_IDS = 64,      /* calls of a choice that keep the id that the model gave */
    MADE_ID_CHARS = 24,
};

struct answer_choice {
    struct chat_parser *parser; /* owned; NULL before the first output */
    int32_t calls;              /* calls that have begun */
    uint64_t *id_hash;          /* [MODEL_IDS] owned; of the ids that the model gave, or NULL */
    int32_t n_ids;
    bool skipping; /* the present call is left out: only one is allowed */
    bool open;     /* the last call is not complete */
};

struct answer {
    const struct engine *engine;
    const struct dialect *dialect;
    struct answer_info info; /* `id` and `echo` are owned */
    char *id, *echo;
    void *state; /* the dialect's; owned */
    bool initialised, begun;
    struct chat_tools tools; /* owned; the parsers use them */
    bool parsed;             /* the model's format reads the text; else all of it is content */
    bool opens_reasoning, one_call;
    int32_t id_chars;             /* of the ids that are made here */
    uint64_t id_seed;             /* state of make_id */
    struct usage usage;           /* the dialect holds a pointer to it */
    int32_t reasoning_tokens;     /* of the outputs so far */
    struct answer_choice *choice; /* [info.n_choices] */
};

/* ---- life ---- */

/* The next number of a sequence that looks random (splitmix64). */
static uint64_t next_number(uint64_t *state)
{
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);

    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

/* Different in every answer of the process, and in other processes most likely. */
static uint64_t new_seed(const struct answer_info *info)
{
    static _Atomic uint64_t answers;
    uint64_t seed = (uint64_t)clock_us() ^ (uint64_t)info->created << 32;

    for (const char *c = info->id; *c; c++) {
        seed = (seed ^ (unsigned char)*c) * UINT64_C(0x100000001b3);
    }
    return seed + (atomic_fetch_add(&answers, 1) << 20);
}

int answer_new(struct answer **ret, const struct engine *engine, const struct dialect *d,
               const struct answer_info *info, struct completion *c, struct err *e)
{
    struct answer *a = calloc(1, sizeof(*a));
    struct engine_chat chat;

    if (!a) {
        return err_nomem(e, "an answer");
    }
    a->engine = engine;
    a->dialect = d;
    a->info = *info;
    a->info.id = a->id = strdup(info->id);
    a->echo = c->echo;
    a->info.echo = a->echo ? a->echo : "";
    c->echo = NULL;
    engine_chat(engine, &chat);
    a->id_chars = chat.id_chars ? chat.id_chars : MADE_ID_CHARS;
    a->id_seed = new_seed(info);
    a->one_call = !c->tools.parallel;
    if (tools_active(c)) {
        a->tools = c->tools;
        c->tools = (struct chat_tools){0};
    }
    a->parsed = c->parsed;
    a->opens_reasoning = c->opens_reasoning;
    a->state = calloc(1, MAX(d->state_bytes, 1));
    a->choice = calloc((size_t)info->n_choices, sizeof(*a->choice));
    int rc = a->id && a->state && a->choice ? 0 : err_nomem(e, "an answer");
    rc = rc ? rc : d->init(a->state, &a->info, e);
    a->initialised = !rc;
    if (rc) {
        answer_free(a);
        return rc;
    }
    *ret = a;
    return 0;
}

void answer_free(struct answer *a)
{
    if (!a) {
        return;
    }
    for (int32_t i = 0; a->choice && i < a->info.n_choices; i++) {
        engine_chat_parser_free(a->choice[i].parser);
        free(a->choice[i].id_hash);
    }
    if (a->initialised) {
        a->dialect->release(a->state);
    }
    chat_tools_release(&a->tools);
    free(a->choice);
    free(a->state);
    free(a->echo);
    free(a->id);
    free(a);
}

size_t answer_held(const struct answer *a)
{
    size_t n =
        sizeof(*a) + (size_t)a->info.n_choices * sizeof(*a->choice) + a->dialect->held(a->state);

    for (int32_t i = 0; i < a->info.n_choices; i++) {
        const struct answer_choice *c = &a->choice[i];
        n += c->parser ? engine_chat_parser_bytes(c->parser) : 0;
        n += c->id_hash ? MODEL_IDS * sizeof(*c->id_hash) : 0;
    }
    return n;
}

/* ---- ids of calls ---- */

enum { ID_BYTES = 160 };

/* Letters and digits; behind "call_" unless the format's ids have a length of their
 * own. */
static void make_id(struct answer *a, char id[ID_BYTES])
{
    static const char chars[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";
    size_t n = 0;
    uint64_t number = 0;

    if (a->id_chars == MADE_ID_CHARS) {
        n = (size_t)snprintf(id, ID_BYTES, "call_");
    }
    for (int32_t i = 0; i < a->id_chars && n < ID_BYTES - 1; i++) {
        number = i % 10 == 0 ? next_number(&a->id_seed) : number / 62;
        id[n++] = chars[number % 62];
    }
    id[n] = '\0';
}

static uint64_t hash(const char *text)
{
    uint64_t h = UINT64_C(0xcbf29ce484222325);

    for (; *text; text++) {
        h = (h ^ (unsigned char)*text) * UINT64_C(0x100000001b3);
    }
    return h;
}

/* Whether the id that the model gave can be used: it is short, and no earlier call of
 * the choice has it. */
static bool keep_id(struct answer_choice *c, const char *id)
{
    if (!id || !id[0] || strlen(id) >= ID_BYTES || c->n_ids == MODEL_IDS) {
        return false;
    }
    if (!c->id_hash) {
        c->id_hash = calloc(MODEL_IDS, sizeof(*c->id_hash));
    }
    if (!c->id_hash) {
        return false;
    }
    uint64_t h = hash(id);
    for (int32_t i = 0; i < c->n_ids; i++) {
        if (c->id_hash[i] == h) {
            return false;
        }
    }
    c->id_hash[c->n_ids++] = h;
    return true;
}

/* ---- events ---- */

/* Where a parser's events go. */
struct target {
    struct answer *a;
    struct buf *b;
    int32_t index; /* of the choice */
    int rc;        /* the first error of the dialect */
};

static void on_event(void *arg, const struct chat_event *event)
{
    static const enum answer_kind KIND[] = {[CHAT_CONTENT] = ANSWER_CONTENT,
                                            [CHAT_REASONING] = ANSWER_REASONING,
                                            [CHAT_CALL] = ANSWER_CALL,
                                            [CHAT_ARGUMENTS] = ANSWER_ARGUMENTS,
                                            [CHAT_CALL_END] = ANSWER_CALL_END};
    struct target *t = arg;
    struct answer_choice *c = &t->a->choice[t->index];
    struct answer_event out = {.kind = KIND[event->kind],
                               .text = event->text,
                               .len = event->len,
                               .call = event->call,
                               .name = event->name};
    char id[ID_BYTES];

    if (event->kind == CHAT_CALL) {
        c->skipping = t->a->one_call && c->calls > 0;
        c->calls += !c->skipping;
        c->open = c->open || !c->skipping;
        if (keep_id(c, event->id)) {
            snprintf(id, sizeof(id), "%s", event->id);
        } else {
            make_id(t->a, id);
        }
        out.id = id;
    }
    if (event->kind == CHAT_CALL_END && !c->skipping) {
        c->open = false;
    }
    bool of_call = event->kind >= CHAT_CALL;
    if (t->rc || (of_call && c->skipping) || (!of_call && event->len == 0)) {
        return;
    }
    t->rc = t->a->dialect->event(t->b, t->a->state, t->index, &out);
}

static int begin(struct answer *a, struct buf *b)
{
    if (a->begun) {
        return 0;
    }
    a->begun = true;
    return a->dialect->begin(b, a->state, &a->usage);
}

/* All of the text is content. */
static int pass_text(struct answer *a, struct target *t, const struct output *o,
                     struct answer_cursor *at)
{
    struct answer_event event = {.kind = ANSWER_CONTENT, .text = o->text, .len = o->text_len};

    at->text = o->text_len;
    return o->text_len ? a->dialect->event(t->b, a->state, t->index, &event) : 0;
}

/* The parser reads the next part of the text. */
static int read_text(struct answer *a, struct target *t, const struct output *o,
                     struct answer_cursor *at, int32_t *units)
{
    struct answer_choice *c = &a->choice[t->index];
    int64_t most = (int64_t)*units * TEXT_A_UNIT;
    size_t n = (size_t)MIN((int64_t)(o->text_len - at->text), MAX(most, TEXT_A_UNIT));
    int rc = 0;

    if (!a->parsed) {
        return pass_text(a, t, o, at);
    }
    if (!c->parser) {
        rc = engine_chat_parser_new(a->engine, &c->parser, a->tools.n ? &a->tools : NULL,
                                    a->opens_reasoning, NULL);
    }
    if (!rc && n) {
        rc = engine_chat_parser_feed(c->parser, o->text + at->text, n, on_event, t);
        at->text += n;
        *units -= (int32_t)(n / TEXT_A_UNIT);
    }
    return rc ? rc : t->rc;
}

/* The dialect gets the next tokens, if it shows any: of each output at least one
 * slice. */
static int show_tokens(struct answer *a, struct target *t, const struct output *o,
                       struct answer_cursor *at, int32_t *units)
{
    int32_t n = MIN(o->n_tokens - at->token, TOKENS_AT_ONCE);

    if (!a->dialect->tokens || (at->shown && n == 0)) {
        at->token = o->n_tokens;
        return 0;
    }
    for (int32_t i = 0; i < n; i++) {
        *units -= 4 + 2 * o->token[at->token + i].n_top;
    }
    int rc = a->dialect->tokens(t->b, a->state, t->index, o, at->token, n);
    at->token += n;
    at->shown = true;
    return rc;
}

/* The choice has ended: what the parser holds back, then its end. */
static int finish(struct answer *a, struct target *t, const struct output *o)
{
    struct answer_choice *c = &a->choice[t->index];
    char stop[LIMIT_STOP_BYTES + 1];
    int rc = c->parser ? engine_chat_parser_end(c->parser, on_event, t) : 0;

    rc = rc ? rc : t->rc;
    engine_chat_parser_free(c->parser);
    c->parser = NULL;
    if (o->stop_string) {
        snprintf(stop, sizeof(stop), "%.*s", (int)o->stop_string_len, o->stop_string);
    }
    bool called = c->calls > 0 && !c->open && o->finish == FINISH_STOP;
    return rc ? rc
              : a->dialect->finish(t->b, a->state, t->index, o->finish,
                                   o->stop_string ? stop : NULL, called);
}

/* Take over the usage. All tokens of an output that begins inside reasoning count as
 * reasoning; one that also holds tokens behind it comes only where a client lags. */
static void count_tokens(struct answer *a, int32_t index, const struct usage *usage,
                         const struct answer_cursor *at)
{
    const struct chat_parser *p = a->choice[index].parser;
    bool first = !at->text && !at->token && !at->shown;

    if (first && a->parsed && (p ? engine_chat_parser_reasoning(p) : a->opens_reasoning)) {
        a->reasoning_tokens += MAX(usage->completion_tokens - a->usage.completion_tokens, 0);
    }
    a->usage = *usage;
    a->usage.reasoning_tokens = a->reasoning_tokens;
}

int answer_add(struct answer *a, struct buf *b, int32_t index, const struct output *o,
               const struct usage *usage, struct answer_cursor *at, int32_t *units)
{
    struct target t = {a, b, index, 0};

    count_tokens(a, index, usage, at);
    int rc = begin(a, b);
    do {
        rc = rc ? rc : read_text(a, &t, o, at, units);
    } while (!rc && at->text < o->text_len && *units > 0);
    if (!rc && at->text < o->text_len) {
        return ANSWER_MORE;
    }
    do {
        rc = rc ? rc : show_tokens(a, &t, o, at, units);
    } while (!rc && at->token < o->n_tokens && *units > 0);
    if (!rc && at->token < o->n_tokens) {
        return ANSWER_MORE;
    }
    if (!rc && o->finish != FINISH_NONE) {
        rc = finish(a, &t, o);
    }
    return rc ? rc : b->failed ? ERR_NOMEM : 0;
}

int answer_end(struct answer *a, struct buf *b, const struct usage *usage)
{
    a->usage = *usage;
    a->usage.reasoning_tokens = a->reasoning_tokens;
    int rc = begin(a, b);
    return rc ? rc : a->dialect->end(b, a->state, &a->usage);
}

int answer_error(struct answer *a, struct buf *b, int status, const char *message)
{
    int rc = begin(a, b);

    return rc ? rc : a->dialect->error(b, a->state, status, message);
}
