/* Start, reload and stop of the HTTP server and its two listeners. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "server/http/http.h"
#include "server/http/listen.h"
#include "server/http/loop.h"
#include "server/http/tls.h"

enum { ADMIN_CONNECTIONS = 2 * LIMIT_RESERVED_CONNECTIONS };

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
        return err_set_param(e, ERR_UNSUPPORTED, "ssl-certfile",
                             "this machine's libmicrohttpd was built without TLS");
    }
    int rc = tls_load(o, NULL, e);
    s->tls = rc == 0;
    return rc;
}

/* MHD's connection limit: reserved connections that yield still count until they are
 * closed. */
static int64_t library_limit(int64_t max_connections, int threads)
{
    return MAX(max_connections + 2 * LIMIT_RESERVED_CONNECTIONS, threads);
}

static int open_main(struct server *s, struct err *e)
{
    struct listener *l = &s->main_listener;
    int threads = pool_threads(s->settings);
    int64_t connections = 0;
    int rc = raise_nofile(&connections, s->settings->max_connections, e);

    rc = rc ? rc : listen_open(&l->fd, s->url, sizeof(s->url), s->settings, e);
    l->local = rc == 0 && listen_is_local(l->fd);
    rc = rc ? rc : admission_open(&l->admission, s->settings, connections, e);
    return rc ? rc
              : http_loops_start(&l->loops, l, threads, library_limit(connections, threads), s->tls,
                                 e);
}

/* One thread, and connections that yield to newer ones: this listener answers whatever
 * the load on the main one. */
static int open_admin(struct server *s, struct err *e)
{
    struct listener *l = &s->admin_listener;
    char url[300] = "";

    if (!s->settings->admin_listen) {
        return 0;
    }
    int rc = listen_admin(&l->fd, url, sizeof(url), s->settings->admin_listen, e);
    l->local = rc == 0 && listen_is_local(l->fd);
    rc = rc ? rc : admission_open(&l->admission, s->settings, 0, e);
    rc = rc ? rc : http_loops_start(&l->loops, l, 1, ADMIN_CONNECTIONS, false, e);
    if (rc == 0) {
        log_event(LOG_INFO, "admin", LOG_STR("url", url));
    }
    return rc;
}

int server_open(struct server *s, const struct settings *settings, struct err *e)
{
    memset(s, 0, sizeof(*s));
    s->settings = settings;
    s->main_listener = (struct listener){.server = s, .fd = -1};
    s->admin_listener = (struct listener){.server = s, .fd = -1, .admin = true};
    pthread_mutex_init(&s->conns_lock, NULL);
    s->requests = calloc((size_t)n_routes + 1, sizeof(*s->requests));
    int rc = s->requests ? 0 : err_nomem(e, "counters");
    rc = rc ? rc : keys_open(&s->keys, settings, e);
    rc = rc ? rc : load_tls(s, e);
    rc = rc ? rc
            : stream_hub_open(&s->hub, MAX(pool_threads(settings) / 2, 1),
                              settings->client_buffer_bytes, e);
    rc = rc ? rc : kv_events_open(&s->kv_events, s, e);
    rc = rc ? rc : workers_open(&s->workers, pool_threads(settings), e);
    rc = rc ? rc : open_main(s, e);
    rc = rc ? rc : open_admin(s, e);
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
    atomic_store(&s->engine, engine); /* last: handlers check this first */
}

int64_t server_busy(const struct server *s)
{
    return atomic_load(&s->hub.n_streams) + atomic_load(&s->workers.busy);
}

static void listener_stop(struct listener *l)
{
    http_loops_stop(&l->loops);
    if (l->fd >= 0) {
        close(l->fd);
    }
    l->fd = -1;
    admission_close(&l->admission);
}

void server_stop(struct server *s)
{
    kv_events_close(&s->kv_events);
    workers_close(&s->workers); /* MHD stops no daemon while connections are suspended */
    listener_stop(&s->main_listener);
    listener_stop(&s->admin_listener);
}

void server_close(struct server *s)
{
    server_stop(s);
    stream_hub_close(&s->hub);
    keys_close(&s->keys);
    tls_release();
    free(s->requests);
    pthread_mutex_destroy(&s->conns_lock);
}
