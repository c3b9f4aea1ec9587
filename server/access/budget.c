/* Accounting of client memory, and the choice of clients to disconnect. */
#include "server/access/budget.h"

#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "config/base/memory.h"

enum {
    LOOK_US = 10 * 1000,   /* least time between two searches for an account to cut off */
    SLOW_US = 1000 * 1000, /* a client that takes nothing for this long is slow */
    DEFAULT_SHARE = 8,     /* the default limit is 1/DEFAULT_SHARE of memory */
};

static const int64_t DEFAULT_LEAST = (int64_t)64 << 20;

static int64_t default_limit(void)
{
    struct memory_size size = {0};

    memory_size_read(&size);
    return MAX(size.total / DEFAULT_SHARE, DEFAULT_LEAST);
}

void budget_init(struct budget *b, int64_t limit)
{
    *b = (struct budget){.limit = limit ? limit : default_limit()};
    pthread_mutex_init(&b->lock, NULL);
}

void budget_release(struct budget *b)
{
    pthread_mutex_destroy(&b->lock);
}

bool budget_is_over(const struct budget *b)
{
    return atomic_load_explicit(&b->held, memory_order_relaxed) > b->limit;
}

/* ---- accounts ---- */

void account_open(struct account *a, struct budget *b)
{
    *a = (struct account){.budget = b, .fd = -1};
}

void account_list(struct account *a, int fd)
{
    struct budget *b = a->budget;

    pthread_mutex_lock(&b->lock);
    a->fd = fd;
    if (!a->listed) {
        a->listed = true;
        a->prev = NULL;
        a->next = b->first;
        if (a->next) {
            a->next->prev = a;
        }
        b->first = a;
    }
    pthread_mutex_unlock(&b->lock);
}

void account_unlist(struct account *a)
{
    struct budget *b = a->budget;

    pthread_mutex_lock(&b->lock);
    if (a->listed) {
        *(a->prev ? &a->prev->next : &b->first) = a->next;
        if (a->next) {
            a->next->prev = a->prev;
        }
        a->listed = false;
    }
    pthread_mutex_unlock(&b->lock);
}

void account_set(struct account *a, int64_t bytes)
{
    int64_t before = atomic_load_explicit(&a->bytes, memory_order_relaxed);

    if (bytes != before) {
        atomic_store_explicit(&a->bytes, bytes, memory_order_relaxed);
        atomic_fetch_add_explicit(&a->budget->held, bytes - before, memory_order_relaxed);
    }
}

bool account_try(struct account *a, int64_t bytes)
{
    struct budget *b = a->budget;
    int64_t before = atomic_load_explicit(&a->bytes, memory_order_relaxed), more = bytes - before;

    if (more > 0 && atomic_fetch_add(&b->held, more) + more > b->limit) {
        atomic_fetch_sub(&b->held, more);
        return false;
    }
    if (more < 0) {
        atomic_fetch_add(&b->held, more);
    }
    atomic_store_explicit(&a->bytes, bytes, memory_order_relaxed);
    return true;
}

void account_close(struct account *a)
{
    if (a->budget) {
        account_unlist(a);
        account_set(a, 0);
    }
}

/* ---- cutting off ---- */

bool account_cut(struct account *a)
{
    return !atomic_exchange(&a->cut, true);
}

/* Under lock. */
static void cut_off(struct account *a)
{
    bool first = account_cut(a);

    if (a->fd >= 0) {
        atomic_fetch_add(&a->budget->n_cut, first);
        shutdown(a->fd, SHUT_RDWR); /* the socket's owner sees the end and closes it */
    }
}

/* The account of the slowest client, or else the one that holds most; NULL: none. Under
 * lock. */
static struct account *worst(const struct budget *b, int64_t now)
{
    struct account *slowest = NULL, *largest = NULL;
    int64_t age = SLOW_US, most = 0;

    for (struct account *a = b->first; a; a = a->next) {
        int64_t bytes = atomic_load_explicit(&a->bytes, memory_order_relaxed);
        int64_t since = atomic_load_explicit(&a->since_us, memory_order_relaxed);
        if (bytes == 0 || atomic_load_explicit(&a->cut, memory_order_relaxed)) {
            continue;
        }
        if (since && now - since >= age) {
            age = now - since;
            slowest = a;
        }
        if (bytes > most) {
            most = bytes;
            largest = a;
        }
    }
    return slowest ? slowest : largest;
}

void budget_make_room(struct budget *b)
{
    if (!budget_is_over(b)) {
        return;
    }
    int64_t now = clock_us(), looked = atomic_load_explicit(&b->looked_us, memory_order_relaxed);
    if (now - looked < LOOK_US || !atomic_compare_exchange_strong(&b->looked_us, &looked, now)) {
        return;
    }
    pthread_mutex_lock(&b->lock);
    struct account *a = worst(b, now);
    if (a) {
        cut_off(a);
    }
    pthread_mutex_unlock(&b->lock);
}

void budget_sweep(struct budget *b, int64_t stall_us)
{
    int64_t now = clock_us();

    pthread_mutex_lock(&b->lock);
    for (struct account *a = b->first; a; a = a->next) {
        int64_t since = atomic_load_explicit(&a->since_us, memory_order_relaxed);
        if (since && now - since > stall_us &&
            !atomic_load_explicit(&a->cut, memory_order_relaxed)) {
            cut_off(a);
        }
    }
    pthread_mutex_unlock(&b->lock);
}
