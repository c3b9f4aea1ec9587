/* One budget for all bytes held for clients: bodies being received, what streams have
 * made and not sent, answers on their way. Every holder has an account, whose bytes are
 * counted exactly; the sum is what `held` says.
 *
 * Over the limit new requests are refused (budget_is_over, account_try), and room is
 * made at the cost of an account that holds bytes already (budget_make_room): the
 * client that has taken nothing for longest, or else the account that holds most.
 */
#ifndef QUIRE_SERVER_ACCESS_BUDGET_H
#define QUIRE_SERVER_ACCESS_BUDGET_H

#include <pthread.h>
#include <stdatomic.h>

#include "config/base/base.h"

struct budget {
    _Atomic int64_t held; /* bytes of all accounts */
    int64_t limit;
    _Atomic int64_t looked_us; /* when an account to be cut off was last looked for */
    pthread_mutex_t lock;
    struct account *first; /* that may be cut off */
};

struct account {
    struct budget *budget;
    _Atomic int64_t bytes;
    _Atomic int64_t since_us; /* its client has taken nothing since; 0: nothing waits for it */
    atomic_bool cut;          /* it is to end: its holder sees to that */
    /* Under the budget's lock. */
    int fd; /* the client's socket, shut down when it is cut off; -1: `cut` is all */
    bool listed;
    struct account *prev, *next;
};

/* `limit` 0: an eighth of the memory that this machine or its cgroup has, at least 64
 * MiB. */
void budget_init(struct budget *b, int64_t limit);
void budget_release(struct budget *b);
bool budget_is_over(const struct budget *b);
/* Over the limit: cut one account off. At most once in some milliseconds, since what is
 * cut needs time to end. Any thread. */
void budget_make_room(struct budget *b);
/* Clients that have taken nothing for stall_us are cut off; how many. */
int budget_sweep(struct budget *b, int64_t stall_us);

void account_open(struct account *a, struct budget *b);
/* It may be cut off from here on; `fd` must stay open until account_unlist. */
void account_list(struct account *a, int fd);
void account_unlist(struct account *a);
/* It holds so many bytes. Calls for one account are made by one thread at a time. */
void account_set(struct account *a, int64_t bytes);
/* The same, unless that is more than before and more than the budget has: false, and
 * nothing changes. */
bool account_try(struct account *a, int64_t bytes);
/* It holds nothing any more, and is not listed. */
void account_close(struct account *a);

#endif
