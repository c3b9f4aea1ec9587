/* How a choice's token ids become pieces of text:
 *
 *     token ──► detokenizer ──► text not sent ──► stop strings ──► piece ──► sink
 *
 * A token is held together with its text: it leaves with the first piece that reaches
 * its first byte, so ids, text and log-probabilities always cover the same stretch.
 * Text is held back while a character is incomplete (inside the detokenizer), while it
 * may yet become a stop string (stop_state.held bytes), and with best_of > n until the
 * end.
 *
 * When a stop string is complete, the choice has ended for the client at once. The
 * engine learns of it through the stop position and may have sampled further tokens by
 * then; their deltas find the choice ended and are dropped, so they are neither sent
 * nor counted. The tokens of the stop string itself are counted, and their ids leave
 * with the last piece, though their text does not. */
#include "engine/output/emit.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/loop/inbox.h"
#include "engine/output/reaper.h"

/* Upper bound of a choice's text: LIMIT_MODEL_LEN tokens of 256 bytes. */
#define CHOICE_TEXT_BYTES ((size_t)LIMIT_MODEL_LEN * 256)

enum { SPREAD = 64 }; /* array sizes that the choices of a request differ by; see grow */

/* ---- making and freeing ---- */

void prompt_out_free(struct prompt_out *p)
{
    if (!p) {
        return;
    }
    free(p->token);
    free(p->top_id);
    free(p->top_logprob);
    free(p);
}

static int32_t count_chars(const char *text, size_t len);

/* Counts the characters of the echoed prompt and runs the detokenizer to its end. The
 * text itself is made when it is read. */
static int prompt_measure(struct prompt_out *p, const struct request *r)
{
    struct buf text;
    int rc = 0;

    buf_init(&text, CHOICE_TEXT_BYTES);
    for (int32_t i = 0; i < r->n_prompt && rc == 0; i++) {
        buf_clear(&text);
        rc = detokenizer_push(&p->detok, r->prompt[i], &text);
        p->n_chars += count_chars(text.data, text.len);
    }
    buf_release(&text);
    return rc;
}

static int prompt_out_new(struct request *r, const struct tokenizer *t, struct err *e)
{
    const struct gen_params *g = &r->params;
    bool scored = g->n_prompt_logprobs >= 0 || (g->echo && g->n_logprobs >= 0);
    struct prompt_out *p;

    if (!g->echo && !scored) {
        return 0;
    }
    p = calloc(1, sizeof(*p));
    if (!p) {
        return err_nomem(e, "the prompt's log-probabilities");
    }
    r->prompt_out = p;
    p->top_stride = scored ? MAX(g->n_prompt_logprobs, g->n_logprobs) : 0;
    detokenizer_init(&p->start, t, g->skip_special, g->spaces_between_special);
    p->detok = p->start;
    return g->echo && prompt_measure(p, r) < 0 ? err_nomem(e, "the prompt's text") : 0;
}

/* Allocates the prompt's arrays, at the first delta. */
static int prompt_arrays_new(struct prompt_out *p, const struct request *r)
{
    size_t n = (size_t)r->n_prompt * (size_t)p->top_stride;

    p->token = calloc((size_t)r->n_prompt, sizeof(*p->token));
    if (n) {
        p->top_id = malloc(n * sizeof(*p->top_id));
        p->top_logprob = malloc(n * sizeof(*p->top_logprob));
    }
    if (!p->token || (n && (!p->top_id || !p->top_logprob))) {
        return ERR_NOMEM;
    }
    for (int32_t i = 0; i < r->n_prompt; i++) {
        p->token[i] = (struct token_out){.id = r->prompt[i], .logprob = NAN};
    }
    return 0;
}

static void free_garbage(struct garbage *g)
{
    output_state_free(CONTAINER_OF(g, struct output_state, garbage));
}

int output_state_new(struct request *r, const struct tokenizer *t, struct err *e)
{
    const struct gen_params *p = &r->params;
    struct output_state *m = calloc(1, sizeof(*m));

    if (!m) {
        return err_nomem(e, "a request's output");
    }
    m->garbage.free = free_garbage;
    m->n_choices = p->beam_width > 0 ? p->n : p->best_of;
    m->ranked = p->beam_width == 0 && p->best_of > p->n;
    m->stops = r->stops;
    int rc = prompt_out_new(r, t, e);
    if (rc < 0) {
        free(m);
        return rc;
    }
    m->prompt = r->prompt_out;
    r->output_state = m;
    return 0;
}

static int choices_new(struct output_state *m, const struct request *r, const struct tokenizer *t)
{
    const struct gen_params *p = &r->params;

    m->choice = calloc((size_t)m->n_choices, sizeof(*m->choice));
    if (!m->choice) {
        return ERR_NOMEM;
    }
    for (int32_t i = 0; i < m->n_choices; i++) {
        struct choice *c = &m->choice[i];
        buf_init(&c->text, CHOICE_TEXT_BYTES);
        detokenizer_init(&c->detok, t, p->skip_special, p->spaces_between_special);
        c->detok.started = true;          /* a prompt precedes it */
        c->held.spread = i * 37 % SPREAD; /* neighbouring choices differ much */
        c->stop_token = -1;
    }
    return m->prompt ? prompt_arrays_new(m->prompt, r) : 0;
}

/* Frees a choice's text and tokens; `taken`: the sink owns all but text_at. */
static void choice_release(struct choice *c, bool taken)
{
    struct held_tokens *h = &c->held;

    if (!taken) {
        buf_release(&c->text);
        free(h->token);
        free(h->top_id);
        free(h->top_logprob);
    }
    free(h->text_at);
    *h = (struct held_tokens){0};
    buf_init(&c->text, CHOICE_TEXT_BYTES);
}

void output_state_free(struct output_state *m)
{
    if (!m) {
        return;
    }
    for (int32_t i = 0; m->choice && i < m->n_choices; i++) {
        choice_release(&m->choice[i], false);
    }
    free(m->choice);
    free(m);
}

/* ---- tokens held with their text ---- */

/* Doubles an array's capacity. The choices of a request grow in step, so from SPREAD
 * elements on each has sizes of its own, shifted by `spread` < SPREAD: otherwise all
 * their arrays would be moved in the same step. */
static int grow(void *array, int32_t *cap, int32_t need, size_t size, int32_t spread)
{
    void **a = array;
    int32_t n = MAX(*cap, 1);

    while (n < need) {
        n *= 2;
    }
    if (n >= SPREAD && *cap < SPREAD) {
        n += n / SPREAD * spread;
    }
    void *p = realloc(*a, (size_t)n * size);
    if (!p) {
        return ERR_NOMEM;
    }
    *a = p;
    *cap = n;
    return 0;
}

static int held_reserve(struct held_tokens *h, int32_t n_top)
{
    if (h->n == h->cap) {
        int32_t cap = h->cap;
        if (grow(&h->text_at, &cap, h->n + 1, sizeof(*h->text_at), h->spread) < 0 ||
            grow(&h->token, &h->cap, h->n + 1, sizeof(*h->token), h->spread) < 0) {
            return ERR_NOMEM;
        }
    }
    if (h->n_top + n_top > h->cap_top) {
        int32_t cap = h->cap_top;
        if (grow(&h->top_id, &cap, h->n_top + n_top, sizeof(*h->top_id), h->spread) < 0 ||
            grow(&h->top_logprob, &h->cap_top, h->n_top + n_top, sizeof(*h->top_logprob),
                 h->spread) < 0) {
            return ERR_NOMEM;
        }
    }
    return 0;
}

static int held_push(struct held_tokens *h, const struct delta *d, int32_t text_offset,
                     size_t text_at)
{
    if (held_reserve(h, d->n_top) < 0) {
        return ERR_NOMEM;
    }
    h->token[h->n] = (struct token_out){.id = d->token,
                                        .text_offset = text_offset,
                                        .logprob = d->logprob,
                                        .n_top = d->n_top,
                                        .drafted = d->drafted};
    h->text_at[h->n++] = text_at;
    h->n_open++;
    if (d->n_top > 0) {
        memcpy(h->top_id + h->n_top, d->top_token, (size_t)d->n_top * sizeof(*h->top_id));
        memcpy(h->top_logprob + h->n_top, d->top_logprob,
               (size_t)d->n_top * sizeof(*h->top_logprob));
        h->n_top += d->n_top;
    }
    return 0;
}

/* Points the first n tokens at their top log-probabilities (NULL if none were
 * requested). Returns how many entries those have. */
static int32_t held_link(struct held_tokens *h, int32_t n)
{
    int32_t at = 0;

    for (int32_t i = 0; i < n; i++) {
        h->token[i].top_id = h->top_id ? h->top_id + at : NULL;
        h->token[i].top_logprob = h->top_logprob ? h->top_logprob + at : NULL;
        at += h->token[i].n_top;
    }
    return at;
}

/* Drops the first n tokens with their n_top top entries; text_bytes of text left with
 * them. */
static void held_drop(struct held_tokens *h, int32_t n, int32_t n_top, size_t text_bytes)
{
    h->n -= n;
    h->n_top -= n_top;
    if (h->n == 0) {
        return;
    }
    memmove(h->token, h->token + n, (size_t)h->n * sizeof(*h->token));
    memmove(h->text_at, h->text_at + n, (size_t)h->n * sizeof(*h->text_at));
    for (int32_t i = 0; i < h->n; i++) {
        h->text_at[i] -= MIN(text_bytes, h->text_at[i]);
    }
    if (h->n_top > 0) {
        memmove(h->top_id, h->top_id + n_top, (size_t)h->n_top * sizeof(*h->top_id));
        memmove(h->top_logprob, h->top_logprob + n_top, (size_t)h->n_top * sizeof(*h->top_logprob));
    }
}

/* ---- pieces ---- */

static struct usage usage_of(const struct request *r)
{
    const struct output_state *m = r->output_state;

    return (struct usage){.prompt_tokens = r->n_prompt,
                          .completion_tokens = m->completion_tokens,
                          .cached_tokens = m->cached_tokens};
}

/* Sends the first text_bytes of c's text, as choice `index`, with the tokens that begin
 * there; with all tokens if c has ended. */
static void emit_piece(struct output_processor *proc, struct request *r, struct choice *c,
                       int32_t index, size_t text_bytes)
{
    struct held_tokens *h = &c->held;
    int32_t n = h->n;

    if (!c->ended) {
        for (n = 0; n < h->n && h->text_at[n] < text_bytes;) {
            n++;
        }
    }
    int32_t n_top = held_link(h, n);
    struct output_memory memory = {c->text.data, h->token, h->top_id, h->top_logprob, false};
    struct output o = {
        .request = r,
        .choice = index,
        .memory = c->ended ? &memory : NULL,
        .text = text_bytes ? c->text.data : "",
        .text_len = text_bytes,
        .token = h->token,
        .n_tokens = n,
        .finish = c->ended ? c->finish : FINISH_NONE,
        .stop_string = c->stop_string,
        .stop_string_len = c->stop_string_len,
        .stop_token = c->stop_token,
        .usage = usage_of(r),
        .error = c->error,
    };
    proc->sink->emit(proc->sink, &o);
    if (c->ended) { /* other choices of the request may continue for long */
        choice_release(c, memory.taken);
        return;
    }
    held_drop(h, n, n_top, text_bytes);
    buf_consume(&c->text, text_bytes);
}

static int32_t count_chars(const char *text, size_t len)
{
    int32_t n = 0;

    for (size_t i = 0; i < len; i++) {
        n += ((unsigned char)text[i] & 0xC0) != 0x80;
    }
    return n;
}

/* Text has arrived after n_chars code points: sets the offsets of the open tokens t[0
 * .. n). text_at may be NULL. */
static void place_tokens(struct token_out *t, size_t *text_at, int32_t n,
                         const struct detokenizer *d, int32_t n_chars)
{
    for (int32_t i = 0; i < n; i++) {
        size_t landed = detokenizer_landed(d, t[i].text_offset);

        /* only U+FFFDs precede it, of three bytes each */
        t[i].text_offset = n_chars + (int32_t)(landed / 3);
        if (text_at) {
            text_at[i] += landed;
        }
    }
}

/* Begins a choice: announces the prompt, if it is returned to the client. */
static void choice_begin(struct output_processor *proc, struct request *r, struct choice *c,
                         int32_t index)
{
    struct output_state *m = r->output_state;

    c->begun = true;
    if (!m->prompt) {
        return;
    }
    if (r->params.echo) {
        c->n_chars = m->prompt->n_chars;
        c->detok = m->prompt->detok;
    }
    struct output o = {
        .request = r,
        .choice = index,
        .text = "",
        .n_tokens = r->n_prompt,
        .prompt = true,
        .stop_token = -1,
        .usage = usage_of(r),
    };
    if (!m->ranked) {
        proc->sink->emit(proc->sink, &o);
    }
}

/* ---- reading the prompt ---- */

struct prompt_walk {
    const struct request *request;
    struct detokenizer detok;
    int32_t at;
};

/* Sets the prompt tokens' text offsets, once a request. The bytes of a character that
 * the prompt leaves incomplete count as one character, however the choices complete
 * it. */
static int place_prompt_tokens(struct prompt_out *p, const struct request *r)
{
    struct detokenizer d = p->start;
    int32_t n_placed = 0, n_chars = 0;
    struct buf text;
    int rc = 0;

    buf_init(&text, CHOICE_TEXT_BYTES);
    for (int32_t i = 0; i < r->n_prompt && rc == 0 && r->params.echo; i++) {
        buf_clear(&text);
        p->token[i].text_offset = d.n_pending;
        rc = detokenizer_push(&d, r->prompt[i], &text);
        if (text.len) {
            place_tokens(&p->token[n_placed], NULL, i + 1 - n_placed, &d, n_chars);
            n_placed = i + 1;
            n_chars += count_chars(text.data, text.len);
        }
    }
    for (; n_placed < r->n_prompt; n_placed++) {
        p->token[n_placed].text_offset = n_chars;
    }
    buf_release(&text);
    p->has_offsets = rc == 0;
    return rc;
}

int prompt_walk_new(struct prompt_walk **ret, const struct request *r, struct err *e)
{
    struct prompt_walk *w = calloc(1, sizeof(*w));

    if (!w || (!r->prompt_out->has_offsets && place_prompt_tokens(r->prompt_out, r) < 0)) {
        free(w);
        return err_nomem(e, "a prompt's text");
    }
    w->request = r;
    w->detok = r->prompt_out->start;
    *ret = w;
    return 0;
}

void prompt_walk_free(struct prompt_walk *w)
{
    free(w);
}

int prompt_walk_next(struct prompt_walk *w, struct token_out *ret, struct buf *text)
{
    const struct request *r = w->request;

    if (w->at == r->n_prompt) {
        return ERR_NOT_FOUND;
    }
    *ret = r->prompt_out->token[w->at];
    if (r->params.echo) {
        int rc = detokenizer_push(&w->detok, ret->id, text);
        if (rc < 0) {
            return rc;
        }
    }
    w->at++;
    return 0;
}

/* ---- tokens ---- */

static void choice_end(struct output_processor *proc, struct request *r, int32_t index,
                       enum finish_reason finish, int32_t stop_token, const char *error)
{
    struct output_state *m = r->output_state;
    struct choice *c = &m->choice[index];
    struct held_tokens *h = &c->held;

    c->ended = true;
    c->finish = finish;
    c->stop_token = stop_token;
    c->error = error;
    /* Tokens without text, or whose text is not sent, get the offset of the text's
     * end. */
    for (int32_t i = 0; i < h->n; i++) {
        bool open = i >= h->n - h->n_open;
        h->token[i].text_offset = open ? c->n_chars : MIN(h->token[i].text_offset, c->n_chars);
    }
    if (m->finish == FINISH_NONE) {
        m->finish = finish;
    }
    hist_add(&proc->stats->generation_len, c->n_generated);
    if (!m->ranked) {
        emit_piece(proc, r, c, index, c->text.len);
    }
}

/* Out of memory for one choice: it ends with an error, the engine continues. */
static void choice_fail(struct output_processor *proc, struct request *r, int32_t index)
{
    choice_end(proc, r, index, FINISH_ERROR, -1,
               "the server ran out of memory for this choice's text");
    atomic_store(&r->stop_at[index], r->output_state->choice[index].n_generated);
    if (proc->inbox) {
        inbox_mark(proc->inbox);
    }
}

/* Out of memory for a request's choices: all of them end with an error, the engine
 * continues. */
static void fail_all_choices(struct output_processor *proc, struct request *r)
{
    struct output_state *m = r->output_state;

    m->out_of_memory = true;
    m->finish = FINISH_ERROR;
    for (int32_t i = 0; i < r->params.n; i++) {
        struct output o = {
            .request = r,
            .choice = i,
            .text = "",
            .finish = FINISH_ERROR,
            .stop_token = -1,
            .usage = usage_of(r),
            .error = "the server ran out of memory for this request's answer",
        };
        proc->sink->emit(proc->sink, &o);
    }
    for (int32_t i = 0; i < m->n_choices; i++) {
        atomic_store(&r->stop_at[i], 0);
    }
    if (proc->inbox) {
        inbox_mark(proc->inbox);
    }
}

/* Allocates a request's choices at its first delta. False: out of memory; every delta
 * of the request is ignored. */
static bool output_state_begin(struct output_processor *proc, struct request *r)
{
    struct output_state *m = r->output_state;

    if (!m->choice && !m->out_of_memory && choices_new(m, r, proc->tokenizer) < 0) {
        free(m->choice);
        m->choice = NULL;
        fail_all_choices(proc, r);
    }
    return !m->out_of_memory;
}

static void count_prompt(struct output_processor *proc, const struct request *r)
{
    atomic_fetch_add_explicit(&proc->stats->prompt_tokens, (uint64_t)r->n_prompt,
                              memory_order_relaxed);
}

static void count_sampled(struct output_processor *proc, int64_t n)
{
    atomic_fetch_add_explicit(&proc->stats->generation_tokens, (uint64_t)n, memory_order_relaxed);
}

static void count_token(struct output_processor *proc, struct request *r, struct choice *c,
                        const struct delta *d)
{
    struct output_state *m = r->output_state;

    c->n_generated++;
    c->logprob_sum += d->logprob;
    m->completion_tokens++;
    m->cached_tokens = d->cached_tokens;
    if (r->params.beam_width == 0) {
        count_sampled(proc, 1);
    }
    if (m->first_us == 0) {
        m->first_us = proc->now_us;
        count_prompt(proc, r);
        hist_add(&proc->stats->ttft_s, (double)(proc->now_us - r->arrival_us) * 1e-6);
    }
    if (c->first_us == 0) {
        c->first_us = proc->now_us;
    } else {
        hist_add(&proc->stats->itl_s, (double)(proc->now_us - c->last_us) * 1e-6);
    }
    c->last_us = proc->now_us;
}

/* Searches for a stop string in the text from byte `from` on. If one is complete:
 * truncates the text, sets the stop position, ends the choice. */
static bool choice_match(struct output_processor *proc, struct request *r, int32_t index,
                         size_t from)
{
    struct output_state *m = r->output_state;
    struct choice *c = &m->choice[index];
    int32_t which = -1;
    bool armed = c->n_generated > r->params.min_tokens; /* as for stop tokens (decode.c) */
    int64_t n =
        stop_feed(m->stops, &c->stop, c->text.data + from, c->text.len - from, armed, &which);

    if (n < 0) {
        return false;
    }
    const struct stop_string *s = &m->stops->stop[which];
    size_t len = from + (size_t)n - (r->params.include_stop_str ? 0 : (size_t)s->len);
    c->n_chars -= count_chars(c->text.data + len, c->text.len - len);
    c->text.len = len;
    c->text.data[c->text.len] = '\0';
    c->stop_string = s->text;
    c->stop_string_len = s->len;
    atomic_store(&r->stop_at[index], c->n_generated);
    if (proc->inbox) {
        inbox_mark(proc->inbox);
    }
    choice_end(proc, r, index, FINISH_STOP, -1, NULL);
    return true;
}

/* Processes text added from byte `before` on: sets offsets, searches for stop strings.
 * True: the choice has ended. */
static bool choice_grow(struct output_processor *proc, struct request *r, int32_t index,
                        size_t before)
{
    struct choice *c = &r->output_state->choice[index];
    struct held_tokens *h = &c->held;
    int32_t n_placed = h->n - h->n_open;

    if (c->text.len == before) {
        return false;
    }
    if (h->n_open > 0) {
        place_tokens(&h->token[n_placed], &h->text_at[n_placed], h->n_open, &c->detok, c->n_chars);
    }
    h->n_open = 0;
    c->n_chars += count_chars(c->text.data + before, c->text.len - before);
    return r->output_state->stops && !c->decided && choice_match(proc, r, index, before);
}

/* Ends a choice, flushing what its last tokens left of an incomplete character. */
static void emit_finish(struct output_processor *proc, const struct delta *d)
{
    struct request *r = d->request;

    if (!output_state_begin(proc, r)) {
        return;
    }
    struct choice *c = &r->output_state->choice[d->choice];
    if (c->ended) {
        return;
    }
    size_t before = c->text.len;
    c->decided = c->decided || (d->finish != FINISH_STOP && d->finish != FINISH_LENGTH);
    if (!c->begun) {
        choice_begin(proc, r, c, d->choice);
    }
    if (detokenizer_finish(&c->detok, &c->text) < 0) {
        choice_fail(proc, r, d->choice);
    } else if (!choice_grow(proc, r, d->choice, before)) {
        choice_end(proc, r, d->choice, d->finish, d->stop_token, d->error);
    }
}

static int32_t emit_token(struct output_processor *proc, const struct delta *d,
                          const struct delta *next)
{
    struct request *r = d->request;
    struct output_state *m = r->output_state;

    if (!output_state_begin(proc, r)) {
        return 1;
    }
    struct choice *c = &m->choice[d->choice];
    if (c->ended) {
        return 1; /* sampled past the stop position */
    }
    const struct delta *end =
        next && next->kind == DELTA_FINISH && next->request == r && next->choice == d->choice
            ? next
            : NULL;
    count_token(proc, r, c, d);
    bool mute = d->is_stop && !r->params.include_stop_str;
    size_t before = c->text.len;
    c->decided = d->is_stop;
    if (!c->begun) {
        choice_begin(proc, r, c, d->choice);
    }
    if (held_push(&c->held, d, c->detok.n_pending, before) < 0 ||
        (!mute && detokenizer_push(&c->detok, d->token, &c->text) < 0)) {
        choice_fail(proc, r, d->choice);
        return end ? 2 : 1;
    }
    if (choice_grow(proc, r, d->choice, before)) {
        return end ? 2 : 1;
    }
    if (end) {
        emit_finish(proc, end);
        return 2;
    }
    size_t ready = c->text.len - (size_t)c->stop.held;
    if (ready > 0 && !m->ranked) {
        emit_piece(proc, r, c, d->choice, ready);
    }
    return 1;
}

static void emit_prompt(struct output_processor *proc, const struct delta *d)
{
    struct prompt_out *p = d->request->prompt_out;

    if (!output_state_begin(proc, d->request) || !p || p->n_seen >= d->request->n_prompt) {
        return;
    }
    struct token_out *t = &p->token[p->n_seen];
    size_t at = (size_t)p->n_seen++ * (size_t)p->top_stride;
    t->logprob = d->logprob;
    t->n_top = MIN(d->n_top, p->top_stride);
    if (t->n_top <= 0) {
        return;
    }
    memcpy(p->top_id + at, d->top_token, (size_t)t->n_top * sizeof(int32_t));
    memcpy(p->top_logprob + at, d->top_logprob, (size_t)t->n_top * sizeof(float));
    t->top_id = p->top_id + at;
    t->top_logprob = p->top_logprob + at;
}

/* ---- the end ---- */

/* A choice that could not continue ranks last. */
static double mean_logprob(const struct choice *c)
{
    bool whole = c->n_generated > 0 && c->finish != FINISH_IMPOSSIBLE;

    return whole ? c->logprob_sum / c->n_generated : -INFINITY;
}

/* best_of: sends the n best by mean log-probability, best first; on a tie the earlier
 * one. */
static void emit_ranked(struct output_processor *proc, struct request *r)
{
    struct output_state *m = r->output_state;
    int32_t order[LIMIT_CHOICES];

    for (int32_t i = 0; i < m->n_choices; i++) {
        int32_t at = i;
        for (; at > 0 && mean_logprob(&m->choice[i]) > mean_logprob(&m->choice[order[at - 1]]);
             at--) {
            order[at] = order[at - 1];
        }
        order[at] = i;
    }
    m->ranked = false;
    for (int32_t i = 0; i < r->params.n; i++) {
        struct choice *c = &m->choice[order[i]];
        if (m->prompt) {
            /* c's own detokenizer and offsets were set when it began */
            struct choice prompt_only = {.begun = false};
            choice_begin(proc, r, &prompt_only, i);
        }
        emit_piece(proc, r, c, i, c->text.len);
    }
}

/* Sets the number of tokens sampled for a request. For beams the engine has counted
 * them. For samples it continues until it learns that a text has ended, and those extra
 * tokens do not count, so the number is taken from here. */
static void count_sampled_at_end(struct output_processor *proc, struct request *r)
{
    if (r->params.beam_width > 0) {
        count_sampled(proc, r->course.n_sampled);
    } else {
        r->course.n_sampled = r->output_state->completion_tokens;
    }
}

static void count_request(struct output_processor *proc, const struct request *r)
{
    const struct output_state *m = r->output_state;
    struct engine_stats *s = proc->stats;
    int32_t finish = MIN(m->finish, FINISH_ERROR);

    atomic_fetch_add_explicit(&s->finished[finish], 1, memory_order_relaxed);
    hist_add(&s->e2e_s, (double)(proc->now_us - r->arrival_us) * 1e-6);
    hist_add(&s->prompt_len, r->n_prompt);
    hist_add(&s->params_n, r->params.n);
    if (r->params.max_tokens == 0 && m->finish == FINISH_LENGTH) {
        count_prompt(proc, r); /* scored only: no first token has counted the prompt */
    }
    if (m->first_us == 0) {
        return;
    }
    hist_add(&s->decode_s, (double)(proc->now_us - m->first_us) * 1e-6);
    const struct choice *c = &m->choice[0];
    if (c->n_generated > 1) {
        hist_add(&s->tpot_s, (double)(c->last_us - c->first_us) * 1e-6 / (c->n_generated - 1));
    }
}

static void emit_end(struct output_processor *proc, const struct delta *d)
{
    struct request *r = d->request;
    struct output_state *m = r->output_state;
    struct delta rest = *d;

    rest.kind = DELTA_FINISH;
    rest.finish = d->finish != FINISH_NONE ? d->finish : FINISH_ABORT;
    for (rest.choice = 0; rest.choice < m->n_choices; rest.choice++) {
        emit_finish(proc, &rest);
    }
    if (m->ranked && !m->out_of_memory) {
        emit_ranked(proc, r);
    }
    count_sampled_at_end(proc, r);
    count_request(proc, r);
    struct output o = {.request = r,
                       .choice = -1,
                       .text = "",
                       .stop_token = -1,
                       .usage = usage_of(r),
                       .error = d->error,
                       .last = true};
    proc->sink->emit(proc->sink, &o);
    if (proc->active) {
        atomic_fetch_sub(proc->active, 1);
        atomic_fetch_sub(&proc->tenant_active[r->tenant], 1);
    }
    /* it still holds the texts that were not chosen */
    bool large = r->params.best_of > r->params.n;
    r->output_state = NULL;
    reaper_take(large ? proc->reaper : NULL, &m->garbage);
    request_unref(r);
}

int emit_delta(struct output_processor *proc, const struct delta *d, const struct delta *next)
{
    switch (d->kind) {
    case DELTA_TOKEN:
        return emit_token(proc, d, next);
    case DELTA_PROMPT:
        emit_prompt(proc, d);
        return 1;
    case DELTA_FINISH:
        emit_finish(proc, d);
        return 1;
    default:
        emit_end(proc, d);
        return 1;
    }
}
