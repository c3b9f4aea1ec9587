/* Requests to simulate.
 *
 * Lengths are lognormal, cut at the model's length, their means those of the paper's datasets (ShareGPT 161.31 and
 * 337.99 tokens, Alpaca 19.31 and 58.45); the spread was chosen so that the paper's batch sizes come out (Fig. 13).
 * The location is found at start by bisection, because cutting moves the mean. A trace file has a request a line:
 * arrival in seconds, prompt tokens, output tokens and, optionally, n and beam width; lines that begin with # are
 * passed over. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/simulate_impl.h"

struct lengths {
    double location, spread;
    int32_t least, most;
    int32_t fixed; /* > 0: always this */
};

struct workload {
    const struct sim_options *o;
    struct lengths prompt, output;
    FILE *trace;
    int64_t line, made;
    double at_us;
    uint64_t rng;
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

static double normal(uint64_t *state)
{
    return sqrt(2 * sim_exponential(state)) * cos(2 * M_PI * sim_uniform(state));
}

static int32_t draw(const struct lengths *l, uint64_t *state)
{
    if (l->fixed > 0)
        return l->fixed;
    for (int tries = 0; tries < 1000; tries++) {
        double x = exp(l->location + l->spread * normal(state));
        if (x < l->most)
            return MAX((int32_t)lround(x), l->least);
    }
    return l->least;
}

/* Set the location so that the mean of what is drawn is `mean`. */
static void fit(struct lengths *l, double mean)
{
    enum { DRAWS = 20000, ROUNDS = 40 };
    double low = 0, high = log(mean) + 2;
    for (int i = 0; i < ROUNDS; i++) {
        uint64_t state = 1;
        double sum = 0;
        l->location = (low + high) / 2;
        for (int k = 0; k < DRAWS; k++)
            sum += draw(l, &state);
        if (sum / DRAWS < mean)
            low = l->location;
        else
            high = l->location;
    }
}

static int choose_dataset(struct workload *w, struct err *e)
{
    const struct sim_options *o = w->o;
    int32_t in = 0, out = 0;
    char end;
    w->prompt = (struct lengths){.spread = 1.1, .least = 1, .most = o->max_len / 2};
    w->output = (struct lengths){.spread = 0.9, .least = 1, .most = o->max_len * 15 / 16};
    if (strcmp(o->dataset, "sharegpt") == 0) {
        fit(&w->prompt, 161.31);
        fit(&w->output, 337.99);
    } else if (strcmp(o->dataset, "alpaca") == 0) {
        w->prompt.spread = 0.6;
        w->output.spread = 0.9;
        fit(&w->prompt, 19.31);
        fit(&w->output, 58.45);
    } else if (sscanf(o->dataset, "%d:%d%c", &in, &out, &end) == 2 && in > 0 && out > 0) {
        w->prompt.fixed = in;
        w->output.fixed = out;
    } else {
        return err_set_param(e, ERR_INVALID, "dataset",
                             "--dataset is '%s'; allowed are sharegpt, alpaca and IN:OUT in tokens", o->dataset);
    }
    return 0;
}

int workload_open(struct workload **ret, const struct sim_options *o, struct err *e)
{
    struct workload *w = calloc(1, sizeof(*w));
    if (!w)
        return err_nomem(e, "the workload");
    w->o = o;
    w->rng = o->seed;
    int code = 0;
    if (o->trace) {
        w->trace = fopen(o->trace, "r");
        if (!w->trace)
            code = err_set(e, ERR_IO, "cannot read the trace '%s': %s", o->trace, strerror(errno));
    } else {
        code = choose_dataset(w, e);
    }
    if (code < 0) {
        workload_free(w);
        return code;
    }
    *ret = w;
    return 0;
}

void workload_free(struct workload *w)
{
    if (!w)
        return;
    if (w->trace)
        fclose(w->trace);
    free(w);
}

static int next_of_trace(struct workload *w, struct sim_arrival *ret, struct err *e)
{
    char line[256];
    double at_s;
    while (fgets(line, sizeof(line), w->trace)) {
        w->line++;
        if (line[0] == '#' || line[strspn(line, " \t\r\n")] == '\0')
            continue;
        ret->n = w->o->n;
        ret->beam = w->o->beam;
        int n = sscanf(line, "%lf%*[ ,\t]%d%*[ ,\t]%d%*[ ,\t]%d%*[ ,\t]%d", &at_s, &ret->prompt, &ret->output, &ret->n,
                       &ret->beam);
        if (n < 3 || !isfinite(at_s) || at_s * 1e6 < w->at_us || ret->prompt < 1 || ret->output < 1 || ret->n < 1 ||
            ret->n > LIMIT_CHOICES || ret->beam < 0 || ret->beam > LIMIT_CHOICES)
            return err_set_param(
                e, ERR_INVALID, "trace",
                "line %lld of the trace is not 'arrival_s prompt output [n [beam]]' with times that rise and "
                "counts from 1",
                (long long)w->line);
        ret->at_us = w->at_us = at_s * 1e6;
        return 1;
    }
    return 0;
}

int workload_next(struct workload *w, struct sim_arrival *ret, struct err *e)
{
    if (w->made >= w->o->requests)
        return 0;
    w->made++;
    if (w->trace)
        return next_of_trace(w, ret, e);
    w->at_us += sim_exponential(&w->rng) * 1e6 / w->o->rate;
    *ret = (struct sim_arrival){.at_us = w->at_us,
                                .prompt = w->o->shared_prefix + draw(&w->prompt, &w->rng),
                                .output = draw(&w->output, &w->rng),
                                .n = w->o->n,
                                .beam = w->o->beam};
    ret->output = MAX(MIN(ret->output, w->o->max_len - ret->prompt), 1);
    return 1;
}
