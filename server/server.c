/* Starting and stopping what answers HTTP. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "server/http.h"
#include "server/listen.h"
#include "server/tls.h"

enum { IDLE_TIMEOUT_S = 75 }; /* a connection with nothing on it */

static void on_mhd_message(void *cls, const char *format, va_list args)
{
    char text[512];

    (void)cls;
    vsnprintf(text, sizeof(text), format, args);
    text[strcspn(text, "\n")] = '\0';
    log_event(LOG_DEBUG, "microhttpd", LOG_STR("message", text));
}

/* libmicrohttpd finds what it holds for impossible (epoll_ctl cannot take a socket out of its set, say): nothing of it can be
 * trusted any more, so the process ends at once, with its reason, for whoever started it to start it anew. */
_Noreturn static void on_mhd_panic(void *cls, const char *file, unsigned line, const char *reason)
{
    (void)cls;
    log_event(LOG_ERROR, "microhttpd gave up", LOG_STR("reason", reason ? reason : "it does not say"),
              LOG_STR("file", file ? file : ""), LOG_I64("line", line));
    _exit(1);
}

static int pool_threads(const struct settings *s)
{
    long cores = sysconf(_SC_NPROCESSORS_ONLN);

    return (int)(s->http_threads ? s->http_threads : MAX(2, MIN(cores / 2, 16)));
}

static int load_tls(struct server *s, struct err *e)
{
    const struct settings *o = s->settings;

    if (!o->ssl_certfile && !o->ssl_keyfile) {
        return 0;
    }
    if (!o->ssl_certfile || !o->ssl_keyfile) {
        return err_set_param(e, ERR_INVALID, o->ssl_certfile ? "ssl-keyfile" : "ssl-certfile",
                             "ssl-certfile and ssl-keyfile go together; one is missing");
    }
    if (MHD_is_feature_supported(MHD_FEATURE_TLS) != MHD_YES) {
        return err_set_param(e, ERR_UNSUPPORTED, "ssl-certfile", "this machine's libmicrohttpd was built without TLS");
    }
    int rc = tls_load(o, NULL, e);
    s->tls = rc == 0;
    return rc;
}

static int start_daemon(struct server *s, struct err *e)
{
    int threads = pool_threads(s->settings);
    int64_t connections = MAX(raise_nofile(s->settings->max_connections), threads);
    unsigned flags =
        MHD_USE_EPOLL_INTERNAL_THREAD | MHD_ALLOW_SUSPEND_RESUME | MHD_USE_ERROR_LOG | (s->tls ? MHD_USE_TLS : 0);
    struct MHD_OptionItem more[] = {
        {s->tls ? MHD_OPTION_HTTPS_CERT_CALLBACK : MHD_OPTION_END, 0, (void *)(intptr_t)tls_retrieve},
        {MHD_OPTION_END, 0, NULL},
    };

    MHD_set_panic_func(on_mhd_panic, NULL);
    s->daemon =
        MHD_start_daemon(flags, 0, NULL, NULL, http_on_request, s, MHD_OPTION_EXTERNAL_LOGGER, on_mhd_message, NULL,
                         MHD_OPTION_LISTEN_SOCKET, s->listen_fd, MHD_OPTION_CONNECTION_LIMIT, (unsigned)connections,
                         MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)LIMIT_HEADER_BYTES, MHD_OPTION_CONNECTION_TIMEOUT,
                         (unsigned)IDLE_TIMEOUT_S, MHD_OPTION_NOTIFY_COMPLETED, http_on_completed, s,
                         MHD_OPTION_NOTIFY_CONNECTION, http_on_connection, s, MHD_OPTION_THREAD_POOL_SIZE,
                         (unsigned)(threads > 1 ? threads : 0), MHD_OPTION_ARRAY, more, MHD_OPTION_END);
    return s->daemon ? 0
                     : err_set(e, ERR_IO, "libmicrohttpd did not start%s", s->tls ? ": is the certificate right?" : "");
}

int server_open(struct server *s, const struct settings *settings, struct err *e)
{
    memset(s, 0, sizeof(*s));
    s->settings = settings;
    s->listen_fd = -1;
    pthread_mutex_init(&s->peers_lock, NULL);
    s->requests = calloc((size_t)n_routes + 1, sizeof(*s->requests));
    int rc = s->requests ? 0 : err_nomem(e, "counters");
    rc = rc ? rc : keys_open(&s->keys, settings, e);
    rc = rc ? rc : load_tls(s, e);
    rc = rc ? rc : listen_open(&s->listen_fd, s->url, sizeof(s->url), settings, e);
    rc = rc ? rc : stream_hub_open(&s->hub, MAX(pool_threads(settings) / 2, 1), settings->client_buffer_bytes, e);
    rc = rc ? rc : watchers_open(&s->watchers, s, e);
    rc = rc ? rc : start_daemon(s, e);
    if (rc) {
        server_close(s);
    }
    return rc;
}

static void reload_keys(struct server *s)
{
    struct err e = {0};

    if (!s->settings->api_key_file) {
        return;
    }
    if (keys_reload(&s->keys, s->settings, &e)) {
        log_event(LOG_ERROR, "keys not reloaded", LOG_STR("error", e.text));
    } else {
        log_event(LOG_INFO, "keys reloaded", LOG_I64("keys", keys_count(&s->keys)));
    }
}

static void reload_tls(struct server *s)
{
    struct err e = {0};
    bool changed = false;

    if (!s->tls) {
        return;
    }
    if (tls_load(s->settings, &changed, &e)) {
        log_event(LOG_ERROR, "certificate not reloaded", LOG_STR("error", e.text));
    } else {
        log_event(LOG_INFO, changed ? "certificate reloaded" : "certificate unchanged");
    }
}

void server_reload(struct server *s)
{
    log_event(LOG_INFO, "reloading", LOG_STR("what", "api-key-file, ssl-certfile, ssl-keyfile"),
              LOG_STR("not", "settings: for those, restart"));
    reload_keys(s);
    reload_tls(s);
}

void server_ready(struct server *s, struct engine *engine)
{
    atomic_store(&s->hub.engine, engine);
    atomic_store(&s->engine, engine); /* last: handlers look at it first */
}

int64_t server_busy(const struct server *s)
{
    return atomic_load(&s->hub.n_streams);
}

void server_stop(struct server *s)
{
    watchers_close(&s->watchers);
    if (s->daemon) {
        MHD_stop_daemon(s->daemon); /* closes the listening socket */
    } else if (s->listen_fd >= 0) {
        close(s->listen_fd);
    }
    s->daemon = NULL;
    s->listen_fd = -1;
}

void server_close(struct server *s)
{
    server_stop(s);
    stream_hub_close(&s->hub);
    keys_close(&s->keys);
    tls_release();
    free(s->requests);
    pthread_mutex_destroy(&s->peers_lock);
}
