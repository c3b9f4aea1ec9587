/* Fits the cost of a step to records of `quire bench offline`: JSON lines, or a file of
 * tests/bench/records.
 *
 * A record of a batch of equal requests gives the time of a decode step for a number of
 * sequences and an amount of context, and the speed of prefill. The steps of all
 * records are fitted by least squares to
 *
 *     weights + sequences * seq + context tokens read * context
 *
 * in relative error, with no parameter below zero; a prompt token costs as much as in
 * the fastest prefill. Overhead is part of the weights' time here. Swapping is not
 * covered. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <cjson/cJSON.h>

#include "engine/simulate/simulate_impl.h"

enum { TERMS = 3, MAX_RECORDS = 1024 };
#define MAX_FILE_BYTES ((size_t)16 << 20)

struct fit {
    double x[MAX_RECORDS][TERMS]; /* 1, sequences, context */
    double us[MAX_RECORDS];
    int32_t n;       /* steps */
    double token_us; /* at the fastest prefill; 0: none seen */
};

static double number(const cJSON *o, const char *name)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(o, name);

    return cJSON_IsNumber(v) && isfinite(v->valuedouble) ? v->valuedouble : 0;
}

/* Adds one run: on average the whole batch decodes at the middle of its outputs. */
static void add_run(struct fit *f, const cJSON *o)
{
    double n = number(o, "requests"), step_us = number(o, "decode_step_ms") * 1e3,
           rate = number(o, "prefill_tok_s");
    double context = number(o, "prompt_tokens") + number(o, "output_tokens") / 2;

    if (rate > 0 && number(o, "prompt_tokens") / fmax(n, 1) >= 256 &&
        (f->token_us == 0 || 1e6 / rate < f->token_us)) {
        f->token_us = 1e6 / rate;
    }
    if (n < 1 || step_us <= 0 || number(o, "decode_steps") < 16 || f->n == MAX_RECORDS) {
        return;
    }
    double *x = f->x[f->n];
    x[0] = 1, x[1] = n, x[2] = context;
    f->us[f->n++] = step_us;
}

static void add_runs(struct fit *f, const cJSON *o)
{
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(o, "engine"), *run;

    add_run(f, o);
    cJSON_ArrayForEach(run, list) add_run(f, run);
}

/* Minimises the squared relative errors over the terms in `used`, by Gaussian
 * elimination of the normal equations. False: they are singular. */
static bool solve(const struct fit *f, const bool *used, double *ret)
{
    double a[TERMS][TERMS + 1] = {{0}};

    for (int32_t r = 0; r < f->n; r++) {
        for (int i = 0; i < TERMS; i++) {
            for (int k = 0; k <= TERMS; k++) {
                a[i][k] += f->x[r][i] / f->us[r] * (k < TERMS ? f->x[r][k] / f->us[r] : 1);
            }
        }
    }
    for (int i = 0; i < TERMS; i++) {
        for (int k = 0; k <= TERMS; k++) {
            if (!used[i] || (k < TERMS && !used[k])) {
                a[i][k] = i == k;
            }
        }
    }
    for (int i = 0; i < TERMS; i++) {
        double pivot = a[i][i];
        if (fabs(pivot) < 1e-18) {
            return false;
        }
        for (int k = 0; k <= TERMS; k++) {
            a[i][k] /= pivot;
        }
        for (int r = 0; r < TERMS; r++) {
            for (int k = TERMS; r != i && k >= i; k--) {
                a[r][k] -= a[r][i] * a[i][k];
            }
        }
    }
    for (int i = 0; i < TERMS; i++) {
        ret[i] = used[i] ? a[i][TERMS] : 0;
    }
    return true;
}

/* The same with all parameters >= 0: negative ones are left out, one at a time. */
static bool solve_positive(const struct fit *f, double *ret)
{
    bool used[TERMS] = {true, f->n > 1, f->n > 2};

    for (;;) {
        int worst = -1;
        if (!solve(f, used, ret)) {
            return false;
        }
        for (int i = 0; i < TERMS; i++) {
            if (ret[i] < 0 && (worst < 0 || ret[i] < ret[worst])) {
                worst = i;
            }
        }
        if (worst < 0) {
            return true;
        }
        used[worst] = false;
    }
}

/* Reads the whole file; NULL: unreadable or too long. */
static char *read_text(const char *path)
{
    FILE *f = fopen(path, "r");
    char *text = f ? malloc(MAX_FILE_BYTES + 1) : NULL;
    size_t n = text ? fread(text, 1, MAX_FILE_BYTES + 1, f) : 0;

    if (f) {
        fclose(f);
    }
    if (!text || n > MAX_FILE_BYTES) {
        free(text);
        return NULL;
    }
    text[n] = '\0';
    return text;
}

int sim_cost_read(struct sim_options *o, const char *path, struct err *e)
{
    double term[TERMS];
    char *text = read_text(path);
    struct fit *f = calloc(1, sizeof(*f));
    int rc = 0;

    if (!text || !f) {
        rc = err_set_param(e, ERR_IO, "cost-from", "cannot read the records in '%s'", path);
    }
    for (const char *at = text; rc == 0 && *(at += strspn(at, " \t\r\n")) != '\0';) {
        cJSON *run = cJSON_ParseWithOpts(at, &at, false);
        if (run) {
            add_runs(f, run);
        } else {
            rc = err_set_param(e, ERR_INVALID, "cost-from", "'%s' holds something that is not JSON",
                               path);
        }
        cJSON_Delete(run);
    }
    if (rc == 0 && (f->n == 0 || f->token_us == 0 || !solve_positive(f, term))) {
        rc = err_set_param(
            e, ERR_INVALID, "cost-from",
            "'%s' has no runs of `quire bench offline` that tell decode_step_ms and prefill_tok_s",
            path);
    }
    if (rc == 0) {
        o->overhead_us = 0;
        o->weights_us = term[0];
        o->seq_us = term[1];
        o->context_us = term[2];
        o->token_us = f->token_us;
    }
    free(text);
    free(f);
    return rc;
}
