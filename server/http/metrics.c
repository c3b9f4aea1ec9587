/* The metrics of engine and server in the Prometheus text format. */
#include <stdio.h>
#include <string.h>

#include "server/http/http.h"

struct page {
    struct buf *b;
    const char *prefix;
    const char *model; /* escaped label value */
};

static void head(struct page *p, const char *name, const char *type, const char *help)
{
    buf_printf(p->b, "# HELP %s%s %s\n# TYPE %s%s %s\n", p->prefix, name, help, p->prefix, name,
               type);
}

static void gauge(struct page *p, const char *name, const char *help, double value)
{
    head(p, name, "gauge", help);
    buf_printf(p->b, "%s%s{model_name=\"%s\"} %.17g\n", p->prefix, name, p->model, value);
}

static void counter(struct page *p, const char *name, const char *help, uint64_t value)
{
    head(p, name, "counter", help);
    buf_printf(p->b, "%s%s{model_name=\"%s\"} %llu\n", p->prefix, name, p->model,
               (unsigned long long)value);
}

static void labelled(struct page *p, const char *name, const char *label, const char *value,
                     uint64_t count)
{
    buf_printf(p->b, "%s%s{model_name=\"%s\",%s=\"%s\"} %llu\n", p->prefix, name, p->model, label,
               value, (unsigned long long)count);
}

/* The buckets are read one by one while they may change: each value is exact, and +Inf
 * is the sum of the values read. */
static void histogram(struct page *p, const char *name, const char *help, const struct hist *h)
{
    uint64_t total = 0;

    head(p, name, "histogram", help);
    for (int i = 0; i < h->n_bounds; i++) {
        total += atomic_load_explicit(&h->count[i], memory_order_relaxed);
        buf_printf(p->b, "%s%s_bucket{model_name=\"%s\",le=\"%.12g\"} %llu\n", p->prefix, name,
                   p->model, h->bound[i], (unsigned long long)total);
    }
    total += atomic_load_explicit(&h->count[h->n_bounds], memory_order_relaxed);
    buf_printf(p->b, "%s%s_bucket{model_name=\"%s\",le=\"+Inf\"} %llu\n", p->prefix, name, p->model,
               (unsigned long long)total);
    buf_printf(p->b, "%s%s_sum{model_name=\"%s\"} %.17g\n", p->prefix, name, p->model,
               atomic_load_explicit(&h->sum, memory_order_relaxed));
    buf_printf(p->b, "%s%s_count{model_name=\"%s\"} %llu\n", p->prefix, name, p->model,
               (unsigned long long)total);
}

static void write_gauges(struct page *p, const struct engine_stats *s,
                         const struct engine_info *info)
{
    double blocks = info->n_blocks > 0 ? info->n_blocks : 1,
           host = info->n_host_blocks > 0 ? info->n_host_blocks : 1;

    gauge(p, "num_requests_running", "Sequences in the batch.", (double)s->running);
    gauge(p, "num_requests_waiting", "Requests waiting for blocks or a place in the batch.",
          (double)s->waiting);
    gauge(p, "num_requests_swapped", "Requests whose blocks are in host memory.",
          (double)s->swapped);
    gauge(p, "kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.",
          (double)s->blocks_used / blocks);
    gauge(p, "cpu_cache_usage_perc", "Share of host KV blocks in use, 0 to 1.",
          (double)s->host_blocks_used / host);
    head(p, "cache_config_info", "gauge", "Configuration of the KV cache, as labels.");
    buf_printf(p->b,
               "%scache_config_info{model_name=\"%s\",block_size=\"%d\",num_gpu_blocks=\"%d\",num_"
               "cpu_blocks=\"%d\",cache_dtype=\"%s\",bytes_per_token=\"%lld\"} 1\n",
               p->prefix, p->model, info->block_size, info->n_blocks, info->n_host_blocks,
               info->kv_dtype, (long long)info->kv_token_bytes);
}

static void write_ranks(struct page *p, const struct engine *engine, int32_t n_ranks)
{
    head(p, "rank_up", "gauge", "Whether the worker process of a rank is running.");
    for (int32_t i = 0; i < n_ranks; i++) {
        char rank[16];
        snprintf(rank, sizeof(rank), "%d", i);
        labelled(p, "rank_up", "rank", rank, engine_rank_up(engine, i));
    }
}

/* Under the names that vLLM has for them. */
static void write_drafts(struct page *p, const struct engine_stats *s)
{
    uint64_t accepted = 0;

    for (int32_t i = 0; i < LIMIT_DRAFT; i++) {
        accepted += s->accepted_tokens[i];
    }
    counter(p, "spec_decode_num_drafts_total", "Drafts that were verified.", s->drafts);
    counter(p, "spec_decode_num_draft_tokens_total", "Tokens of these drafts.", s->draft_tokens);
    counter(p, "spec_decode_num_accepted_tokens_total", "Tokens of drafts that held.", accepted);
    head(p, "spec_decode_num_accepted_tokens_per_pos_total", "counter",
         "Tokens of drafts that held, by their place in the draft.");
    for (int32_t i = 0; i < LIMIT_DRAFT && (i == 0 || s->accepted_tokens[i] > 0); i++) {
        char place[16];
        snprintf(place, sizeof(place), "%d", i);
        labelled(p, "spec_decode_num_accepted_tokens_per_pos_total", "position", place,
                 s->accepted_tokens[i]);
    }
}

static void write_counters(struct page *p, const struct engine_stats *s)
{
    counter(p, "prompt_tokens_total", "Prompt tokens accepted.", s->prompt_tokens);
    counter(p, "generation_tokens_total",
            "Tokens sampled, including those of best_of and of all beams.", s->generation_tokens);
    head(p, "num_preemptions_total", "counter", "Groups preempted.");
    labelled(p, "num_preemptions_total", "mode", "swap", s->preempt_swap);
    labelled(p, "num_preemptions_total", "mode", "recompute", s->preempt_recompute);
    counter(p, "prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.",
            s->prefix_queries);
    counter(p, "prefix_cache_hits_total", "Prompt tokens found in the prefix cache.",
            s->prefix_hits);
    head(p, "prompt_tokens_by_source_total", "counter",
         "Prompt tokens of admitted requests: computed, or found in the prefix cache.");
    labelled(p, "prompt_tokens_by_source_total", "source", "local_compute", s->prefix_misses);
    labelled(p, "prompt_tokens_by_source_total", "source", "local_cache_hit", s->prefix_hits);
    head(p, "request_success_total", "counter", "Requests ended, by reason.");
    for (int f = FINISH_STOP; f <= FINISH_ERROR; f++) {
        labelled(p, "request_success_total", "finished_reason",
                 finish_reason_name((enum finish_reason)f), s->finished[f]);
    }
    counter(p, "moe_expert_tokens_total",
            "Tokens that experts computed, each counted for every one of its experts.",
            s->expert_rows);
    counter(p, "moe_expert_peak_tokens_total",
            "The same if all experts of a layer had as many as the most loaded one.",
            s->expert_peak);
    counter(p, "late_masks_total", "Masks that took too long, so that a step went on without.",
            s->late_masks);
}

static void write_histograms(struct page *p, const struct engine_stats *s)
{
    histogram(p, "time_to_first_token_seconds", "From arrival to the first token.", &s->ttft_s);
    histogram(p, "inter_token_latency_seconds", "Between tokens of a sequence.", &s->itl_s);
    histogram(p, "request_time_per_output_token_seconds",
              "Mean time per output token of a request.", &s->tpot_s);
    histogram(p, "e2e_request_latency_seconds", "From arrival to the end.", &s->e2e_s);
    histogram(p, "request_queue_time_seconds", "Time in the queue.", &s->queue_s);
    histogram(p, "request_prefill_time_seconds", "From admission to the first token.",
              &s->prefill_s);
    histogram(p, "request_decode_time_seconds", "From the first token to the last.", &s->decode_s);
    histogram(p, "request_prompt_tokens", "Prompt tokens per request.", &s->prompt_len);
    histogram(p, "request_generation_tokens", "Generated tokens per request.", &s->generation_len);
    histogram(p, "request_params_n", "The field n.", &s->params_n);
    histogram(p, "iteration_tokens_total", "Tokens per step.", &s->iteration_tokens);
    histogram(p, "step_host_seconds", "Host time per step.", &s->step_host_s);
    histogram(p, "step_device_seconds", "Device time per step.", &s->step_device_s);
    histogram(p, "step_masks_seconds", "Time per step from its tokens to its grammars' masks.",
              &s->step_masks_s);
}

static void write_http(struct page *p, const struct server *s)
{
    char status[16];

    head(p, "http_requests_total", "counter",
         "HTTP requests, by route and status; 499: the client left before the end.");
    for (int r = 0; r <= n_routes; r++) {
        for (int i = 0; i < HTTP_STATUS_SLOTS; i++) {
            uint64_t n = atomic_load_explicit(&s->requests[r][i], memory_order_relaxed);
            if (!n) {
                continue;
            }
            snprintf(status, sizeof(status), "%d", slot_status(i));
            buf_printf(p->b, "%shttp_requests_total{route=\"%s\",status=\"%s\"} %llu\n", p->prefix,
                       r < n_routes ? routes[r].label : "other", i ? status : "other",
                       (unsigned long long)n);
        }
    }
    gauge(p, "http_connections", "Open connections.", (double)atomic_load(&s->connections));
    counter(p, "http_connections_refused_total",
            "Connections closed because their address has too many.",
            atomic_load(&s->main_listener.admission.n_refused));
    gauge(p, "http_streams", "Responses in progress.", (double)atomic_load(&s->hub.n_streams));
    gauge(p, "client_buffer_bytes", "Bytes held for clients.",
          (double)atomic_load(&s->hub.budget.held));
    gauge(p, "client_buffer_limit_bytes", "Limit of the bytes held for clients.",
          (double)s->hub.budget.limit);
    counter(p, "clients_gone_total", "Clients that left before the end of their answer.",
            atomic_load(&s->hub.n_gone));
    counter(p, "clients_slow_total", "Clients disconnected because they did not read.",
            stream_hub_slow(&s->hub));
    counter(p, "log_lines_dropped_total", "Log lines that stderr did not take.", log_dropped());
}

/* One metric with a value for every key's owner. */
struct key_metric {
    struct page *page;
    const char *name;
    size_t offset;     /* of the counter in struct client */
    const char *limit; /* value of the label `limit`, or NULL */
};

static void write_key(void *arg, struct client *c)
{
    const struct key_metric *k = arg;
    struct page *p = k->page;
    uint64_t n = atomic_load((_Atomic uint64_t *)((char *)c + k->offset));

    buf_printf(p->b, "%s%s{model_name=\"%s\",key=\"%s\"", p->prefix, k->name, p->model, c->name);
    if (k->limit) {
        buf_printf(p->b, ",limit=\"%s\"", k->limit);
    }
    buf_printf(p->b, "} %llu\n", (unsigned long long)n);
}

/* The labels are names from the keys file, never text from a client. */
static void write_keys(struct page *p, struct keys *keys)
{
    struct key_metric m[] = {
        {p, "key_requests_total", offsetof(struct client, n_requests), NULL},
        {p, "key_prompt_tokens_total", offsetof(struct client, prompt_tokens), NULL},
        {p, "key_generation_tokens_total", offsetof(struct client, generation_tokens), NULL},
    };
    static const char *const help[] = {"Requests that count towards limits, by key.",
                                       "Prompt tokens accepted, by key.",
                                       "Tokens generated, by key; counted when a request ends."};

    if (keys_count(keys) == 0) {
        return;
    }
    for (size_t i = 0; i < ARRAY_LEN(m); i++) {
        head(p, m[i].name, "counter", help[i]);
        keys_each(keys, write_key, &m[i]);
    }
    head(p, "key_requests_limited_total", "counter", "Requests answered 429 for a key's limit.");
    for (int kind = QUOTA_REQUESTS; kind < QUOTA_KINDS; kind++) {
        struct key_metric limited = {p, "key_requests_limited_total",
                                     offsetof(struct client, n_limited) +
                                         (size_t)kind * sizeof(uint64_t),
                                     quota_kind_name((enum quota_kind)kind)};
        keys_each(keys, write_key, &limited);
    }
}

/* Escape backslash, quote and newline for a label value. */
static void escape_label(char *to, size_t size, const char *from)
{
    size_t at = 0;

    for (; *from && at + 3 < size; from++) {
        if (*from == '\\' || *from == '"' || *from == '\n') {
            to[at++] = '\\';
        }
        to[at++] = *from == '\n' ? 'n' : *from;
    }
    to[at] = '\0';
}

void metrics_write(struct buf *b, struct server *s)
{
    const struct engine *engine = atomic_load(&s->engine);
    char model[2 * LIMIT_MODEL_NAME_BYTES + 4] = "";
    struct page p = {b, s->settings->metrics_prefix ? s->settings->metrics_prefix : "quire_",
                     model};

    if (engine) {
        escape_label(model, sizeof(model), s->api.info.model_name);
        write_gauges(&p, engine_stats(engine), &s->api.info);
        write_ranks(&p, engine, s->api.info.n_ranks);
        write_counters(&p, engine_stats(engine));
        write_drafts(&p, engine_stats(engine));
        write_histograms(&p, engine_stats(engine));
    }
    write_http(&p, s);
    write_keys(&p, &s->keys);
}
