/* A snapshot of the KV pool as JSON. Arrays with one byte per block are in base64,
 * block tables are run-length encoded. */
#include <string.h>

#include "engine/kv_snapshot.h"
#include "server/stream/sse.h"
#include "server/ui/kv_events.h"

enum { MAX_RUNS = 1 << 14 }; /* of all block tables in one snapshot */

/* ---- the window ---- */

static bool is_used(uint8_t block)
{
    return block != KV_FREE && block != KV_CACHED;
}

static int32_t used_in(const struct kv_snapshot *p, int32_t first, int32_t n)
{
    int32_t used = 0;

    for (int32_t b = first; b < MIN(first + n, p->n_blocks); b++) {
        used += is_used(p->block[b]);
    }
    return used;
}

void kv_window_follow(struct kv_window *w, const struct kv_snapshot *p)
{
    int32_t last = MAX(p->n_blocks - w->n, 0), stride = MAX(w->n / 4, 1);

    w->first = MIN(w->first, last);
    if (!w->follow || p->n_blocks <= w->n || p->n_used == 0) {
        return;
    }
    int32_t have = used_in(p, w->first, w->n), most = have, best = w->first;
    if (2 * have >= MIN(p->n_used, w->n)) {
        return; /* no window can show more than twice as many */
    }
    for (int32_t first = 0; first < last + stride; first += stride) {
        int32_t n = used_in(p, MIN(first, last), w->n);
        if (n > most) {
            most = n;
            best = MIN(first, last);
        }
    }
    if (most > 2 * have) {
        w->first = best;
    }
}

/* ---- arrays ---- */

static void put_base64(struct buf *b, const uint8_t *data, int32_t n)
{
    static const char digit[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

    buf_reserve(b, (size_t)n / 3 * 4 + 8);
    for (int32_t i = 0; i < n; i += 3) {
        uint32_t v = (uint32_t)data[i] << 16 | (i + 1 < n ? (uint32_t)data[i + 1] << 8 : 0) |
                     (i + 2 < n ? (uint32_t)data[i + 2] : 0);
        char four[4] = {digit[v >> 18], digit[v >> 12 & 63], i + 1 < n ? digit[v >> 6 & 63] : '=',
                        i + 2 < n ? digit[v & 63] : '='};
        buf_append(b, four, 4);
    }
}

/* Two bytes per cell: the fractions, of 255, of blocks in use and of cached blocks. */
static void put_overview(struct buf *b, const struct kv_snapshot *p)
{
    uint8_t cell[2 * KV_OVERVIEW_CELLS];
    int32_t size = MAX((int32_t)div_ceil(p->n_blocks, KV_OVERVIEW_CELLS), 1), n = 0;

    for (int32_t first = 0; first < p->n_blocks; first += size, n++) {
        int32_t end = MIN(first + size, p->n_blocks), used = 0, cached = 0;
        for (int32_t i = first; i < end; i++) {
            used += is_used(p->block[i]);
            cached += p->block[i] == KV_CACHED;
        }
        /* Rounded up: 0 only if there is no such block. */
        cell[2 * n] = (uint8_t)div_ceil((int64_t)used * 255, end - first);
        cell[2 * n + 1] = (uint8_t)div_ceil((int64_t)cached * 255, end - first);
    }
    buf_printf(b, "\"overview\":{\"cell\":%d,\"map\":\"", size);
    put_base64(b, cell, 2 * n);
    buf_puts(b, "\"},");
}

/* ---- requests ---- */

/* [index in the table, block, length, …]: runs of the blocks in [from, to). */
static void put_runs(struct buf *b, const struct kv_snapshot *p, const struct kv_seq *q,
                     int32_t from, int32_t to, int32_t *runs_left)
{
    const int32_t *entry = p->entry + q->first_entry;
    bool first = true;

    buf_putc(b, '[');
    for (int32_t i = 0, n; i < q->n_entries && *runs_left > 0; i += n) {
        for (n = 1; i + n < q->n_entries && entry[i + n] == entry[i] + n && entry[i + n] < to;
             n++) {
        }
        if (entry[i] < from || entry[i] >= to) {
            n = 1;
            continue;
        }
        buf_printf(b, "%s%d,%d,%d", first ? "" : ",", i, entry[i], n);
        first = false;
        --*runs_left;
    }
    buf_putc(b, ']');
}

static void put_request(struct buf *b, const struct kv_snapshot *p, const struct kv_group *g,
                        const struct kv_window *w, int32_t *runs_left)
{
    static const char *const state[] = {"running", "swapped", "waiting"};
    int32_t from = g->state == KV_SWAPPED ? 0 : w->first;

    buf_printf(b,
               "{\"order\":%llu,\"tag\":%u,\"state\":\"%s\",\"beam\":%s,\"priority\":%d,"
               "\"preemptions\":%d,"
               "\"width\":%d,\"live\":%d,\"prompt_tokens\":%d,\"max_tokens\":%d,\"cached_tokens\":%"
               "d,\"seqs\":[",
               (unsigned long long)g->order, g->tag, state[g->state], g->beam ? "true" : "false",
               g->priority, g->preemptions, g->width, g->n_live, g->n_prompt, g->max_tokens,
               g->cached_tokens);
    for (int32_t i = 0; i < g->n_seqs; i++) {
        const struct kv_seq *q = &p->seq[g->first_seq + i];
        buf_printf(b, "%s{\"index\":%d,\"tokens\":%d,\"computed\":%d,\"blocks\":%d,\"runs\":",
                   i ? "," : "", q->index, q->n_tokens, q->n_computed, q->n_blocks);
        put_runs(b, p, q, from, from + w->n, runs_left);
        buf_putc(b, '}');
    }
    buf_puts(b, "]}");
}

static void put_events(struct buf *b, const struct kv_snapshot *p)
{
    static const char *const kind[] = {"copy", "swap_out", "swap_in"};

    buf_puts(b, "\"events\":[");
    for (int32_t i = 0; i < p->n_events; i++) {
        buf_printf(b, "%s[\"%s\",%d,%d]", i ? "," : "", kind[p->event[i].kind], p->event[i].from,
                   p->event[i].to);
    }
    buf_printf(b, "],\"events_lost\":%lld,", (long long)p->events_lost);
}

/* ---- the document ---- */

static void put_server(struct buf *b, const struct engine *engine)
{
    const struct engine_stats *s = engine_stats(engine);
    struct engine_info info;
    struct engine_chat chat;

    engine_info(engine, &info);
    engine_chat(engine, &chat);
    buf_puts(b, "\"model\":\"");
    buf_json_escape(b, info.model_name, strlen(info.model_name));
    buf_puts(b, "\",\"device\":\"");
    buf_json_escape(b, info.device, strlen(info.device));
    buf_printf(b, "\",\"chat\":%s,\"max_model_len\":%d,\"max_num_seqs\":%d,",
               chat.missing ? "false" : "true", info.max_model_len, info.max_num_seqs);
    buf_printf(
        b,
        "\"stats\":{\"running\":%lld,\"waiting\":%lld,\"swapped\":%lld,\"prompt_tokens\":%llu,"
        "\"generation_tokens\":%llu,\"prefix_queries\":%llu,\"prefix_hits\":%llu,\"preempt_swap\":%"
        "llu,"
        "\"preempt_recompute\":%llu},",
        (long long)s->running, (long long)s->waiting, (long long)s->swapped,
        (unsigned long long)s->prompt_tokens, (unsigned long long)s->generation_tokens,
        (unsigned long long)s->prefix_queries, (unsigned long long)s->prefix_hits,
        (unsigned long long)s->preempt_swap, (unsigned long long)s->preempt_recompute);
}

void kv_events_json(struct buf *b, const struct kv_snapshot *p, const struct kv_window *w,
                    const struct engine *engine)
{
    int32_t shown = MIN(w->n, p->n_blocks - w->first), host_shown = MIN(w->n, p->n_host_blocks);
    int32_t runs_left = MAX_RUNS;

    buf_printf(b, "{\"ms\":%lld,\"step\":%llu,", (long long)p->taken_us / 1000,
               (unsigned long long)p->step);
    buf_printf(
        b,
        "\"pool\":{\"block_size\":%d,\"blocks\":%d,\"used\":%d,\"cached\":%d,\"host_blocks\":%d,"
        "\"host_used\":%d,\"first\":%d,\"map\":\"",
        p->block_size, p->n_blocks, p->n_used, p->n_cached, p->n_host_blocks, p->n_host_used,
        w->first);
    put_base64(b, p->block + w->first, shown);
    buf_puts(b, "\",\"host_map\":\"");
    put_base64(b, p->host, host_shown);
    buf_puts(b, "\"},");
    put_overview(b, p);
    put_server(b, engine);
    put_events(b, p);
    buf_printf(b, "\"groups\":{\"running\":%d,\"swapped\":%d,\"waiting\":%d},\"requests\":[",
               p->n_running, p->n_swapped, p->n_waiting);
    for (int32_t i = 0; i < p->n_groups; i++) {
        if (i) {
            buf_putc(b, ',');
        }
        put_request(b, p, &p->group[i], w, &runs_left);
    }
    buf_printf(b, "],\"cut\":%s}", runs_left == 0 ? "true" : "false");
}
