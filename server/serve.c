/* `quire serve`: the life of the daemon.
 *
 *     listen ─► load the model (in a thread; /health says starting) ─► ready
 *            ─► SIGTERM: drain ─► stop
 *
 * The main thread waits for signals; every TICK_MS it sweeps connections, feeds
 * systemd's watchdog and checks whether the engine died. Signals are blocked in all
 * other threads.
 */
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include "engine/commands.h"
#include "server/commands.h"
#include "server/crash.h"
#include "server/http/http.h"
#include "server/notify.h"

enum {
    TICK_MS = 250,
    IDLE_TICK_MS = 20, /* while waiting for streams to end */
    QUIET_S = 10,      /* without streams before free memory is returned to the system */
    EXTEND_US = 10000000,
    ABORT_WAIT_S = 5, /* for aborted streams to send their error and be released */
};

struct daemon {
    struct settings settings;
    struct server server;
    struct engine *engine;
    struct err open_err; /* of engine_open, as is open_rc; valid once `opened` */
    int open_rc;
    atomic_bool opened; /* engine_open has returned */
    pthread_t opener;   /* the thread that loads the model */
    sigset_t signals;   /* blocked, and waited for by the main thread */
    uint64_t heartbeat; /* the engine's, when the watchdog was last fed */
    int64_t fed_us;     /* when that was, or at start its timeout was put off */
    int64_t busy_us;    /* when a stream was last seen; 0: memory was trimmed since */
    int exit_status;
};

/* ---- the model ---- */

/* Runs in a thread of its own, so that signals and /health are handled meanwhile. */
static void *open_engine(void *arg)
{
    struct daemon *d = arg;

    d->open_rc = engine_open(&d->engine, &d->settings, &d->server.hub.sink, &d->open_err);
    atomic_store(&d->opened, true);
    kill(getpid(), SIGUSR2); /* wakes the main thread */
    return NULL;
}

/* sink.died: the main thread checks the engine after every signal. */
static void wake_main(struct sink *s)
{
    (void)s;
    kill(getpid(), SIGUSR2);
}

/* ---- the API's calls into the engine (struct api_context) ---- */

static void api_defaults(void *arg, struct gen_params *p)
{
    gen_params_init(p, ((struct daemon *)arg)->engine);
}

static uint64_t api_new_seed(void *arg)
{
    static atomic_ullong count;
    struct daemon *d = arg;
    uint64_t seed = 0;

    if (d->settings.seed >= 0) {
        /* With a seed, the n-th prompt of every run of the server gets the same
         * seed. */
        return ((uint64_t)d->settings.seed << 32) + atomic_fetch_add(&count, 1);
    }
    ssize_t got = getrandom(&seed, sizeof(seed), 0);
    (void)got;
    return seed;
}

static int api_encode(void *arg, const char *text, size_t len, bool add_special, int32_t max_tokens,
                      int32_t **ret_ids, int32_t *ret_n, struct err *e)
{
    return engine_encode(((struct daemon *)arg)->engine, text, len, add_special, max_tokens,
                         ret_ids, ret_n, e);
}

static int api_room(void *arg, int32_t tenant, int32_t n, struct err *e)
{
    return engine_check_capacity(((struct daemon *)arg)->engine, tenant, n, e);
}

static const char *api_token_bytes(const void *arg, int32_t id, size_t *ret_len)
{
    return engine_token_bytes(((const struct daemon *)arg)->engine, id, ret_len);
}

static int api_render_chat(void *arg, const char *context, size_t len, struct buf *out,
                           struct err *e)
{
    return engine_render_chat(((struct daemon *)arg)->engine, context, len, out, e);
}

static bool api_opens_reasoning(void *arg, const char *prompt, size_t len)
{
    return engine_chat_opens_reasoning(((struct daemon *)arg)->engine, prompt, len);
}

static int api_chat_grammar(void *arg, const struct chat_tools *t, const char *answer,
                            bool reasoning, struct buf *out, bool *ret_needed, struct err *e)
{
    return engine_chat_grammar(((struct daemon *)arg)->engine, t, answer, reasoning, out,
                               ret_needed, e);
}

static int api_grammar_new(void *arg, enum grammar_kind kind, const char *text, size_t len,
                           int64_t *work, struct grammar **ret, struct err *e)
{
    return engine_grammar_new(((struct daemon *)arg)->engine, kind, text, len, work, ret, e);
}

static void make_ready(struct daemon *d)
{
    struct api_context *api = &d->server.api;

    engine_info(d->engine, &api->info);
    api->max_logprobs = (int32_t)MIN(d->settings.max_logprobs, LIMIT_LOGPROBS);
    api->reject_unknown = d->settings.unknown_fields == UNKNOWN_REJECT;
    api->defaults = api_defaults;
    api->new_seed = api_new_seed;
    api->encode = api_encode;
    api->check_capacity = api_room;
    api->token_bytes = api_token_bytes;
    api->render_chat = api_render_chat;
    api->opens_reasoning = api_opens_reasoning;
    api->chat_grammar = api_chat_grammar;
    api->grammar_new = api_grammar_new;
    engine_chat(d->engine, &api->chat);
    engine_fim(d->engine, &api->fim);
    api->arg = d;
    server_ready(&d->server, d->engine);
}

/* ---- waiting ---- */

/* The next signal, or 0 after `ms`. SIGHUP and SIGUSR1 are handled here. */
static int wait_signal(struct daemon *d, int ms)
{
    struct timespec tick = {.tv_nsec = ms * 1000000L};
    int sig = sigtimedwait(&d->signals, NULL, &tick);

    if (sig == SIGUSR1) {
        state_log(&d->server);
        return 0;
    }
    if (sig == SIGHUP) {
        server_reload(&d->server);
        return 0;
    }
    return sig > 0 ? sig : 0;
}

static bool is_stop(int sig)
{
    return sig == SIGTERM || sig == SIGINT;
}

static void feed_watchdog(struct daemon *d)
{
    int64_t every = notify_watchdog_us(), now = clock_us();
    uint64_t beat = engine_heartbeat(d->engine);

    if (every && beat != d->heartbeat && now - d->fed_us >= every / 4) {
        notify("WATCHDOG=1");
        d->heartbeat = beat;
        d->fed_us = now;
    }
}

/* Wait until there are no streams; false after `seconds`, or if the engine dies.
 * Another signal to stop ends the process. */
static bool wait_idle(struct daemon *d, double seconds)
{
    int64_t until = clock_us() + (int64_t)(seconds * 1e6);

    while (server_busy(&d->server) > 0 && clock_us() < until) {
        int sig = wait_signal(d, IDLE_TICK_MS);
        if (is_stop(sig)) {
            log_event(LOG_WARN, "stopped at once", LOG_STR("signal", strsignal(sig)),
                      LOG_I64("unfinished", server_busy(&d->server)));
            _exit(128 + sig);
        }
        feed_watchdog(d);
        if (!d->exit_status && engine_health(d->engine) == HEALTH_DEAD) {
            return false;
        }
    }
    return server_busy(&d->server) == 0;
}

/* ---- the phases ---- */

static void announce(struct daemon *d)
{
    const struct engine_info *i = &d->server.api.info;
    const char *url = d->server.url;

    log_event(LOG_INFO, "ready", LOG_STR("url", url), LOG_STR("model", i->model_name),
              LOG_STR("version", QUIRE_VERSION));
    if (!isatty(STDOUT_FILENO)) {
        return;
    }
    const char *key = keys_count(&d->server.keys) ? " -H 'Authorization: Bearer YOUR_KEY'" : "";
    bool local = strncmp(url, "unix:", 5) == 0;
    printf("\nQuire serves %s at %s. Try:\n\n  curl %s%s%s/v1/completions%s -H 'Content-Type: "
           "application/json' \\\n"
           "    -d '{\"prompt\": \"Once upon a time\", \"max_tokens\": 40}'\n\n",
           i->model_name, url, local ? "--unix-socket " : "", local ? url + 5 : url,
           local ? " http://localhost" : "", key);
    fflush(stdout);
}

/* systemd's timeout of the start is for reading weights; what takes longer and goes on
 * puts it off. */
static void extend_start(struct daemon *d)
{
    int64_t now = clock_us();

    if (engine_opening_is_slow() && (!d->fed_us || now - d->fed_us > EXTEND_US)) {
        notify("EXTEND_TIMEOUT_USEC=900000000");
        d->fed_us = now;
    }
}

/* Wait for the model: 0, or the status to exit with. */
static int start(struct daemon *d)
{
    d->server.hub.sink.died = wake_main;
    if (pthread_create(&d->opener, NULL, open_engine, d) != 0) {
        fprintf(stderr, "quire: cannot start a thread\n");
        return 1;
    }
    while (!atomic_load(&d->opened)) {
        int sig = wait_signal(d, TICK_MS);
        if (is_stop(sig) && atomic_load(&d->opened)) {
            kill(getpid(), sig); /* loaded in this moment: let serve() stop in order */
        } else if (is_stop(sig)) {
            log_event(LOG_INFO, "stopped while starting", LOG_STR("signal", strsignal(sig)));
            engine_opening_stop();
            /* No request was accepted, and a half-loaded model need not be freed. */
            _exit(0);
        }
        server_sweep(&d->server);
        extend_start(d);
    }
    pthread_join(d->opener, NULL);
    if (d->open_rc) {
        log_event(LOG_ERROR, "cannot start", LOG_STR("error", d->open_err.text));
        return 1;
    }
    make_ready(d);
    notify("READY=1");
    announce(d);
    return 0;
}

/* Return the memory of a burst to the system after a quiet time. */
static void trim_memory(struct daemon *d)
{
    if (server_busy(&d->server) > 0) {
        d->busy_us = clock_us();
    } else if (d->busy_us && clock_us() - d->busy_us > QUIET_S * (int64_t)1000000) {
        d->busy_us = 0;
        malloc_trim(0);
    }
}

static void serve(struct daemon *d)
{
    for (;;) {
        int sig = wait_signal(d, TICK_MS);
        if (is_stop(sig)) {
            log_event(LOG_INFO, "draining", LOG_STR("signal", strsignal(sig)),
                      LOG_I64("unfinished", server_busy(&d->server)));
            return;
        }
        if (engine_health(d->engine) == HEALTH_DEAD) {
            atomic_store(&d->server.dead, true);
            log_event(LOG_ERROR, "engine died", LOG_STR("reason", engine_death(d->engine)));
            d->exit_status = 1;
            return;
        }
        server_sweep(&d->server);
        feed_watchdog(d);
        trim_memory(d);
    }
}

/* Refuse new requests with 503 and let running ones go on for shutdown_timeout; then
 * abort them. */
static void stop(struct daemon *d)
{
    notify("STOPPING=1");
    atomic_store(&d->server.draining, true);
    engine_drain(d->engine);
    if (!wait_idle(d, d->exit_status ? 1 : d->settings.shutdown_timeout)) {
        log_event(LOG_WARN, "ending unfinished requests",
                  LOG_I64("unfinished", server_busy(&d->server)));
        workers_refuse(&d->server.workers);
        stream_hub_abort(&d->server.hub, "the server is shutting down");
        if (!wait_idle(d, ABORT_WAIT_S) && server_busy(&d->server) > 0) {
            /* MHD cannot be stopped while a connection is suspended, and an engine that
             * hangs cannot be joined. */
            log_event(LOG_ERROR, "stopped by force",
                      LOG_I64("unfinished", server_busy(&d->server)));
            _exit(1);
        }
    }
    server_stop(&d->server);
    if (d->exit_status) {
        log_event(LOG_INFO, "stopped");
        /* The engine died: do not free it in order, the system is faster. */
        _exit(d->exit_status);
    }
    engine_free(d->engine);
    server_close(&d->server);
    log_event(LOG_INFO, "stopped");
}

static void block_signals(struct daemon *d)
{
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN); /* a log that may not grow loses lines, as on a full disk */
    sigemptyset(&d->signals);
    sigaddset(&d->signals, SIGTERM);
    sigaddset(&d->signals, SIGINT);
    sigaddset(&d->signals, SIGUSR1);
    sigaddset(&d->signals, SIGUSR2);
    sigaddset(&d->signals, SIGHUP);
    pthread_sigmask(SIG_BLOCK, &d->signals, NULL);
}

/* A node other than node 0: its ranks compute for requests that node 0 accepts. A
 * signal ends it together with its ranks. */
static int node_main(const struct settings *s)
{
    struct err e = {0};
    int rc = node_run(s, &e);

    if (rc < 0 && e.text[0] != '\0') { /* else one of its ranks has logged the reason */
        log_event(LOG_ERROR, "node ended", LOG_STR("error", e.text));
    }
    return rc < 0;
}

int serve_main(int argc, char **argv, char **env)
{
    struct daemon *d = calloc(1, sizeof(*d));
    struct err e = {0};
    bool help = false;

    if (!d || settings_load(&d->settings, argc, argv, env, &help, &e)) {
        fprintf(stderr, "quire: %s\n", d ? e.text : "out of memory");
        free(d);
        return 2;
    }
    if (help) {
        printf("usage: quire serve [MODEL] [flags]\n\n");
        settings_help(stdout);
        settings_release(&d->settings);
        free(d);
        return 0;
    }
    log_setup((enum log_format)d->settings.log_format, (enum log_level)d->settings.log_level);
    if (d->settings.kubernetes_port) {
        log_event(
            LOG_WARN, "QUIRE_PORT ignored",
            LOG_STR(
                "why",
                "it is the tcp:// address that Kubernetes sets for a service named quire, not a "
                "port; enableServiceLinks: false prevents it"),
            LOG_I64("port", d->settings.port));
    }
    if (d->settings.node_rank > 0) {
        int status = node_main(&d->settings);
        settings_release(&d->settings);
        free(d);
        return status;
    }
    block_signals(d);
    crash_report();
    int rc = server_open(&d->server, &d->settings, &e);
    if (rc) {
        log_event(LOG_ERROR, "cannot start", LOG_STR("error", e.text));
        d->exit_status = strcmp(e.param, "api_key_file") == 0 ? 2 : 1; /* as for a wrong setting */
    } else if (start(d)) {
        server_close(&d->server);
        d->exit_status = 1;
    } else {
        serve(d);
        stop(d);
    }
    rc = d->exit_status;
    settings_release(&d->settings);
    free(d);
    return rc;
}
