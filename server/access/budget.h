/* The budget of memory held for clients (setting client-buffer-bytes): request bodies,
 * unsent output of streams, responses being sent. Each holder has an account with its
 * exact number of bytes; budget.held is their sum.
 *
 * Over the limit, new requests are refused (budget_is_over, account_try), and
 * budget_make_room disconnects one client: the one that has taken nothing for longest,
 * or, if none is slow, the one whose account holds most.
 */
#ifndef QUIRE_SERVER_ACCESS_BUDGET_H
#define QUIRE_SERVER_ACCESS_BUDGET_H

#include <pthread.h>
#include <stdatomic.h>

#include "config/base/base.h"

struct budget {
    _Atomic int64_t held;      /* bytes of all accounts */
    int64_t limit;             /* bytes; held may exceed it for a short time */
    _Atomic int64_t looked_us; /* last search for an account to disconnect */
    _Atomic uint64_t n_cut;    /* clients disconnected, counted before they see it */
    pthread_mutex_t lock;
    struct account *first; /* accounts that may be cut off; under lock */
};

struct account {
    struct budget *budget;
    _Atomic int64_t bytes;    /* held now */
    _Atomic int64_t since_us; /* last time the client took bytes; 0: nothing is waiting */
    atomic_bool cut;          /* chosen to be cut off: the holder must end */
    /* Under the budget's lock. */
    int fd;      /* the client's socket, shut down on cut-off; -1: only `cut` is set */
    bool listed; /* in the list budget.first, by prev and next */
    struct account *prev, *next;
};

/* `limit` 0: an eighth of the memory of the machine or its cgroup, at least 64 MiB. */
void budget_init(struct budget *b, int64_t limit);
void budget_release(struct budget *b);
bool budget_is_over(const struct budget *b);
/* If the budget is over its limit, cut one account off: at most once in some
 * milliseconds, since the memory is freed with a delay. Any thread. */
void budget_make_room(struct budget *b);
/* Cut off clients that have taken nothing for stall_us. */
void budget_sweep(struct budget *b, int64_t stall_us);

void account_open(struct account *a, struct budget *b);
/* Allow cutting the account off; `fd` must stay open until account_unlist. */
void account_list(struct account *a, int fd);
void account_unlist(struct account *a);
/* Mark the account as cut off. True: it was not before, so the caller, who disconnects
 * the client, counts it. */
bool account_cut(struct account *a);
/* Set the bytes held. Only one thread at a time may change an account. */
void account_set(struct account *a, int64_t bytes);
/* The same, but an increase beyond the budget fails: false, and nothing changes. */
bool account_try(struct account *a, int64_t bytes);
/* Set the bytes to 0 and unlist the account. */
void account_close(struct account *a);

#endif
