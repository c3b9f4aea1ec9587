/* Threads for the handlers of long bodies (see workers.h). */
#include "server/http/http.h"

#include <sys/eventfd.h>

#include "server/http/loop.h"

/* The next request; NULL: the workers are stopping, and none is left. */
static struct http_request *next_request(struct workers *w)
{
    pthread_mutex_lock(&w->lock);
    while (!w->first && !w->stopping) {
        pthread_cond_wait(&w->wake, &w->lock);
    }
    struct http_request *x = w->first;
    if (x) {
        w->first = x->next_long;
    }
    pthread_mutex_unlock(&w->lock);
    return x;
}

static void *worker_main(void *arg)
{
    struct workers *w = arg;
    struct http_request *x;

    while ((x = next_request(w)) != NULL) {
        int wake_fd = x->loop->wake_fd; /* once resumed, the request is MHD's */
        if (atomic_load(&w->refusing)) {
            http_request_refuse(x);
        } else {
            http_request_handle(x);
        }
        MHD_resume_connection(x->connection);
        eventfd_write(wake_fd, 1);
    }
    return NULL;
}

int workers_open(struct workers *w, int n, struct err *e)
{
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->wake, NULL);
    for (n = MIN(n, WORKERS_MAX); w->n < n; w->n++) {
        if (pthread_create(&w->thread[w->n], NULL, worker_main, w) != 0) {
            workers_close(w);
            return err_set(e, ERR_IO, "a thread of the HTTP server did not start");
        }
        pthread_setname_np(w->thread[w->n], "quire-worker");
    }
    return 0;
}

void workers_close(struct workers *w)
{
    if (w->n == 0) {
        return;
    }
    pthread_mutex_lock(&w->lock);
    w->stopping = true;
    pthread_cond_broadcast(&w->wake);
    pthread_mutex_unlock(&w->lock);
    for (int i = 0; i < w->n; i++) {
        pthread_join(w->thread[i], NULL);
    }
    w->n = 0;
}

void workers_refuse(struct workers *w)
{
    atomic_store(&w->refusing, true);
}

bool workers_take(struct workers *w, struct http_request *x)
{
    pthread_mutex_lock(&w->lock);
    bool taken = !w->stopping;
    if (taken) {
        MHD_suspend_connection(x->connection);
        atomic_fetch_add(&w->busy, 1);
        x->handed = true;
        x->next_long = NULL;
        *(w->first ? &w->last->next_long : &w->first) = x;
        w->last = x;
        pthread_cond_signal(&w->wake);
    }
    pthread_mutex_unlock(&w->lock);
    return taken;
}

void workers_done(struct workers *w)
{
    atomic_fetch_sub(&w->busy, 1);
}
