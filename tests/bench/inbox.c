/* The request queue against Concurrency Kit's ck_ring (multi-producer, single
 * consumer): nanoseconds per request at full load, submitted one by one and in sets of
 * eight.
 *
 *     build/tests/bench/inbox [producers] [requests a producer]
 *
 * ck_ring has neither sets nor a limit below its capacity. It is timed as it is
 * ("ck_ring"), and with the counter of waiting requests that all-or-none submission
 * needs in front of it ("ck_ring + count").
 */
#include <ck_ring.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

#include "engine/loop/inbox.h"

enum { CAPACITY = 1024, MAX_PRODUCERS = 16 };
enum kind { INBOX, CK_COUNTED, CK_BARE, N_KINDS };
static const char *const kind_name[] = {"inbox", "ck_ring + count", "ck_ring"};

static struct inbox inbox;
static ck_ring_t ring;
static ck_ring_buffer_t ring_buffer[CAPACITY];
static _Atomic int64_t held;
static int64_t n_each;
static int32_t set_size;
static enum kind kind;

static void put_ck(struct group **g)
{
    if (kind == CK_COUNTED) {
        while (atomic_fetch_add(&held, set_size) + set_size > CAPACITY - 1) {
            atomic_fetch_sub(&held, set_size);
            sched_yield();
        }
    }
    for (int32_t i = 0; i < set_size; i++) {
        while (!ck_ring_enqueue_mpsc(&ring, ring_buffer, g[i])) {
            sched_yield();
        }
    }
}

static void *produce(void *arg)
{
    struct group *g[64];

    for (int32_t i = 0; i < set_size; i++) {
        g[i] = arg;
    }
    for (int64_t n = 0; n < n_each; n += set_size) {
        if (kind == INBOX) {
            while (inbox_submit(&inbox, g, set_size, NULL) == ERR_FULL) {
                sched_yield();
            }
        } else {
            put_ck(g);
        }
    }
    return NULL;
}

static int32_t take(struct group **g)
{
    if (kind == INBOX) {
        int32_t n = inbox_take(&inbox, g, 64);
        inbox_admit(&inbox, n);
        return n;
    }
    int32_t n = 0;
    while (n < 64 && ck_ring_dequeue_mpsc(&ring, ring_buffer, &g[n])) {
        n++;
    }
    if (kind == CK_COUNTED && n > 0) {
        atomic_fetch_sub(&held, n);
    }
    return n;
}

static double run(int producers)
{
    pthread_t thread[MAX_PRODUCERS];
    struct group *g[64];
    char body;

    ck_ring_init(&ring, CAPACITY);
    atomic_store(&held, 0);
    int64_t start_us = clock_us();
    for (int i = 0; i < producers; i++) {
        if (pthread_create(&thread[i], NULL, produce, &body) != 0) {
            abort();
        }
    }
    for (int64_t left = producers * n_each; left > 0;) {
        int32_t n = take(g);
        left -= n;
        if (n == 0) {
            sched_yield();
        }
    }
    int64_t end_us = clock_us();
    for (int i = 0; i < producers; i++) {
        pthread_join(thread[i], NULL);
    }
    return (double)(end_us - start_us) * 1e3 / (double)(producers * n_each);
}

int main(int argc, char **argv)
{
    int producers = argc > 1 ? MIN(MAX(atoi(argv[1]), 1), MAX_PRODUCERS) : 4;
    struct err e;

    setvbuf(stdout, NULL, _IOLBF, 0);
    n_each = (argc > 2 ? atoll(argv[2]) : 20000) / 8 * 8;
    if (inbox_init(&inbox, CAPACITY, &e) < 0) {
        return 1;
    }
    for (set_size = 1; set_size <= 8; set_size *= 8) {
        for (kind = 0; kind < N_KINDS; kind++) {
            double best = 1e9;
            for (int i = 0; i < 3; i++) {
                best = MIN(best, run(producers));
            }
            printf("%d producers, sets of %d  %-16s %7.1f ns a request\n", producers, set_size,
                   kind_name[kind], best);
        }
    }
    inbox_release(&inbox);
    return 0;
}
