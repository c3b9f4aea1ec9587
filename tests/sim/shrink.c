/* Shrinks a failing scenario: removes everything without which it still fails. */
#include <string.h>

#include "tests/sim/scenario.h"

/* Whether two failures are of one kind: they differ in numbers alone. */
static bool same_kind(const char *a, const char *b)
{
    const char *const digits = "0123456789";

    do {
        a += strspn(a, digits);
        b += strspn(b, digits);
        if (*a != *b) {
            return false;
        }
    } while (*a++ && *b++);
    return true;
}

static bool still_fails(const struct scenario *s, char *why, size_t why_size)
{
    struct sim_totals t = {0};
    char text[512];

    if (world_run(s, &t, text, sizeof(text)) == 0 || !same_kind(text, why)) {
        return false;
    }
    snprintf(why, why_size, "%s", text);
    return true;
}

/* Each simplifies one aspect of a request, or changes nothing if it is simple
 * already. */
static void drop(struct sim_request *q)
{
    q->absent = true;
}
static void no_lists(struct sim_request *q)
{
    q->n_stop_token = q->n_bias = q->n_allowed = q->n_words = 0;
}
static void no_penalties(struct sim_request *q)
{
    q->presence = q->frequency = 0;
    q->repetition = 1;
}
static void no_cancel(struct sim_request *q)
{
    q->cancel = 0;
}
static void no_parking(struct sim_request *q)
{
    q->park = 0;
}
static void no_text_stop(struct sim_request *q)
{
    memset(q->text_stop, 0, sizeof(q->text_stop));
    q->n_stop = 0;
}
static void no_scores(struct sim_request *q)
{
    q->n_logprobs = q->n_prompt_logprobs = -1;
    q->echo = q->max_tokens == 0;
}
static void one_choice(struct sim_request *q)
{
    q->n = q->best_of = 1;
    q->beam_width = 0;
}
static void fewer_choices(struct sim_request *q)
{
    if (q->best_of > 1) {
        q->best_of--;
        q->beam_width -= q->beam_width > 0;
    }
    q->n = MIN(q->n, q->best_of);
}
static void fewer_tokens(struct sim_request *q)
{
    q->max_tokens -= q->max_tokens > 1;
    q->min_tokens = MIN(q->min_tokens, q->max_tokens);
}
static void shorter_prompt(struct sim_request *q)
{
    q->n_prompt -= q->n_prompt > 1;
}
static void greedy(struct sim_request *q)
{
    q->temperature = q->min_p = 0;
    q->top_p = 1;
    q->top_k = 0;
}
static void no_ends(struct sim_request *q)
{
    q->min_tokens = 0;
    q->ignore_eos = true;
}
static void plain(struct sim_request *q)
{
    q->priority = q->salt = q->tenant = 0;
}
static void no_language(struct sim_request *q)
{
    q->language = 0;
}
static void at_once(struct sim_request *q)
{
    q->arrival = 0;
}

static void (*const simpler[])(struct sim_request *) = {
    drop,       one_choice,   fewer_choices, no_lists,     no_penalties,   no_cancel,
    no_parking, no_text_stop, no_scores,     fewer_tokens, shorter_prompt, greedy,
    no_ends,    plain,        at_once,       no_language,
};

static bool simplify_requests(struct scenario *s, char *why, size_t why_size)
{
    bool any = false;

    for (size_t k = 0; k < ARRAY_LEN(simpler); k++) {
        for (int32_t i = 0; i < s->n_requests; i++) {
            struct scenario before = *s;
            if (s->request[i].absent) {
                continue;
            }
            simpler[k](&s->request[i]);
            if (memcmp(&before, s, sizeof(before)) == 0) {
                continue;
            }
            if (still_fails(s, why, why_size)) {
                any = true;
            } else {
                *s = before;
            }
        }
    }
    return any;
}

static bool simplify_config(struct scenario *s, char *why, size_t why_size)
{
    bool any = false;

    for (int k = 0; k < 12; k++) {
        struct scenario before = *s;
        s->depth = k == 0 ? 0 : s->depth;
        s->fail_at = k == 1 ? 0 : s->fail_at;
        s->config.prefix_cache = k == 2 ? false : s->config.prefix_cache;
        s->config.queue_timeout_us = k == 3 ? 0 : s->config.queue_timeout_us;
        s->config.request_timeout_us = k == 4 ? 0 : s->config.request_timeout_us;
        s->config.target_itl_us = k == 5 ? 0 : s->config.target_itl_us;
        s->config.shared_itl_us = k == 6 ? 0 : s->config.shared_itl_us;
        s->late_delivery = k == 7 ? false : s->late_delivery;
        s->only_forced = k == 8 || s->only_forced;
        s->draft_model = k == 11 ? 0 : s->draft_model;
        s->max_draft = k == 9 ? 0 : k == 10 ? MIN(s->max_draft, 1) : s->max_draft;
        if (memcmp(&before, s, sizeof(before)) == 0) {
            continue;
        }
        if (still_fails(s, why, why_size)) {
            any = true;
        } else {
            *s = before;
        }
    }
    return any;
}

void scenario_shrink(struct scenario *s, char *why, size_t why_size)
{
    enum { ROUNDS = 40 };

    for (int i = 0; i < ROUNDS; i++) {
        bool config = simplify_config(s, why, why_size);
        if (!simplify_requests(s, why, why_size) && !config) {
            return;
        }
    }
}
