/* Tests the output side: text, stop strings across token boundaries, characters across
 * tokens, echo, log-probabilities, best_of, usage. Tokens are bytes (the byte
 * tokenizer), so every boundary can be tried. */
#include "engine/output/output.h"

#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/stats.h"
#include "models/tokenizer/tokenizer_internal.h"
#include "tests/sim/recorder.h"

struct bench {
    struct tokenizer *tokenizer;
    struct recorder recorder;
    struct engine_stats stats;
    _Atomic int64_t active, tenant_active; /* one tenant */
    struct output_processor output_processor;
    struct gen_params params;
    struct request *request;
    struct recording *rec;
};

static struct bench *bench_new(void)
{
    struct bench *b = calloc(1, sizeof(*b));
    struct err e;

    assert_non_null(b);
    assert_int_equal(tokenizer_open_bytes(&b->tokenizer, &e), 0);
    recorder_init(&b->recorder);
    engine_stats_init(&b->stats);
    b->output_processor = (struct output_processor){.tokenizer = b->tokenizer,
                                                    .sink = &b->recorder.sink,
                                                    .stats = &b->stats,
                                                    .active = &b->active,
                                                    .tenant_active = &b->tenant_active,
                                                    .now_us = 1000};
    b->params = (struct gen_params){
        .max_tokens = 4096, .n = 1, .best_of = 1, .n_logprobs = -1, .n_prompt_logprobs = -1};
    b->rec = recording_new();
    return b;
}

static char **strings(int32_t n, const char *const *s)
{
    char **copy = calloc((size_t)n, sizeof(*copy));

    assert_non_null(copy);
    for (int32_t i = 0; i < n; i++) {
        copy[i] = strdup(s[i]);
    }
    return copy;
}

/* The request of b->params; the test keeps a reference beside the engine's. */
static void begin(struct bench *b, const char *prompt)
{
    struct err e;
    int32_t id[256], n = (int32_t)strlen(prompt);

    for (int32_t i = 0; i < n; i++) {
        id[i] = (unsigned char)prompt[i];
    }
    assert_int_equal(request_new(&b->request, &b->params, id, n, &e), 0);
    assert_int_equal(output_state_new(b->request, b->tokenizer, &e), 0);
    b->request->user = b->rec;
    request_ref(b->request);
    b->active = 1;
}

static void finish_bench(struct bench *b)
{
    if (b->request) {
        request_unref(b->request);
    }
    recording_free(b->rec);
    recorder_release(&b->recorder);
    tokenizer_free(b->tokenizer);
    free(b);
}

static struct delta token(struct bench *b, int32_t choice, int32_t id)
{
    return (struct delta){.request = b->request,
                          .kind = DELTA_TOKEN,
                          .choice = choice,
                          .token = id,
                          .logprob = -1,
                          .stop_token = -1};
}

static struct delta finish(struct bench *b, int32_t choice, enum finish_reason why)
{
    return (struct delta){.request = b->request,
                          .kind = DELTA_FINISH,
                          .choice = choice,
                          .finish = why,
                          .stop_token = -1};
}

static void say(struct bench *b, int32_t choice, const char *text)
{
    for (; *text; text++) {
        struct delta d = token(b, choice, (unsigned char)*text);
        emit_delta(&b->output_processor, &d, NULL);
    }
}

static void end_choice(struct bench *b, int32_t choice, enum finish_reason why)
{
    struct delta d = finish(b, choice, why);

    emit_delta(&b->output_processor, &d, NULL);
}

static void end_request(struct bench *b)
{
    struct delta d = {.request = b->request, .kind = DELTA_END};

    emit_delta(&b->output_processor, &d, NULL);
    assert_true(b->rec->last);
    assert_int_equal(b->rec->n_after_end, 0);
    assert_int_equal(b->active, 0);
}

static const char *text(struct bench *b, int choice)
{
    return b->rec->choice[choice].text.len ? b->rec->choice[choice].text.data : "";
}

/* ---- plain text ---- */

static void every_token_is_a_piece_and_the_end_leaves_with_the_last(void **state)
{
    (void)state;
    struct bench *b = bench_new();
    begin(b, "p");
    say(b, 0, "hell");
    assert_int_equal(b->rec->choice[0].n_pieces, 4);
    struct delta last = token(b, 0, 'o'), end = finish(b, 0, FINISH_LENGTH);
    assert_int_equal(emit_delta(&b->output_processor, &last, &end), 2);
    assert_int_equal(b->rec->choice[0].n_pieces, 5);
    assert_int_equal(b->rec->choice[0].finish, FINISH_LENGTH);
    end_request(b);
    assert_string_equal(text(b, 0), "hello");
    assert_int_equal(b->rec->usage.completion_tokens, 5);
    assert_int_equal(b->rec->usage.prompt_tokens, 1);
    assert_int_equal(b->rec->choice[0].n_tokens, 5);
    assert_int_equal(b->stats.finished[FINISH_LENGTH], 1);
    finish_bench(b);
}

static void an_end_of_another_choice_is_not_taken_along(void **state)
{
    (void)state;
    struct bench *b = bench_new();
    b->params.n = b->params.best_of = 2;
    begin(b, "p");
    struct delta last = token(b, 0, 'o'), end = finish(b, 1, FINISH_LENGTH);
    assert_int_equal(emit_delta(&b->output_processor, &last, &end), 1);
    emit_delta(&b->output_processor, &end, NULL);
    assert_int_equal(b->rec->choice[0].finish, FINISH_NONE);
    assert_int_equal(b->rec->choice[1].finish, FINISH_LENGTH);
    end_request(b);
    assert_int_equal(b->rec->choice[0].finish, FINISH_ABORT);
    finish_bench(b);
}

static void characters_leave_whole(void **state)
{
    (void)state;
    struct bench *b = bench_new();
    b->params.n_logprobs = 0;
    begin(b, "p");
    const char *euro = "a\xe2\x82\xac"
                       "b\xf0\x9f\x98\x80";
    const size_t after[] = {1, 1, 1, 4, 5, 5, 5, 5, 9};
    for (int i = 0; euro[i]; i++) {
        struct delta d = token(b, 0, (unsigned char)euro[i]);
        emit_delta(&b->output_processor, &d, NULL);
        assert_int_equal(b->rec->choice[0].text.len, after[i]);
    }
    struct recorded_choice *c = &b->rec->choice[0];
    assert_int_equal(c->n_tokens, 9); /* the tokens of a character leave with it */
    assert_int_equal(c->n_pieces, 4);
    const int32_t offset[] = {0, 1, 1, 1, 2, 3, 3, 3, 3};
    assert_memory_equal(c->offset, offset, sizeof(offset));
    say(b, 0, "\xe2\x82");
    end_choice(b, 0, FINISH_LENGTH);
    end_request(b);
    assert_string_equal(text(b, 0) + 9, "\xef\xbf\xbd");
    finish_bench(b);
}

/* ---- stop strings ---- */

static void set_stops(struct bench *b, int32_t n, const char *const *s)
{
    b->params.stop = strings(n, s);
    b->params.n_stop = n;
}

static void a_stop_string_across_tokens_is_never_shown(void **state)
{
    (void)state;
    struct bench *b = bench_new();
    set_stops(b, 2, (const char *const[]){"\n\nQ:", "END"});
    begin(b, "p");
    say(b, 0, "one\n");
    assert_string_equal(text(b, 0), "one"); /* the line feed may be the start of a stop string */
    say(b, 0, "two\n\nQ");
    assert_string_equal(text(b, 0), "one\ntwo");
    say(b, 0, ": more that was sampled past it");
    end_choice(b, 0, FINISH_STOP);
    end_request(b);
    struct recorded_choice *c = &b->rec->choice[0];
    assert_string_equal(text(b, 0), "one\ntwo");
    assert_int_equal(c->finish, FINISH_STOP);
    assert_int_equal(c->n_ends, 1);
    assert_string_equal(c->stop_string, "\n\nQ:");
    assert_int_equal(b->request->stop_at[0], 11);
    assert_int_equal(b->rec->usage.completion_tokens, 11);
    assert_int_equal(c->n_tokens, 11);
    finish_bench(b);
}

static void what_only_looked_like_a_stop_is_released(void **state)
{
    (void)state;
    struct bench *b = bench_new();
    set_stops(b, 1, (const char *const[]){"aab"});
    begin(b, "p");
    say(b, 0, "xaaa");
    assert_string_equal(text(b, 0), "xa"); /* "aa" may go on to "aab" */
    say(b, 0, "c");
    assert_string_equal(text(b, 0), "xaaac");
    say(b, 0, "aa");
    end_choice(b, 0, FINISH_LENGTH);
    end_request(b);
    assert_string_equal(text(b, 0), "xaaacaa");
    assert_int_equal(b->rec->choice[0].n_tokens, 7);
    finish_bench(b);
}

static void the_stop_is_shown_when_asked_for(void **state)
{
    (void)state;
    struct bench *b = bench_new();
    set_stops(b, 1, (const char *const[]){"stop"});
    b->params.include_stop_str = true;
    begin(b, "p");
    say(b, 0, "a stop, and more");
    end_request(b);
    assert_string_equal(text(b, 0), "a stop");
    assert_int_equal(b->rec->choice[0].finish, FINISH_STOP);
    finish_bench(b);
}

static void of_two_stops_the_first_to_complete_wins_then_the_longer(void **state)
{
    (void)state;
    struct bench *b = bench_new();
    set_stops(b, 3, (const char *const[]){"cd", "bcd", "bcde"});
    begin(b, "p");
    say(b, 0, "abcde");
    end_request(b);
    assert_string_equal(text(b, 0), "a");
    assert_string_equal(b->rec->choice[0].stop_string, "bcd");
    finish_bench(b);
}

static void min_tokens_lets_early_stops_pass(void **state)
{
    (void)state;
    struct bench *b = bench_new();
    set_stops(b, 1, (const char *const[]){"ab"});
    b->params.min_tokens = 5;
    begin(b, "p");
    say(b, 0, "abxabyab");
    end_request(b);
    assert_string_equal(text(b, 0), "abxaby");
    assert_int_equal(b->rec->usage.completion_tokens, 8);
    finish_bench(b);
}

/* Compares with a plain search on random texts over two letters, in random pieces. */
static void random_stops_match_a_plain_search(void **state)
{
    (void)state;
    srand(7);
    for (int round = 0; round < 2000; round++) {
        char stop[3][8], said[64];
        const char *stops[3];
        int n_stops = 1 + rand() % 3, len = rand() % 40;
        for (int i = 0; i < n_stops; i++) {
            int n = 1 + rand() % 6;
            for (int k = 0; k < n; k++) {
                stop[i][k] = (char)('a' + rand() % 2);
            }
            stop[i][n] = '\0';
            stops[i] = stop[i];
        }
        for (int i = 0; i < len; i++) {
            said[i] = (char)('a' + rand() % 2);
        }
        said[len] = '\0';
        /* the text up to the start of the longest stop at the earliest end */
        size_t want = (size_t)len;
        bool found = false;
        for (int end = 1; end <= len && !found; end++) {
            for (int i = 0; i < n_stops; i++) {
                size_t n = strlen(stop[i]);
                if (n <= (size_t)end && memcmp(said + end - n, stop[i], n) == 0 &&
                    (!found || (size_t)end - n < want)) {
                    want = (size_t)end - n;
                    found = true;
                }
            }
        }
        struct bench *b = bench_new();
        set_stops(b, n_stops, stops);
        begin(b, "p");
        say(b, 0, said);
        end_choice(b, 0, FINISH_LENGTH);
        end_request(b);
        assert_int_equal(b->rec->choice[0].text.len, want);
        assert_memory_equal(text(b, 0), said, want);
        assert_int_equal(b->rec->choice[0].finish, found ? FINISH_STOP : FINISH_LENGTH);
        finish_bench(b);
    }
}

static void the_token_that_ended_it_is_no_text(void **state)
{
    (void)state;
    for (int include = 0; include < 2; include++) {
        struct bench *b = bench_new();
        b->params.include_stop_str = include;
        begin(b, "p");
        say(b, 0, "ab");
        struct delta last = token(b, 0, '!'), end = finish(b, 0, FINISH_STOP);
        last.is_stop = true;
        end.stop_token = '!';
        assert_int_equal(emit_delta(&b->output_processor, &last, &end), 2);
        end_request(b);
        assert_string_equal(text(b, 0), include ? "ab!" : "ab");
        assert_int_equal(b->rec->choice[0].stop_token, '!');
        assert_int_equal(b->rec->choice[0].n_tokens, 3);
        finish_bench(b);
    }
}

/* Deltas of a beam search: the tokens of all choices come before the first choice
 * ends. */
static void end_all(struct bench *b, const struct delta *last)
{
    for (int32_t i = 0; i < b->request->params.n; i++) {
        struct delta d = *last;
        d.choice = i;
        emit_delta(&b->output_processor, &d, NULL);
    }
    for (int32_t i = 0; i < b->request->params.n; i++) {
        struct delta d = finish(b, i, FINISH_STOP);
        d.stop_token = last->is_stop ? last->token : -1;
        emit_delta(&b->output_processor, &d, NULL);
    }
    end_request(b);
}

static void one_hypothesis_gives_one_text_whatever_n_is(void **state)
{
    (void)state;
    for (int32_t n = 1; n <= 2; n++) {
        for (int by_token = 0; by_token < 2; by_token++) {
            struct bench *b = bench_new();
            b->params.n = b->params.best_of = n;
            set_stops(b, 1, (const char *const[]){"b!"});
            begin(b, "p");
            for (int32_t i = 0; i < n; i++) {
                say(b, i, "ab");
            }
            struct delta last = token(b, 0, '!');
            last.is_stop = by_token;
            end_all(b, &last);
            for (int32_t i = 0; i < n; i++) {
                struct recorded_choice *c = &b->rec->choice[i];
                assert_string_equal(text(b, i), by_token ? "ab" : "a");
                assert_string_equal(c->stop_string, by_token ? "" : "b!");
                assert_int_equal(c->stop_token, by_token ? '!' : -1);
                assert_int_equal(c->n_tokens, 3);
                assert_int_equal(c->finish, FINISH_STOP);
            }
            finish_bench(b);
        }
    }
}

/* The stop string is complete only when the rest of a character has become U+FFFD. */
static void a_stop_string_is_found_in_what_the_end_makes_text(void **state)
{
    (void)state;
    for (int along = 0; along < 2; along++) {
        struct bench *b = bench_new();
        set_stops(b, 1, (const char *const[]){"b\xef\xbf\xbd"});
        begin(b, "p");
        say(b, 0, "ab");
        struct delta last = token(b, 0, 0xE2), end = finish(b, 0, FINISH_LENGTH);
        assert_int_equal(emit_delta(&b->output_processor, &last, along ? &end : NULL),
                         along ? 2 : 1);
        emit_delta(&b->output_processor, &end, NULL);
        end_request(b);
        assert_string_equal(text(b, 0), "a");
        assert_int_equal(b->rec->choice[0].finish, FINISH_STOP);
        assert_string_equal(b->rec->choice[0].stop_string, "b\xef\xbf\xbd");
        finish_bench(b);
    }
}

static void a_choice_that_cannot_go_on_says_so_and_ranks_last(void **state)
{
    (void)state;
    struct bench *b = bench_new();
    b->params.n = 2;
    b->params.best_of = 3;
    begin(b, "p");
    say(b, 0, "dead");
    say(b, 1, "a");
    say(b, 2, "b");
    struct delta d = finish(b, 0, FINISH_IMPOSSIBLE);
    d.error = "no way";
    emit_delta(&b->output_processor, &d, NULL);
    end_choice(b, 1, FINISH_LENGTH);
    end_choice(b, 2, FINISH_LENGTH);
    end_request(b);
    assert_string_equal(text(b, 0), "a");
    assert_string_equal(text(b, 1), "b");
    finish_bench(b);

    b = bench_new();
    begin(b, "p");
    say(b, 0, "dead");
    d.request = b->request;
    emit_delta(&b->output_processor, &d, NULL);
    end_request(b);
    assert_string_equal(text(b, 0), "dead");
    assert_int_equal(b->rec->choice[0].finish, FINISH_IMPOSSIBLE);
    assert_string_equal(b->rec->choice[0].error, "no way");
    assert_int_equal(b->stats.finished[FINISH_ERROR], 1);
    finish_bench(b);
}

/* ---- text offsets ---- */

enum { MOST_TOKENS = 24, MOST_BYTES = 3 * MOST_TOKENS };

/* Tokens that are parts of characters: with several bytes each, or with one byte that
 * becomes a U+FFFD where it stays alone. */
struct microbatch {
    const char *json;
    bool fallback;
    int32_t n;
    const char *bytes[12]; /* of token i */
};

static const struct microbatch PARTS[] = {
    {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1,\"\u00e2\":2,\"\u0124\":3,\"\u00ac\":"
     "4,"
     "\"\u00e2\u0124\":5,\"\u00aca\":6,\"\u0124\u00e2\":7,\"\u00c3\":8,\"\u00a9\":9,\"a\u00c3\":10,"
     "\"\u00ff\":11},\"merges\":[]},\"decoder\":{\"type\":\"ByteLevel\"}}",
     false,
     12,
     {"a", "b", "\xe2", "\x82", "\xac", "\xe2\x82",
      "\xac"
      "a",
      "\x82\xe2", "\xc3", "\xa9",
      "a"
      "\xc3",
      "\xff"}},
    {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1,\"<0xE2>\":2,\"<0x82>\":3,"
     "\"<0xAC>\":4,\"<0xC3>\":5,\"<0xA9>\":6,\"<0xFF>\":7},\"merges\":[]},\"decoder\":{\"type\":"
     "\"Sequence\","
     "\"decoders\":[{\"type\":\"ByteFallback\"},{\"type\":\"Fuse\"}]}}",
     true,
     8,
     {"a", "b", "\xe2", "\x82", "\xac", "\xc3", "\xa9", "\xff"}},
};

/* The characters that tokens make, computed without the detokenizer. */
struct made {
    char text[3 * MOST_BYTES + 1];
    size_t at[MOST_BYTES + 1]; /* byte where the k-th character begins */
    int32_t n_chars;
    int32_t offset[MOST_TOKENS]; /* of the tokens */
};

static void make_text(struct made *ret, const struct microbatch *p, const int32_t *id, int32_t n)
{
    uint8_t raw[MOST_BYTES];
    int32_t char_of[MOST_BYTES + 1], first[MOST_TOKENS], len = 0, bad = 0;

    *ret = (struct made){.n_chars = 0};
    for (int32_t i = 0; i < n; i++) {
        first[i] = len;
        memcpy(raw + len, p->bytes[id[i]], strlen(p->bytes[id[i]]));
        len += (int32_t)strlen(p->bytes[id[i]]);
    }
    size_t out = 0;
    for (int32_t at = 0; at < len;) {
        int whole = utf8_next(raw + at, (size_t)(len - at), &bad);
        int32_t taken = whole > 0 ? whole : whole < 0 ? len - at : bad;
        taken = whole <= 0 && p->fallback ? 1 : taken;
        memcpy(ret->text + out, whole > 0 ? (const char *)raw + at : "\xef\xbf\xbd",
               whole > 0 ? (size_t)whole : 3);
        for (int32_t k = 0; k < taken; k++) {
            char_of[at + k] = ret->n_chars;
        }
        ret->at[ret->n_chars++] = out;
        out += whole > 0 ? (size_t)whole : 3;
        at += taken;
    }
    ret->at[ret->n_chars] = out;
    char_of[len] = ret->n_chars;
    for (int32_t i = 0; i < n; i++) {
        ret->offset[i] = char_of[first[i]];
    }
}

/* Tokens from index `echoed` on are generated; the last one may be a stop token without
 * text, and `stop` may truncate the text. */
static void check_offsets(const struct microbatch *p, struct bench *b, const int32_t *id, int32_t n,
                          int32_t echoed, bool by_token, const char *stop)
{
    struct made all, prompt;
    struct err e;
    int32_t shown = by_token ? n - 1 : n, chars;

    make_text(&all, p, id, shown);
    make_text(&prompt, p, id, echoed);
    b->params.echo = true;
    b->params.stop = stop ? strings(1, &stop) : NULL;
    b->params.n_stop = stop != NULL;
    assert_int_equal(request_new(&b->request, &b->params, id, echoed, &e), 0);
    assert_int_equal(output_state_new(b->request, b->tokenizer, &e), 0);
    b->request->user = b->rec;
    request_ref(b->request);
    b->active = 1;
    for (int32_t i = echoed; i < n; i++) {
        struct delta d = token(b, 0, id[i]);
        d.is_stop = by_token && i == n - 1;
        emit_delta(&b->output_processor, &d, NULL);
    }
    end_choice(b, 0, by_token ? FINISH_STOP : FINISH_LENGTH);
    end_request(b);
    struct recorded_choice *c = &b->rec->choice[0];
    for (chars = 0; chars < all.n_chars && all.at[chars] < c->text.len; chars++) {
    }
    /* whole characters, and no other text than these */
    assert_int_equal(c->text.len, all.at[chars]);
    assert_memory_equal(c->text.data ? c->text.data : "", all.text, c->text.len);
    assert_true(c->finish == FINISH_STOP || chars == all.n_chars);
    for (int32_t i = 0; i < c->n_prompt + c->n_tokens; i++) {
        int32_t want = i < shown ? all.offset[i] : all.n_chars;
        /* A character that the prompt leaves incomplete counts as one, where it may
         * become several. */
        bool cut = p->fallback && i < echoed && prompt.offset[i] >= prompt.n_chars - 2;
        if (!cut) {
            assert_int_equal(c->offset[i], MIN(want, chars));
        }
        assert_true(c->offset[i] <= chars && (i == 0 || c->offset[i] >= c->offset[i - 1]));
    }
}

static void offsets_point_into_the_text_that_is_sent(void **state)
{
    (void)state;
    static const char *const stops[] = {NULL,       "a",           "ab", "b\xef\xbf\xbd",
                                        "\xc3\xa9", "\xe2\x82\xac"};
    srand(11);
    for (int round = 0; round < 6000; round++) {
        const struct microbatch *p = &PARTS[round % 2];
        struct bench *b = bench_new();
        struct err e;
        int32_t id[MOST_TOKENS], n = 2 + rand() % (MOST_TOKENS - 2), echoed = 1 + rand() % (n - 1);
        tokenizer_free(b->tokenizer);
        if (tokenizer_open_json(&b->tokenizer, p->json, strlen(p->json), &e) < 0) {
            fail_msg("%s", e.text);
        }
        for (int32_t i = 0; i < n; i++) {
            id[i] = rand() % p->n;
        }
        check_offsets(p, b, id, n, echoed, rand() % 3 == 0, stops[rand() % 6]);
        finish_bench(b);
    }
}

/* ---- echo and log-probabilities ---- */

static void echo_comes_first_and_offsets_count_it(void **state)
{
    (void)state;
    struct bench *b = bench_new();
    b->params.echo = true;
    b->params.n = b->params.best_of = 2;
    begin(b, "h\xc3\xa9 ");
    say(b, 0, "x\xc3\xa9y");
    say(b, 1, "z");
    end_request(b);
    struct recorded_choice *c = &b->rec->choice[0];
    assert_string_equal(text(b, 0), "h\xc3\xa9 x\xc3\xa9y");
    assert_string_equal(text(b, 1), "h\xc3\xa9 z");
    assert_int_equal(c->n_prompt, 4);
    const int32_t offset[] = {0, 1, 1, 2, 3, 4, 4, 5};
    assert_memory_equal(c->offset, offset, sizeof(offset));
    finish_bench(b);
}

static void prompt_logprobs_come_with_the_prompt(void **state)
{
    (void)state;
    struct bench *b = bench_new();
    b->params.echo = true;
    b->params.n_logprobs = 2;
    begin(b, "abc");
    const int32_t top[] = {7, 8};
    const float top_logprob[] = {-0.5f, -1.5f};
    for (int i = 0; i < 3; i++) {
        struct delta d = {.request = b->request,
                          .kind = DELTA_PROMPT,
                          .token = "abc"[i],
                          .logprob = i ? -(float)i : NAN};
        if (i) {
            d.n_top = 2;
            d.top_token = top;
            d.top_logprob = top_logprob;
        }
        emit_delta(&b->output_processor, &d, NULL);
    }
    assert_int_equal(b->rec->choice[0].n_pieces, 0);
    struct delta d = token(b, 0, 'd');
    d.n_top = 2;
    d.top_token = top;
    d.top_logprob = top_logprob;
    emit_delta(&b->output_processor, &d, NULL);
    end_request(b);
    struct recorded_choice *c = &b->rec->choice[0];
    assert_int_equal(c->n_prompt, 3);
    assert_true(isnan(c->logprob[0]));
    assert_int_equal(c->n_top[0], 0);
    assert_true(c->logprob[2] == -2);
    assert_int_equal(c->n_top[2], 2);
    assert_int_equal(c->top0[2], 7);
    assert_int_equal(c->n_top[3], 2);
    assert_int_equal(c->top0[3], 7);
    assert_string_equal(text(b, 0), "abcd");
    finish_bench(b);
}

static void prompt_logprobs_without_echo_bring_no_text(void **state)
{
    (void)state;
    struct bench *b = bench_new();
    b->params.n_prompt_logprobs = 0;
    begin(b, "abc");
    say(b, 0, "d");
    end_request(b);
    assert_string_equal(text(b, 0), "d");
    assert_int_equal(b->rec->choice[0].n_prompt, 3);
    assert_int_equal(b->rec->choice[0].offset[3], 0);
    finish_bench(b);
}

static void echo_alone_with_no_tokens(void **state)
{
    (void)state;
    struct bench *b = bench_new();
    b->params.echo = true;
    b->params.max_tokens = 0;
    begin(b, "just this");
    end_choice(b, 0, FINISH_LENGTH);
    end_request(b);
    assert_string_equal(text(b, 0), "just this");
    assert_int_equal(b->rec->usage.completion_tokens, 0);
    finish_bench(b);
}

/* ---- best_of ---- */

static void best_of_returns_the_best_by_mean_logprob(void **state)
{
    (void)state;
    struct bench *b = bench_new();
    b->params.n = 2;
    b->params.best_of = 3;
    begin(b, "p");
    const float logprob[] = {-3, -1, -2};
    const char *said[] = {"worst", "best", "second"};
    for (int c = 0; c < 3; c++) {
        for (int i = 0; said[c][i]; i++) {
            struct delta d = token(b, c, (unsigned char)said[c][i]);
            d.logprob = logprob[c];
            emit_delta(&b->output_processor, &d, NULL);
        }
    }
    assert_int_equal(b->recorder.n_outputs, 0);
    for (int c = 0; c < 3; c++) {
        end_choice(b, c, FINISH_LENGTH);
    }
    end_request(b);
    assert_string_equal(text(b, 0), "best");
    assert_string_equal(text(b, 1), "second");
    assert_int_equal(b->rec->choice[2].n_pieces, 0);
    assert_int_equal(b->rec->usage.completion_tokens, 15);
    finish_bench(b);
}

static void best_of_with_echo_gives_each_choice_the_prompt(void **state)
{
    (void)state;
    struct bench *b = bench_new();
    b->params.n = 1;
    b->params.best_of = 2;
    b->params.echo = true;
    begin(b, "ab");
    say(b, 0, "x");
    say(b, 1, "y");
    end_request(b);
    assert_string_equal(text(b, 0), "abx");
    assert_int_equal(b->rec->choice[0].offset[2], 2);
    finish_bench(b);
}

/* ---- the ring ---- */

/* Pushes as the engine does: later, if there is no room. */
static void await_room(struct output_stage *stage)
{
    while (output_free_cells(stage) < OUTPUT_DELTA_CELLS) {
        output_commit(stage);
        sched_yield();
    }
}

/* Sends more than the ring holds, with top log-probabilities, through the thread:
 * nothing is lost, order and arrays are kept, there is at most one flush a step. */
static void the_ring_carries_everything_in_order(void **state)
{
    (void)state;
    struct bench *b = bench_new();
    struct output_stage *stage;
    struct err e;
    enum { STEPS = 4000, SEQS = 8 };
    b->params.n = b->params.best_of = SEQS;
    b->params.n_logprobs = 20;
    b->params.max_tokens = STEPS;
    begin(b, "p");
    assert_int_equal(output_open(&stage, &b->output_processor, 1, &e), 0);
    int32_t top[20];
    float top_logprob[20] = {0};
    for (int32_t i = 0; i < STEPS; i++) {
        for (int32_t c = 0; c < SEQS; c++) {
            struct delta d = token(b, c, 'a' + (i + c) % 26);
            for (int k = 0; k < 20; k++) {
                top[k] = i + c + k;
            }
            d.n_top = (i + c) % 21;
            d.top_token = top;
            d.top_logprob = top_logprob;
            await_room(stage);
            output_push(stage, &d);
        }
        output_commit(stage);
    }
    for (int32_t c = 0; c < SEQS; c++) {
        struct delta d = finish(b, c, FINISH_LENGTH);
        await_room(stage);
        output_push(stage, &d);
    }
    struct delta d = {.request = b->request, .kind = DELTA_END};
    await_room(stage);
    output_push(stage, &d);
    output_free(stage);
    assert_true(b->rec->last);
    for (int32_t c = 0; c < SEQS; c++) {
        struct recorded_choice *r = &b->rec->choice[c];
        assert_int_equal(r->n_tokens, STEPS);
        for (int32_t i = 0; i < STEPS; i++) {
            assert_int_equal(r->id[i], 'a' + (i + c) % 26);
            assert_int_equal(r->n_top[i], (i + c) % 21);
            assert_int_equal(r->top0[i], (i + c) % 21 ? i + c : -1);
        }
    }
    assert_true(b->recorder.n_flushes >= 1 && b->recorder.n_flushes <= STEPS + 1);
    finish_bench(b);
}

/* A sink whose first output blocks until it is released, so that the reader stalls. */
struct still {
    struct sink sink;
    struct sink *behind;
    pthread_mutex_t stands;
};

static void emit_still(struct sink *sink, const struct output *o)
{
    struct still *s = CONTAINER_OF(sink, struct still, sink);

    pthread_mutex_lock(&s->stands);
    pthread_mutex_unlock(&s->stands);
    s->behind->emit(s->behind, o);
}

static void flush_still(struct sink *sink)
{
    struct still *s = CONTAINER_OF(sink, struct still, sink);

    s->behind->flush(s->behind);
}

/* However little the reader consumes, the writer learns how much room there is and
 * never waits. */
static void a_stalled_reader_does_not_block_the_writer(void **state)
{
    (void)state;
    struct bench *b = bench_new();
    struct still still = {
        {.emit = emit_still, .flush = flush_still}, &b->recorder.sink, PTHREAD_MUTEX_INITIALIZER};
    struct output_stage *stage;
    struct err e;
    int32_t n = 0;
    b->params.max_tokens = 1 << 20;
    begin(b, "p");
    b->output_processor.sink = &still.sink;
    assert_int_equal(output_open(&stage, &b->output_processor, 1, &e), 0);
    pthread_mutex_lock(&still.stands);
    for (; output_free_cells(stage) >= OUTPUT_DELTA_CELLS && n < 3000; n++) {
        struct delta d = token(b, 0, 'a' + n % 26);
        output_push(stage, &d);
        if (n % 5 == 4) { /* more than the writer emits itself */
            output_commit(stage);
        }
    }
    uint64_t mark = output_mark(stage);
    for (; output_free_cells(stage) >= OUTPUT_DELTA_CELLS; n++) {
        struct delta d = token(b, 0, 'a' + n % 26);
        output_push(stage, &d);
    }
    assert_true(n > 10000);
    assert_false(output_passed(stage, mark));
    pthread_mutex_unlock(&still.stands);
    output_commit(stage);
    while (!output_passed(stage, output_mark(stage))) {
        sched_yield();
    }
    assert_true(output_free_cells(stage) >= n);
    struct delta end = {.request = b->request, .kind = DELTA_END};
    output_push(stage, &end);
    output_free(stage);
    assert_int_equal(b->rec->choice[0].n_tokens, n);
    for (int32_t i = 0; i < MIN(n, RECORD_TOKENS - 1); i++) {
        assert_int_equal(b->rec->choice[0].id[i], 'a' + i % 26);
    }
    finish_bench(b);
}

/* A sink may take over the memory of a long piece instead of copying it. */
static struct output_memory taken;
static int32_t taken_tokens;

static void emit_taking(struct sink *sink, const struct output *o)
{
    (void)sink;
    if (!o->memory || o->n_tokens < 2) {
        return;
    }
    o->memory->taken = true;
    taken = *o->memory;
    taken_tokens = o->n_tokens;
    assert_memory_equal(o->text, "best", 4);
    assert_ptr_equal(o->text, taken.text);
    assert_ptr_equal(o->token, taken.token);
}

static void flush_nothing(struct sink *sink)
{
    (void)sink;
}

static void a_long_piece_can_be_taken(void **state)
{
    (void)state;
    struct sink sink = {.emit = emit_taking, .flush = flush_nothing};
    struct bench *b = bench_new();
    b->params.best_of = 2;
    begin(b, "p");
    b->output_processor.sink = &sink;
    say(b, 0, "best");
    end_choice(b, 0, FINISH_LENGTH);
    end_choice(b, 1, FINISH_LENGTH);
    struct delta d = {.request = b->request, .kind = DELTA_END};
    emit_delta(&b->output_processor, &d, NULL);
    assert_int_equal(taken_tokens, 4);
    assert_int_equal(((struct token_out *)taken.token)[3].id, 't');
    free(taken.text);
    free(taken.token);
    free(taken.top_id);
    free(taken.top_logprob);
    finish_bench(b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_token_is_a_piece_and_the_end_leaves_with_the_last),
        cmocka_unit_test(an_end_of_another_choice_is_not_taken_along),
        cmocka_unit_test(characters_leave_whole),
        cmocka_unit_test(a_stop_string_across_tokens_is_never_shown),
        cmocka_unit_test(what_only_looked_like_a_stop_is_released),
        cmocka_unit_test(the_stop_is_shown_when_asked_for),
        cmocka_unit_test(of_two_stops_the_first_to_complete_wins_then_the_longer),
        cmocka_unit_test(min_tokens_lets_early_stops_pass),
        cmocka_unit_test(random_stops_match_a_plain_search),
        cmocka_unit_test(the_token_that_ended_it_is_no_text),
        cmocka_unit_test(one_hypothesis_gives_one_text_whatever_n_is),
        cmocka_unit_test(a_stop_string_is_found_in_what_the_end_makes_text),
        cmocka_unit_test(a_choice_that_cannot_go_on_says_so_and_ranks_last),
        cmocka_unit_test(offsets_point_into_the_text_that_is_sent),
        cmocka_unit_test(echo_comes_first_and_offsets_count_it),
        cmocka_unit_test(prompt_logprobs_come_with_the_prompt),
        cmocka_unit_test(prompt_logprobs_without_echo_bring_no_text),
        cmocka_unit_test(echo_alone_with_no_tokens),
        cmocka_unit_test(best_of_returns_the_best_by_mean_logprob),
        cmocka_unit_test(best_of_with_echo_gives_each_choice_the_prompt),
        cmocka_unit_test(the_ring_carries_everything_in_order),
        cmocka_unit_test(a_stalled_reader_does_not_block_the_writer),
        cmocka_unit_test(a_long_piece_can_be_taken),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
