/* The requests to simulate.
 *
 * Lengths follow the distribution of recorded ones (simulate_record.c: real prompts and
 * a real model's answers), sampled independently, scaled to the means of the paper's
 * datasets (ShareGPT 161.31 and 337.99 tokens, Alpaca 19.31 and 58.45) and truncated at
 * the model's length. The scale is found at start by bisection, because truncation
 * moves the mean.
 *
 * Chat, as in section 6.5 of the paper: a prompt is the last 1024 tokens of the
 * conversation so far with the new question. CHAT_OPEN conversations are open at a
 * time; each arrival continues one of them.
 *
 * A trace file has one request a line: arrival in seconds, prompt tokens, output tokens
 * and, optionally, n and beam width. Lines that begin with # are skipped. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/simulate/simulate_impl.h"

enum {
    CHAT_OPEN = 256,    /* conversations */
    CHAT_TURNS = 8,     /* at most */
    CHAT_TOKENS = 1024, /* of a prompt (history and question), and of an answer */
};
#define CHAT_GOES_ON 0.72 /* chance of another turn; ShareGPT has 3.5 on average */

struct lengths {
    const int16_t *recorded; /* [sim_n_lengths] sorted */
    double scale;            /* applied to recorded lengths */
    int32_t most;            /* upper bound */
    int32_t fixed;           /* > 0: every length is this */
};

struct conversation {
    uint64_t id;                                      /* 0: not begun; seeds its tokens */
    int32_t turn;                                     /* the current one */
    int32_t question[CHAT_TURNS], answer[CHAT_TURNS]; /* tokens, by turn */
};

struct workload {
    const struct sim_options *o;
    struct lengths prompt, output;
    FILE *trace;
    int64_t line, made;      /* lines of the trace read; requests made */
    double at_us;            /* arrival of the last request */
    uint64_t rng, token_rng; /* states for arrivals and lengths; for prompt tokens */
    bool chat;
    struct conversation open[CHAT_OPEN];
    struct conversation *current; /* the one that the last request belongs to */
};

static uint64_t next(uint64_t *state)
{
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);

    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

double sim_uniform(uint64_t *state)
{
    return (double)(next(state) >> 11) * 0x1p-53;
}

double sim_exponential(uint64_t *state)
{
    return -log(1 - sim_uniform(state));
}

static int32_t sample_length(const struct lengths *l, uint64_t *state)
{
    if (l->fixed > 0) {
        return l->fixed;
    }
    double at = sim_uniform(state) * (sim_n_lengths - 1);
    int32_t i = (int32_t)at;
    double x = l->recorded[i] + (at - i) * (l->recorded[i + 1] - l->recorded[i]);
    return (int32_t)lround(MIN(MAX(x * l->scale, 1), l->most));
}

/* Finds the scale for which the mean of sampled lengths is `mean`. */
static void fit(struct lengths *l, double mean)
{
    enum { DRAWS = 20000, ROUNDS = 40 };
    double low = 0, high = 1000;

    for (int i = 0; i < ROUNDS; i++) {
        uint64_t state = 1;
        double sum = 0;
        l->scale = (low + high) / 2;
        for (int k = 0; k < DRAWS; k++) {
            sum += sample_length(l, &state);
        }
        if (sum / DRAWS < mean) {
            low = l->scale;
        } else {
            high = l->scale;
        }
    }
}

static int choose_dataset(struct workload *w, struct err *e)
{
    const struct sim_options *o = w->o;
    int32_t in = 0, out = 0;
    char end;

    w->prompt =
        (struct lengths){.recorded = sim_prompt_lengths, .scale = 1, .most = o->max_len / 2};
    w->output =
        (struct lengths){.recorded = sim_output_lengths, .scale = 1, .most = o->max_len * 15 / 16};
    w->chat = strcmp(o->dataset, "chat") == 0;
    if (w->chat || strcmp(o->dataset, "sharegpt") == 0) {
        fit(&w->prompt, 161.31);
        fit(&w->output, 337.99);
    } else if (strcmp(o->dataset, "alpaca") == 0) {
        fit(&w->prompt, 19.31);
        fit(&w->output, 58.45);
    } else if (sscanf(o->dataset, "%d:%d%c", &in, &out, &end) == 2 && in > 0 && out > 0) {
        w->prompt.fixed = in;
        w->output.fixed = out;
    } else if (strcmp(o->dataset, "recorded") != 0) {
        return err_set_param(
            e, ERR_INVALID, "dataset",
            "--dataset is '%s'; allowed are sharegpt, alpaca, chat, recorded and IN:OUT in tokens",
            o->dataset);
    }
    if (w->chat && o->max_len < 2 * CHAT_TOKENS) {
        return err_set_param(e, ERR_INVALID, "dataset",
                             "--dataset chat takes %d tokens of --max-model-len", 2 * CHAT_TOKENS);
    }
    return 0;
}

/* ---- conversations ---- */

static void next_chat_turn(struct workload *w)
{
    w->current = &w->open[(int32_t)(sim_uniform(&w->rng) * CHAT_OPEN)];
    struct conversation *c = w->current;
    bool goes_on = c->id > 0 && c->turn + 1 < CHAT_TURNS && sim_uniform(&w->rng) < CHAT_GOES_ON;
    if (goes_on) {
        c->turn++;
    } else {
        *c = (struct conversation){.id = (uint64_t)w->made};
    }
    c->question[c->turn] = MIN(sample_length(&w->prompt, &w->rng), CHAT_TOKENS);
    c->answer[c->turn] = MIN(sample_length(&w->output, &w->rng), CHAT_TOKENS);
}

/* Tokens of the conversation before the requested answer. */
static int32_t history_tokens(const struct conversation *c)
{
    int32_t n = c->question[c->turn];

    for (int32_t i = 0; i < c->turn; i++) {
        n += c->question[i] + c->answer[i];
    }
    return n;
}

static void chat_prompt(const struct workload *w, int32_t *token, int32_t n)
{
    const struct conversation *c = w->current;
    int32_t skip = history_tokens(c) - n, at = 0;

    for (int32_t i = 0; i <= c->turn; i++) {
        uint64_t state = c->id * CHAT_TURNS + (uint64_t)i;
        int32_t answer = i < c->turn ? c->answer[i] : 0;
        for (int32_t k = 0; k < c->question[i] + answer; k++, at++) {
            int32_t t = k < c->question[i] ? (int32_t)(sim_uniform(&state) * SIM_VOCAB) : SIM_TOKEN;
            if (at >= skip) {
                token[at - skip] = t;
            }
        }
    }
}

void workload_prompt(struct workload *w, int32_t *token, int32_t n)
{
    if (w->chat) {
        chat_prompt(w, token, n);
        return;
    }
    for (int32_t i = 0; i < n; i++) {
        token[i] = i < w->o->shared_prefix ? i % SIM_VOCAB
                                           : (int32_t)(sim_uniform(&w->token_rng) * SIM_VOCAB);
    }
}

int workload_open(struct workload **ret, const struct sim_options *o, struct err *e)
{
    struct workload *w = calloc(1, sizeof(*w));

    if (!w) {
        return err_nomem(e, "the workload");
    }
    w->o = o;
    w->rng = o->seed;
    w->token_rng = o->seed ^ UINT64_C(0x5eed);
    int rc = 0;
    if (o->trace) {
        w->trace = fopen(o->trace, "r");
        if (!w->trace) {
            rc = err_set(e, ERR_IO, "cannot read the trace '%s': %s", o->trace, strerror(errno));
        }
    } else {
        rc = choose_dataset(w, e);
    }
    if (rc < 0) {
        workload_free(w);
        return rc;
    }
    *ret = w;
    return 0;
}

void workload_free(struct workload *w)
{
    if (!w) {
        return;
    }
    if (w->trace) {
        fclose(w->trace);
    }
    free(w);
}

static int next_of_trace(struct workload *w, struct sim_arrival *ret, struct err *e)
{
    char line[256];
    double at_s;

    while (fgets(line, sizeof(line), w->trace)) {
        w->line++;
        if (line[0] == '#' || line[strspn(line, " \t\r\n")] == '\0') {
            continue;
        }
        ret->n = w->o->n;
        ret->beam = w->o->beam;
        int n = sscanf(line, "%lf%*[ ,\t]%d%*[ ,\t]%d%*[ ,\t]%d%*[ ,\t]%d", &at_s, &ret->prompt,
                       &ret->output, &ret->n, &ret->beam);
        if (n < 3 || !isfinite(at_s) || at_s * 1e6 < w->at_us || ret->prompt < 1 ||
            ret->output < 1 || ret->n < 1 || ret->n > LIMIT_CHOICES || ret->beam < 0 ||
            ret->beam > LIMIT_CHOICES) {
            return err_set_param(e, ERR_INVALID, "trace",
                                 "line %lld of the trace is not 'arrival_s prompt output [n "
                                 "[beam]]' with times that rise and "
                                 "counts from 1",
                                 (long long)w->line);
        }
        ret->at_us = w->at_us = at_s * 1e6;
        return 1;
    }
    return 0;
}

/* The replica that serves the request made last: in rotation, or by the beginning of
 * its prompt. */
static int32_t replica_of(const struct workload *w)
{
    uint64_t key = w->chat ? w->current->id : (uint64_t)w->made;

    if (w->o->routing == ROUTING_ROUND_ROBIN) {
        return (int32_t)(w->made % w->o->replicas);
    }
    return (int32_t)(next(&key) % (uint64_t)w->o->replicas);
}

static void make_next(struct workload *w, struct sim_arrival *ret)
{
    const struct sim_options *o = w->o;

    w->at_us += sim_exponential(&w->rng) * 1e6 / o->rate;
    *ret = (struct sim_arrival){.at_us = w->at_us, .n = o->n, .beam = o->beam};
    if (w->chat) {
        next_chat_turn(w);
        ret->prompt = MIN(history_tokens(w->current), CHAT_TOKENS);
        ret->output = w->current->answer[w->current->turn];
        return;
    }
    ret->prompt = o->shared_prefix + sample_length(&w->prompt, &w->rng);
    ret->output = MAX(MIN(sample_length(&w->output, &w->rng), o->max_len - ret->prompt), 1);
}

int workload_next(struct workload *w, struct sim_arrival *ret, struct err *e)
{
    while (w->made < w->o->requests) {
        w->made++;
        int rc = 1;
        if (w->trace) {
            rc = next_of_trace(w, ret, e);
        } else {
            make_next(w, ret);
        }
        if (rc <= 0 || replica_of(w) == w->o->replica) {
            return rc;
        }
    }
    return 0;
}
