/* `quire bench serve`: streams from an OpenAI-compatible server. One thread with one
 * epoll set, to use little of the machine; its CPU time is reported.
 *
 * A closed loop keeps `concurrency` streams open; each sends its next request when the
 * previous one has ended. With a request rate, requests start at Poisson times on an
 * idle or a new connection, at most `concurrency` at a time; a request that must wait
 * for a connection is counted as late. TTFT is measured from just before a request is
 * sent to its first event, ITL between events of one stream (0 for events of the same
 * read).
 */
#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "server/bench/bench.h"
#include "server/bench/bench_conn.h"

enum { READ_BYTES = 256 * 1024, EVENTS_AT_ONCE = 512 };

struct serve_run {
    const struct bench_options *o;
    struct bench_load load;
    struct target target;
    int timer_fd;      /* expires when the next request is due */
    struct conn *conn; /* [n_conns] */
    int32_t n_conns;
    int32_t *prompt;                              /* [load.max_prompt] scratch */
    char *bytes;                                  /* [READ_BYTES] scratch */
    int32_t n_started, n_ended, n_failed, n_late; /* n_ended includes n_failed */
    int64_t start_us;
    int64_t tokens, events; /* received in completed answers */
    struct latency_hist ttft, itl, tpot, e2e;
    struct latency_hist normalized; /* end to end / tokens, as in the PagedAttention paper */
    char first_failure[256];
};

/* ---- ends ---- */

static void note_failure(struct serve_run *r, const char *text)
{
    if (r->n_failed++ == 0) {
        snprintf(r->first_failure, sizeof(r->first_failure), "%.255s", text);
    }
    r->n_ended++;
}

static void start_next(struct serve_run *r, struct conn *c);

static void conn_fail(struct serve_run *r, struct conn *c, const char *text)
{
    conn_close(c);
    note_failure(r, text);
    start_next(r, c);
}

/* The answer is complete. */
static void conn_done(struct serve_run *r, struct conn *c)
{
    struct stream_reader *s = &c->reader;

    if (s->failed) {
        char text[256];
        snprintf(text, sizeof(text), "HTTP %d: %.200s", s->status, s->line);
        conn_fail(r, c, text);
        return;
    }
    int64_t now_us = clock_us();
    int32_t tokens = s->completion_tokens >= 0 ? s->completion_tokens : s->n_events;
    r->n_ended++;
    r->tokens += tokens;
    r->events += s->n_events;
    latency_hist_add(&r->e2e, now_us - c->sent_us);
    if (tokens > 0) {
        latency_hist_add(&r->normalized, (now_us - c->sent_us) / tokens);
    }
    if (c->first_us) {
        latency_hist_add(&r->ttft, c->first_us - c->sent_us);
    }
    if (c->first_us && tokens > 1) {
        latency_hist_add(&r->tpot, (c->last_us - c->first_us) / (tokens - 1));
    }
    c->used = true;
    c->state = CONN_IDLE;
    if (s->close) {
        conn_close(c);
    }
    start_next(r, c);
}

/* Send the next request on this connection, if it is due. */
static void start_next(struct serve_run *r, struct conn *c)
{
    struct err e;

    while (r->n_started < r->load.n) {
        int32_t item = r->n_started;
        int64_t due_us = r->start_us + r->load.item[item].start_us;
        if (r->load.item[item].start_us > 0 && clock_us() < due_us) {
            return; /* the timer will start it */
        }
        r->n_late += r->load.item[item].start_us > 0 && clock_us() - due_us > 5000;
        r->n_started++;
        int rc = conn_write(c, &r->target, r->o, &r->load, item, r->prompt, &e);
        if (rc == 0) {
            rc = conn_begin(c, &r->target, &e);
        }
        if (rc == 0) {
            return;
        }
        conn_close(c);
        note_failure(r, e.text);
    }
}

/* ---- events ---- */

static void note_events(struct serve_run *r, struct conn *c, int32_t n)
{
    int64_t now_us = clock_us();

    if (c->first_us == 0) {
        c->first_us = now_us;
        n--;
    } else if (n > 0) {
        latency_hist_add(&r->itl, now_us - c->last_us);
        n--;
    }
    for (; n > 0; n--) {
        latency_hist_add(&r->itl, 0);
    }
    c->last_us = now_us;
}

static void conn_read(struct serve_run *r, struct conn *c)
{
    struct err e;
    ssize_t n = recv(c->fd, r->bytes, READ_BYTES, 0);

    if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
        return;
    }
    if (n <= 0 && c->state == CONN_IDLE) {
        conn_close(c);
        return;
    }
    /* The server closed the idle connection before it saw the request: send it
     * again. */
    if (n <= 0 && c->used && c->reader.status == 0) {
        conn_close(c);
        if (conn_begin(c, &r->target, &e) < 0) {
            conn_fail(r, c, e.text);
        }
        return;
    }
    int32_t events =
        n > 0 ? stream_feed(&c->reader, r->bytes, (size_t)n, &e) : stream_closed(&c->reader, &e);
    if (events < 0) {
        conn_fail(r, c, e.text);
        return;
    }
    if (events > 0) {
        note_events(r, c, events);
    }
    if (c->reader.done) {
        conn_done(r, c);
    }
}

static void conn_writable(struct serve_run *r, struct conn *c)
{
    struct err e;
    int rc = c->state == CONN_CONNECTING ? conn_connected(c, &r->target, &e)
                                         : conn_send(c, &r->target, &e);

    if (rc < 0) {
        conn_fail(r, c, e.text);
    }
}

static void conn_event(struct serve_run *r, struct conn *c, uint32_t events)
{
    if (c->state == CONN_CONNECTING || (c->state == CONN_SENDING && (events & EPOLLOUT))) {
        conn_writable(r, c);
    } else if (c->state != CONN_CLOSED) {
        conn_read(r, c);
    }
}

/* ---- the loop ---- */

static struct conn *free_conn(struct serve_run *r)
{
    for (int pass = 0; pass < 2; pass++) {
        for (int32_t i = 0; i < r->n_conns; i++) {
            if (r->conn[i].state == (pass == 0 ? CONN_IDLE : CONN_CLOSED)) {
                return &r->conn[i];
            }
        }
    }
    return NULL;
}

/* Start all requests that are due, and set the timer for the next one. */
static void start_due(struct serve_run *r)
{
    struct conn *c;
    uint64_t ticks;

    if (read(r->timer_fd, &ticks, sizeof(ticks)) < 0 && errno != EAGAIN) {
        return;
    }
    while (r->n_started < r->load.n && (c = free_conn(r))) {
        int32_t before = r->n_started;
        start_next(r, c);
        if (r->n_started == before) {
            break;
        }
    }
    if (r->n_started == r->load.n) {
        return;
    }
    int64_t wait_us = MAX(r->start_us + r->load.item[r->n_started].start_us - clock_us(), 1);
    struct itimerspec t = {
        .it_value = {.tv_sec = wait_us / 1000000, .tv_nsec = wait_us % 1000000 * 1000}};
    timerfd_settime(r->timer_fd, 0, &t, NULL);
}

static void show_progress(const struct serve_run *r)
{
    char text[96];
    double s = (double)(clock_us() - r->start_us) * 1e-6;

    snprintf(text, sizeof(text), "%d of %d requests, %.0f events/s", r->n_ended, r->load.n,
             (double)r->itl.n / s);
    bench_progress((double)r->n_ended / r->load.n, text);
}

static int loop(struct serve_run *r, struct err *e)
{
    struct epoll_event ev[EVENTS_AT_ONCE];

    r->start_us = clock_us();
    if (r->o->request_rate > 0) {
        start_due(r);
    } else {
        for (int32_t i = 0; i < r->n_conns; i++) {
            start_next(r, &r->conn[i]);
        }
    }
    while (r->n_ended < r->load.n) {
        int n = epoll_wait(r->target.epoll_fd, ev, EVENTS_AT_ONCE, 500);
        if (n < 0 && errno != EINTR) {
            return err_set(e, ERR_IO, "epoll_wait: %s", strerror(errno));
        }
        for (int i = 0; i < n; i++) {
            if (ev[i].data.ptr) {
                conn_event(r, ev[i].data.ptr, ev[i].events);
            } else {
                start_due(r);
            }
        }
        if (r->n_failed == r->n_ended && r->n_failed >= MIN(r->n_conns, r->load.n)) {
            return err_set(e, ERR_IO, "every request failed; the first: %s", r->first_failure);
        }
        show_progress(r);
    }
    return 0;
}

/* ---- the command ---- */

static void raise_file_limit(int32_t n)
{
    struct rlimit l;

    if (getrlimit(RLIMIT_NOFILE, &l) == 0 && l.rlim_cur < (rlim_t)n + 64) {
        l.rlim_cur = MIN(l.rlim_max, (rlim_t)n + 64);
        setrlimit(RLIMIT_NOFILE, &l);
    }
}

static int run_open(struct serve_run *r, struct err *e)
{
    int rc = target_parse(&r->target, r->o->url, e);

    if (rc == 0) {
        rc = bench_load_make(&r->load, r->o, e);
    }
    if (rc < 0) {
        return rc;
    }
    r->n_conns = (int32_t)MIN(r->o->concurrency, r->load.n);
    r->conn = calloc((size_t)r->n_conns, sizeof(*r->conn));
    r->prompt = malloc((size_t)r->load.max_prompt * sizeof(*r->prompt));
    r->bytes = malloc(READ_BYTES);
    if (!r->conn || !r->prompt || !r->bytes) {
        return err_nomem(e, "the connections");
    }
    for (int32_t i = 0; i < r->n_conns; i++) {
        r->conn[i].fd = -1;
        buf_init(&r->conn[i].out, CONN_REQUEST_BYTES);
    }
    raise_file_limit(r->n_conns);
    r->target.epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    r->timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    struct epoll_event ev = {.events = EPOLLIN};
    if (r->target.epoll_fd < 0 || r->timer_fd < 0 ||
        epoll_ctl(r->target.epoll_fd, EPOLL_CTL_ADD, r->timer_fd, &ev) != 0) {
        return err_set(e, ERR_IO, "epoll: %s", strerror(errno));
    }
    return 0;
}

static void run_close(struct serve_run *r)
{
    for (int32_t i = 0; r->conn && i < r->n_conns; i++) {
        conn_close(&r->conn[i]);
        buf_release(&r->conn[i].out);
    }
    if (r->target.epoll_fd >= 0) {
        close(r->target.epoll_fd);
    }
    if (r->timer_fd >= 0) {
        close(r->timer_fd);
    }
    free(r->conn);
    free(r->prompt);
    free(r->bytes);
    bench_load_release(&r->load);
}

static double cpu_s(void)
{
    struct rusage u;

    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
           (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) * 1e-6;
}

static int report(struct serve_run *r, double wall_s, double client_s, struct err *e)
{
    struct bench_report *p;
    int rc = bench_report_new(&p, "serve", r->o, e);

    if (rc < 0) {
        return rc;
    }
    bench_progress_end();
    bench_report_text(p, "url", r->o->url);
    bench_report_number(p, "requests", r->load.n, "");
    bench_report_number(p, "failed", r->n_failed, "");
    if (r->n_failed) {
        bench_report_text(p, "first_failure", r->first_failure);
    }
    bench_report_number(p, "concurrency", r->n_conns, "streams at most");
    if (r->o->request_rate > 0) {
        bench_report_number(p, "request_rate", r->o->request_rate, "a second, asked for");
        bench_report_number(p, "late", r->n_late,
                            "requests more than 5 ms late: too few connections");
    }
    bench_report_number(p, "seed", (double)r->o->seed, "");
    bench_report_number(p, "wall_s", wall_s, "s");
    bench_report_number(p, "requests_s", (r->n_ended - r->n_failed) / wall_s, "requests/s");
    bench_report_number(p, "prompt_tokens", (double)r->load.prompt_tokens, "");
    bench_report_number(p, "output_tokens", (double)r->tokens, "");
    bench_report_number(p, "output_tok_s", (double)r->tokens / wall_s, "tokens/s");
    bench_report_number(p, "events_s", (double)r->events / wall_s, "SSE events with text a second");
    bench_report_number(p, "merged_share",
                        r->tokens ? 1 - (double)r->events / (double)r->tokens : NAN,
                        "of the tokens came in an event with another");
    bench_report_latency(p, "ttft_ms", &r->ttft);
    bench_report_latency(p, "itl_ms", &r->itl);
    bench_report_latency(p, "tpot_ms", &r->tpot);
    bench_report_latency(p, "e2e_ms", &r->e2e);
    bench_report_latency(p, "normalized_ms", &r->normalized);
    bench_report_number(p, "client_cpu_share", client_s / wall_s, "processors this client took");
    rc = bench_report_write(p, stdout, r->o, e);
    bench_report_free(p);
    return rc;
}

int bench_serve(const struct bench_options *given, struct err *e)
{
    struct bench_options o = *given;
    static char default_url[] = "http://127.0.0.1:8000";
    struct serve_run *r = calloc(1, sizeof(*r));

    if (!r) {
        return err_nomem(e, "the run");
    }
    if (!o.url) {
        o.url = default_url;
    }
    if (o.requests == 0 && !o.workload) {
        o.requests = 4 * o.concurrency;
    }
    if (o.seed < 0) {
        o.seed = clock_us() & 0xffffffff;
    }
    r->o = &o;
    r->target.epoll_fd = r->timer_fd = -1;
    signal(SIGPIPE, SIG_IGN);
    int rc = run_open(r, e);
    double cpu = cpu_s();
    if (rc == 0) {
        rc = loop(r, e);
    }
    if (rc == 0) {
        rc = report(r, (double)(clock_us() - r->start_us) * 1e-6, cpu_s() - cpu, e);
    }
    if (rc == 0 && r->n_failed > 0) {
        rc = err_set(e, ERR_IO, "%d of %d requests failed; the first: %s", r->n_failed, r->load.n,
                     r->first_failure);
    }
    run_close(r);
    free(r);
    return rc;
}
