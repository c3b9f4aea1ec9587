/* Drafts from earlier text: what they are, whose they may be, and how they learn. */
#include "engine/speculate/text/suffix.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/speculate/replay.h"
#include "engine/speculate/text/followers.h"
#include "engine/speculate/text/ngram.h"

enum { TEXT = 20000 };

/* A sequence as the scheduler has it, of its own group. */
struct text {
    struct request request;
    struct group group;
    struct seq seq;
    int32_t prompt[TEXT], out[TEXT];
};

static struct suffix_drafts *drafts;
static struct draft_source *source;

static struct text *text_new(uint64_t order, char *salt)
{
    struct text *t = calloc(1, sizeof(*t));

    assert_non_null(t);
    t->request.prompt = t->prompt;
    t->request.params.cache_salt = salt;
    t->group = (struct group){
        .request = &t->request, .order = order, .max_tokens = TEXT, .seq = &t->seq, .n_seqs = 1};
    t->seq = (struct seq){.group = &t->group, .out = t->out, .seed = order};
    return t;
}

static void prompt(struct text *t, const char *words)
{
    t->group.n_prompt = t->request.n_prompt = (int32_t)strlen(words);
    for (int32_t i = 0; i < t->group.n_prompt; i++) {
        t->prompt[i] = words[i];
    }
}

static void say(struct text *t, const char *words)
{
    for (; *words; words++) {
        t->out[t->seq.n_out++] = *words;
    }
}

/* At most `most` drafted tokens, as characters. */
static const char *drafted(struct text *t, int32_t most)
{
    static char ret[LIMIT_DRAFT + 1];
    int32_t token[LIMIT_DRAFT];
    float prob[LIMIT_DRAFT];
    int32_t n = source->draft(source, &t->seq, most, token, prob);

    assert_true(n >= 0 && n <= most);
    for (int32_t i = 0; i < n; i++) {
        ret[i] = (char)token[i];
        assert_true(prob[i] >= 0 && prob[i] <= (i > 0 ? prob[i - 1] : 1));
    }
    ret[n] = '\0';
    return ret;
}

static void end(struct text *t)
{
    source->ended(source, &t->group);
    free(t);
}

static bool has_followers;

static int start(void **state)
{
    (void)state;
    struct suffix_config c = {
        .n_seqs = 3, .max_len = 4096, .bytes = 1 << 20, .store_tokens = 1 << 14, .secret = 5};
    c.follower_sets = has_followers ? 1 << 14 : 0;
    struct err e;
    if (suffix_open(&drafts, &c, &e) < 0) {
        return -1;
    }
    source = suffix_source(drafts);
    return 0;
}

static int start_with_followers(void **state)
{
    has_followers = true;
    int rc = start(state);
    has_followers = false;
    return rc;
}

static int stop(void **state)
{
    (void)state;
    suffix_free(drafts);
    return 0;
}

static void the_text_behind_an_earlier_occurrence_is_drafted(void **state)
{
    (void)state;
    struct text *t = text_new(1, NULL);
    prompt(t, "the fox jumps over the dog. What did the fox do? ");
    say(t, "the f");
    assert_string_equal(drafted(t, 6), "ox do?");
    say(t, "ox ju"); /* the other one agrees further now */
    assert_string_equal(drafted(t, 12), "mps over the");
    assert_true(source->expect(source, &t->seq) > 0);
    say(t, "XYZ");
    assert_string_equal(drafted(t, 4), "");
    assert_true(source->expect(source, &t->seq) == 0);
    end(t);
}

static void two_tokens_are_a_match_where_no_more_agree(void **state)
{
    (void)state;
    struct text *t = text_new(1, NULL);
    prompt(t, "one fish, red cod; ");
    say(t, "blue fi");
    assert_string_equal(drafted(t, 4), "sh, ");
    say(t, "n"); /* "fin" stood nowhere, nor "in" */
    assert_string_equal(drafted(t, 4), "");
    say(t, "e fi");
    assert_string_equal(drafted(t, 3), "sh,"); /* " fi": the longer match, not the last */
    say(t, "sh");
    assert_true(source->expect(source, &t->seq) > 0);
    end(t);
}

static void a_text_that_repeats_itself_is_drafted_on(void **state)
{
    (void)state;
    struct text *t = text_new(1, NULL);
    prompt(t, "?");
    say(t, "abcabc");
    assert_string_equal(drafted(t, 8), "abcabcab");
    say(t, "abcab");
    assert_string_equal(drafted(t, 5), "cabca");
    end(t);
}

static void recent_answers_are_drafted_to_their_own_salt_alone(void **state)
{
    (void)state;
    struct text *one = text_new(1, "salt"), *same = text_new(2, "salt"), *other = text_new(3, NULL);
    prompt(one, "Q: ");
    say(one, "the answer is forty-two.");
    end(one);
    prompt(same, "a question; ");
    say(same, "the an");
    assert_string_equal(drafted(same, 8), "swer is ");
    assert_string_equal(drafted(same, 32), "swer is forty-two.");
    prompt(other, "a question; ");
    say(other, "the an");
    assert_string_equal(drafted(other, 8), "");
    end(same);
    end(other);
}

static void old_answers_make_room_for_new_ones(void **state)
{
    (void)state;
    for (int32_t i = 0; i < 40; i++) { /* the store has 16384 tokens */
        struct text *t = text_new((uint64_t)i, NULL);
        t->group.n_prompt = 0;
        for (int32_t k = 0; k < 1000; k++) {
            t->out[t->seq.n_out++] = 1000 * i + k;
        }
        end(t);
    }
    for (int32_t i = 0; i < 40; i++) {
        struct text *t = text_new(100, NULL);
        int32_t token[4];
        float prob[4];
        for (int32_t k = 0; k < 20; k++) {
            t->out[t->seq.n_out++] = 1000 * i + 300 + k;
        }
        int32_t n = source->draft(source, &t->seq, 4, token, prob);
        assert_int_equal(n, i < 24 ? 0 : 4);
        assert_true(n == 0 || token[3] == 1000 * i + 323);
        source->verified(source, &t->seq, n, n);
        t->seq.n_out = 0;
        end(t);
    }
}

static void drafts_that_never_hold_are_expected_no_more(void **state)
{
    (void)state;
    struct text *t = text_new(1, NULL);
    prompt(t, "?");
    say(t, "abcdabcdabcd");
    float first = source->expect(source, &t->seq);
    assert_true(first > 0.5F);
    for (int32_t i = 0; i < 100; i++) { /* what follows is ever another token */
        t->out[t->seq.n_out++] = 128 + i;
        say(t, "abcd");
        assert_true(drafted(t, 4)[0] != '\0');
        source->verified(source, &t->seq, 4, 0);
    }
    assert_true(source->expect(source, &t->seq) < 0.1F);
    for (int32_t i = 0; i < 40; i++) {
        say(t, "wxyz");
        drafted(t, 4);
        source->verified(source, &t->seq, 4, 4);
    }
    assert_true(source->expect(source, &t->seq) > 4);
    end(t);
}

/* A match is judged by the token that came, also where it was not drafted. */
static void what_is_not_drafted_is_learned_from(void **state)
{
    (void)state;
    struct text *t = text_new(1, NULL);
    prompt(t, "?");
    say(t, "abcdefg");
    float first = 0;
    for (int32_t i = 0; i < 100; i++) {
        say(t, "abcdefg");
        first = i == 0 ? source->expect(source, &t->seq) : first;
        source->expect(source, &t->seq);
    }
    assert_true(source->expect(source, &t->seq) > 1.5F * first);
    end(t);
}

/* A text of random pairs: each first half has one second half. */
static void what_mostly_follows_is_drafted(void **state)
{
    enum { PAIRS = 1000 };
    static int32_t first[PAIRS];
    int32_t n_right = 0, n_drafted = 0, token[2];
    float prob[2], sum = 0;

    (void)state;
    srand(3);
    for (int32_t round = 0; round < 4; round++) {
        struct text *t = text_new((uint64_t)round, NULL);
        t->group.n_prompt = 0;
        for (int32_t i = 0; i < PAIRS; i++) {
            first[i] = 100 + rand() % 200;
            t->out[t->seq.n_out++] = first[i];
            int32_t n = source->draft(source, &t->seq, 2, token, prob);
            if (round == 3 && n > 0) {
                n_drafted++;
                n_right += token[0] == 1000 + first[i];
                sum += prob[0];
            }
            t->out[t->seq.n_out++] = 1000 + first[i];
        }
        end(t);
    }
    assert_true(n_drafted > 990 && n_right > 990);
    assert_true(sum > 0.9F * (float)n_drafted);
}

/* Followers whose chance is given: the estimates agree with what holds. */
static void chances_are_those_that_are_found(void **state)
{
    struct followers f;
    struct err e;
    struct follow_context c = {{0}, 0};
    double expected = 0, held = 0;

    (void)state;
    assert_int_equal(followers_init(&f, 1 << 12, &e), 0);
    srand(4);
    for (int32_t i = 0; i < 40000; i++) {
        int32_t last = c.token[0];
        int32_t token = rand() % 100 < 40 ? (last * 7 + 1) % 100 : rand() % 100;
        struct follow_guess g = followers_guess(&f, 9, &c);
        if (i > 20000) {
            expected += (double)g.chance;
            held += g.token == token;
        }
        followers_add(&f, 9, &c, token);
        follow_push(&c, token);
    }
    assert_true(held > 0.35 * 20000 && held < 0.45 * 20000);
    assert_true(expected > 0.9 * held && expected < 1.15 * held);
    assert_true(followers_guess(&f, 10, &c).chance == 0); /* another scope */
    followers_release(&f);
}

/* Contexts that come once do not push out those that come often. */
static void frequent_contexts_stay(void **state)
{
    struct followers f;
    struct err e;

    (void)state;
    assert_int_equal(followers_init(&f, 1 << 8, &e), 0);
    srand(5);
    for (int32_t i = 0; i < 20000; i++) {
        struct follow_context often = {{i % 8}, 1}, once = {{1000 + i}, 1};
        followers_add(&f, 0, &often, 50 + i % 8);
        followers_add(&f, 0, &once, i);
    }
    for (int32_t i = 0; i < 8; i++) {
        struct follow_context often = {{i}, 1};
        assert_int_equal(followers_guess(&f, 0, &often).token, 50 + i);
    }
    followers_release(&f);
}

static void sequences_beyond_the_room_draft_nothing(void **state)
{
    (void)state;
    struct text *t[4];
    for (int32_t i = 0; i < 4; i++) {
        t[i] = text_new((uint64_t)i, NULL);
        prompt(t[i], "abcabc");
        say(t[i], "abc");
        assert_string_equal(drafted(t[i], 3), i < 3 ? "abc" : "");
    }
    end(t[1]);
    assert_string_equal(drafted(t[3], 3), "abc"); /* in the room of the one that ended */
    end(t[0]);
    end(t[2]);
    end(t[3]);
}

static void a_long_prompt_is_read_in_several_steps(void **state)
{
    (void)state;
    struct text *t = text_new(1, NULL);
    t->group.n_prompt = t->request.n_prompt = 10000;
    for (int32_t i = 0; i < 10000; i++) {
        t->prompt[i] = i % 100 == 0 ? i : 200 + rand() % 1000;
    }
    for (int32_t i = 0; i < 8; i++) {
        t->out[t->seq.n_out++] = t->prompt[9000 + i];
    }
    int32_t n = 0, steps = 0, token[4];
    float prob[4];
    while ((n = source->draft(source, &t->seq, 4, token, prob)) == 0) {
        assert_true(++steps < 10);
    }
    assert_true(steps >= 3);
    assert_memory_equal(token, t->prompt + 9008, sizeof(token));
    end(t);
}

/* What is found agrees, lies behind nothing, and is found whenever it is near. */
static void matches_are_where_the_text_agrees(void **state)
{
    (void)state;
    enum { WINDOW = 256, LENGTH = 3000 };
    static int32_t token[LENGTH], head[WINDOW / 2], pair[WINDOW / 2], next[WINDOW];
    struct ngram_index x = {.head = head, .pair = pair, .next = next, .window = WINDOW};
    struct ngram_text t = {.first = token, .n_first = LENGTH, .mask = UINT32_MAX};
    int32_t n_found = 0;

    ngram_clear(&x, WINDOW / 2 - 1);
    srand(1);
    for (int32_t end = 1; end <= LENGTH; end++) {
        token[end - 1] = rand() % 4;
        ngram_add(&x, &t, 0);
        struct ngram_match m = ngram_find(&x, &t, 0, &t, end, rand() % (end + 1) - 1);
        if (m.length == 0) {
            continue;
        }
        n_found++;
        assert_true(m.length >= NGRAM_SHORTEST && m.position < end && m.position >= m.length);
        assert_true(end - m.position < WINDOW);
        assert_memory_equal(token + m.position - m.length, token + end - m.length,
                            (size_t)m.length * sizeof(*token));
    }
    assert_true(n_found > LENGTH / 2);
}

static void a_replay_has_the_acceptance_that_was_asked_for(void **state)
{
    (void)state;
    struct replay *r;
    struct err e;
    struct text *t = text_new(7, NULL);
    const float acceptance[] = {0.75f}, places[] = {1, 1, 0};
    int32_t right = 0, token[4];
    float prob[4];

    assert_int_equal(replay_open(&r, 1000, NULL, &e), 0);
    replay_set(r, acceptance, 1);
    struct draft_source *s = replay_source(r);
    prompt(t, "a prompt");
    assert_int_equal(s->draft(s, &t->seq, 1, token, prob), 0);
    for (int32_t i = 0; i < 2000; i++) {
        t->out[t->seq.n_out++] = rand() % 1000;
    }
    s->ended(s, &t->group);
    t->seq.draft_state = t->seq.n_out = 0;
    for (int32_t i = 0; i < 2000; i++, t->seq.n_out++) {
        assert_int_equal(s->draft(s, &t->seq, 1, token, prob), 1);
        right += token[0] == t->out[i];
    }
    assert_true(right > 1430 && right < 1570);
    t->seq.n_out = 0;
    assert_true(s->expect(s, &t->seq) > 2.9f && s->expect(s, &t->seq) < 3.1f);
    replay_set(r, places, 3);
    assert_int_equal(s->draft(s, &t->seq, 4, token, prob), 3);
    assert_true(token[0] == t->out[0] && token[1] == t->out[1] && token[2] != t->out[2]);
    assert_true(prob[1] == 1 && prob[2] == 0 && s->expect(s, &t->seq) == 2);
    replay_set(r, NULL, 0);
    assert_true(s->expect(s, &t->seq) == 0);
    assert_int_equal(s->draft(s, &t->seq, 4, token, prob), 0);
    replay_free(r);
    free(t);
}

#define CASE(f) cmocka_unit_test_setup_teardown(f, start, stop)

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(the_text_behind_an_earlier_occurrence_is_drafted),
        CASE(two_tokens_are_a_match_where_no_more_agree),
        CASE(a_text_that_repeats_itself_is_drafted_on),
        CASE(recent_answers_are_drafted_to_their_own_salt_alone),
        CASE(old_answers_make_room_for_new_ones),
        CASE(drafts_that_never_hold_are_expected_no_more),
        CASE(what_is_not_drafted_is_learned_from),
        cmocka_unit_test_setup_teardown(what_mostly_follows_is_drafted, start_with_followers, stop),
        cmocka_unit_test(chances_are_those_that_are_found),
        cmocka_unit_test(frequent_contexts_stay),
        CASE(sequences_beyond_the_room_draft_nothing),
        CASE(a_long_prompt_is_read_in_several_steps),
        CASE(matches_are_where_the_text_agrees),
        CASE(a_replay_has_the_acceptance_that_was_asked_for),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
