/* Collects a simulation's latencies and memory use, and prints them as text or JSON. */
#include <stdlib.h>
#include <string.h>

#include "engine/simulate/simulate_impl.h"

int report_open(struct sim_report *r, int64_t requests, struct err *e)
{
    *r = (struct sim_report){.capacity = requests};
    r->latency_s = malloc((size_t)requests * sizeof(double));
    r->per_token_s = malloc((size_t)requests * sizeof(double));
    r->ttft_s = malloc((size_t)requests * sizeof(double));
    if (r->latency_s && r->per_token_s && r->ttft_s) {
        return 0;
    }
    report_release(r);
    return err_nomem(e, "the latencies of so many requests");
}

void report_release(struct sim_report *r)
{
    free(r->latency_s);
    free(r->per_token_s);
    free(r->ttft_s);
    *r = (struct sim_report){0};
}

void report_add(struct sim_report *r, const struct sim_report *x)
{
    size_t n = (size_t)x->n_done;

    memcpy(r->latency_s + r->n_done, x->latency_s, n * sizeof(double));
    memcpy(r->per_token_s + r->n_done, x->per_token_s, n * sizeof(double));
    memcpy(r->ttft_s + r->n_done, x->ttft_s, n * sizeof(double));
    r->n_done += x->n_done;
    r->n_refused += x->n_refused;
    r->tokens_out += x->tokens_out;
    r->steps += x->steps;
    r->time_us = MAX(r->time_us, x->time_us);
    r->busy_us += x->busy_us;
    r->requests_us += x->requests_us;
    r->seqs_us += x->seqs_us;
    r->live_us += x->live_us;
    r->reserved_us += x->reserved_us;
    r->internal_us += x->internal_us;
    r->external_us += x->external_us;
    r->free_us += x->free_us;
    r->shared_us += x->shared_us;
    r->entries_us += x->entries_us;
    r->counts.preempt_swap += x->counts.preempt_swap;
    r->counts.preempt_recompute += x->counts.preempt_recompute;
    r->counts.prefix_queries += x->counts.prefix_queries;
    r->counts.prefix_hits += x->counts.prefix_hits;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return x < y ? -1 : x > y;
}

struct summary {
    double mean, p50, p90, p99;
};

static struct summary summarise(double *v, int64_t n)
{
    struct summary s = {0};

    if (n == 0) {
        return s;
    }
    qsort(v, (size_t)n, sizeof(*v), by_value);
    for (int64_t i = 0; i < n; i++) {
        s.mean += v[i] / (double)n;
    }
    s.p50 = v[n / 2];
    s.p90 = v[n * 9 / 10];
    s.p99 = v[n * 99 / 100];
    return s;
}

/* The given percentile of the values; percentile 0: their mean. Sorts them. */
static double at_percentile(double *v, int64_t n, int32_t percentile)
{
    struct summary s = summarise(v, n);

    return percentile == 0 ? s.mean : v[n * percentile / 100];
}

bool report_meets_targets(struct sim_report *r, const struct sim_options *o)
{
    if (r->n_done == 0) {
        return false;
    }
    return (o->target_latency_s <= 0 ||
            at_percentile(r->per_token_s, r->n_done, o->target_percentile) <=
                o->target_latency_s) &&
           (o->target_ttft_s <= 0 ||
            at_percentile(r->ttft_s, r->n_done, o->target_percentile) <= o->target_ttft_s);
}

static double share(double part, double whole)
{
    return whole > 0 ? part / whole : 0;
}

static void print_json(const struct sim_report *r, const struct sim_options *o,
                       const struct summary *s, double held, FILE *out)
{
    static const char *const names[] = {"latency_s", "normalized_latency_s", "ttft_s"};
    double all = (double)o->slots * o->replicas * r->time_us;

    fprintf(out,
            "{\"requests\": %lld, \"refused\": %lld, \"rate\": %g, \"seconds\": %.3f, \"steps\": "
            "%lld, ",
            (long long)r->n_done, (long long)r->n_refused, o->rate, r->time_us * 1e-6,
            (long long)r->steps);
    fprintf(out,
            "\"requests_per_s\": %.4f, \"tokens_per_s\": %.2f, \"batch_requests\": %.3f, "
            "\"batch_sequences\": %.3f, ",
            (double)r->n_done / (r->time_us * 1e-6), (double)r->tokens_out / (r->time_us * 1e-6),
            share(r->requests_us, r->busy_us), share(r->seqs_us, r->busy_us));
    for (int i = 0; i < 3; i++) {
        fprintf(out, "\"%s\": {\"mean\": %.6f, \"p50\": %.6f, \"p90\": %.6f, \"p99\": %.6f}, ",
                names[i], s[i].mean, s[i].p50, s[i].p90, s[i].p99);
    }
    fprintf(out,
            "\"kv\": {\"live\": %.5f, \"reserved\": %.5f, \"internal\": %.5f, \"external\": %.5f, "
            "\"free\": %.5f, ",
            share(r->live_us, all), share(r->reserved_us, all), share(r->internal_us, all),
            share(r->external_us, all), share(r->free_us, all));
    fprintf(out, "\"live_of_allocated\": %.5f, \"saved_by_sharing\": %.5f}, ",
            share(r->live_us, held), share(r->shared_us, r->entries_us));
    fprintf(
        out,
        "\"preempt_swap\": %llu, \"preempt_recompute\": %llu, \"prefix_hit_tokens\": %llu, "
        "\"prefix_query_tokens\": %llu}\n",
        (unsigned long long)r->counts.preempt_swap, (unsigned long long)r->counts.preempt_recompute,
        (unsigned long long)r->counts.prefix_hits, (unsigned long long)r->counts.prefix_queries);
}

static void print_text(const struct sim_report *r, const struct sim_options *o,
                       const struct summary *s, double held, FILE *out)
{
    static const char *const names[] = {"latency", "latency a token", "first token"};
    double all = (double)o->slots * o->replicas * r->time_us;

    if (o->target_latency_s > 0 || o->target_ttft_s > 0) {
        fprintf(out, "holds              %.3g requests/s\n", o->rate);
    }
    fprintf(out, "%lld requests (%lld refused) in %.1f simulated seconds, %lld steps\n",
            (long long)r->n_done, (long long)r->n_refused, r->time_us * 1e-6, (long long)r->steps);
    fprintf(out, "throughput         %.3f requests/s, %.1f tokens/s\n",
            (double)r->n_done / (r->time_us * 1e-6), (double)r->tokens_out / (r->time_us * 1e-6));
    fprintf(out, "running together   %.2f requests, %.2f sequences\n",
            share(r->requests_us, r->busy_us), share(r->seqs_us, r->busy_us));
    for (int i = 0; i < 3; i++) {
        fprintf(out, "%-18s mean %.4f s, p50 %.4f, p90 %.4f, p99 %.4f\n", names[i], s[i].mean,
                s[i].p50, s[i].p90, s[i].p99);
    }
    fprintf(out,
            "KV memory          %.1f %% live, %.1f %% reserved, %.1f %% internal, %.1f %% "
            "external, %.1f %% free\n",
            100 * share(r->live_us, all), 100 * share(r->reserved_us, all),
            100 * share(r->internal_us, all), 100 * share(r->external_us, all),
            100 * share(r->free_us, all));
    fprintf(out, "live of allocated  %.2f %%; blocks saved by sharing %.2f %%\n",
            100 * share(r->live_us, held), 100 * share(r->shared_us, r->entries_us));
    fprintf(out,
            "preemptions        %llu by swap, %llu by recomputation; prefix hits %.1f %% of prompt "
            "tokens\n",
            (unsigned long long)r->counts.preempt_swap,
            (unsigned long long)r->counts.preempt_recompute,
            100 * share((double)r->counts.prefix_hits, (double)r->counts.prefix_queries));
}

void report_print(struct sim_report *r, const struct sim_options *o, FILE *out)
{
    struct summary s[] = {summarise(r->latency_s, r->n_done), summarise(r->per_token_s, r->n_done),
                          summarise(r->ttft_s, r->n_done)};
    double held = r->live_us + r->reserved_us + r->internal_us + r->external_us;

    if (o->json) {
        print_json(r, o, s, held, out);
    } else {
        print_text(r, o, s, held, out);
    }
}
