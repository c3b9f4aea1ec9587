/* Threads of the CPU backend.
 *
 * One job at a time. A job is published by raising `epoch`; helpers that see a new epoch take task numbers from `next`
 * until none is left, then raise `done`. The caller does the same and waits for `done` of all helpers, so that when
 * cpu_pool_run returns no helper looks at the job any more. A helper that has spun in vain sets `sleeping` and waits on the
 * futex `epoch`; the caller wakes only when someone sleeps.
 */
#include "kernels/cpu/pool.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "kernels/cpu/isa.h"

enum { SPIN_ROUNDS = 20000, YIELD_EVERY = 2000 };

struct helper {
    struct cpu_pool *pool;
    pthread_t thread;
    int32_t index; /* thread number, 1 .. n_threads-1 */
    int32_t core;  /* pinned here; -1: not */
};

struct cpu_pool {
    int32_t n_threads;
    int32_t n_started; /* helpers running */
    struct helper *helper;

    cpu_task_fn *fn;
    void *arg;
    int32_t n_tasks;

    /* Each on a cache line of its own: `next` is contended. */
    _Alignas(64) atomic_uint epoch;
    _Alignas(64) atomic_int next;
    _Alignas(64) atomic_int done;
    _Alignas(64) atomic_int sleeping;
    atomic_bool stop;
};

static void futex_wait(atomic_uint *word, unsigned value)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void futex_wake_all(atomic_uint *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, CPU_POOL_MAX_THREADS, NULL, NULL, 0);
}

static void work(struct cpu_pool *p, int32_t thread)
{
    for (;;) {
        int32_t task = atomic_fetch_add_explicit(&p->next, 1, memory_order_relaxed);
        if (task >= p->n_tasks) {
            return;
        }
        p->fn(p->arg, task, thread);
    }
}

/* Until the epoch is no longer `seen`; the new one. */
static unsigned await_job(struct cpu_pool *p, unsigned seen)
{
    for (int i = 0; i < SPIN_ROUNDS; i++) {
        unsigned now = atomic_load_explicit(&p->epoch, memory_order_acquire);
        if (now != seen) {
            return now;
        }
        cpu_relax();
        if (i % YIELD_EVERY == YIELD_EVERY - 1) {
            sched_yield();
        }
    }
    for (;;) {
        /* Sequentially consistent: either the caller sees the sleeper, or the sleeper sees the new epoch. */
        atomic_fetch_add(&p->sleeping, 1);
        if (atomic_load(&p->epoch) == seen) {
            futex_wait(&p->epoch, seen);
        }
        atomic_fetch_sub(&p->sleeping, 1);
        unsigned now = atomic_load(&p->epoch);
        if (now != seen) {
            return now;
        }
    }
}

static void *helper_main(void *arg)
{
    struct helper *h = arg;
    struct cpu_pool *p = h->pool;
    char name[16];
    snprintf(name, sizeof(name), "quire-cpu-%d", h->index);
    pthread_setname_np(pthread_self(), name);
    unsigned seen = 0;
    for (;;) {
        seen = await_job(p, seen);
        if (atomic_load(&p->stop)) {
            return NULL;
        }
        work(p, h->index);
        atomic_fetch_add_explicit(&p->done, 1, memory_order_release);
    }
}

void cpu_pool_run(struct cpu_pool *p, int32_t n_tasks, cpu_task_fn *fn, void *arg)
{
    if (n_tasks <= 1 || p->n_started == 0) {
        for (int32_t i = 0; i < n_tasks; i++) {
            fn(arg, i, 0);
        }
        return;
    }
    p->fn = fn;
    p->arg = arg;
    p->n_tasks = n_tasks;
    atomic_store_explicit(&p->next, 0, memory_order_relaxed);
    atomic_store_explicit(&p->done, 0, memory_order_relaxed);
    atomic_fetch_add(&p->epoch, 1);
    if (atomic_load(&p->sleeping) > 0) {
        futex_wake_all(&p->epoch);
    }
    work(p, 0);
    for (int i = 1; atomic_load_explicit(&p->done, memory_order_acquire) < p->n_started; i++) {
        cpu_relax();
        if (i % YIELD_EVERY == 0) {
            sched_yield(); /* a helper may have lost its core to another process */
        }
    }
}

int32_t cpu_pool_threads(const struct cpu_pool *p)
{
    return p->n_threads;
}

/* First of the cores listed in a file like "0,64" or "0-1"; -1 when unreadable. */
static int first_sibling(int core)
{
    char path[96];
    snprintf(path, sizeof(path), "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", core);
    FILE *f = fopen(path, "re");
    int first = -1;
    if (f != NULL) {
        if (fscanf(f, "%d", &first) != 1) {
            first = -1;
        }
        fclose(f);
    }
    return first;
}

/* Processors' worth of time the cgroup grants, rounded up; 0: no quota. */
static int cgroup_quota(void)
{
    FILE *f = fopen("/sys/fs/cgroup/cpu.max", "re");
    long long quota = 0;
    long long period = 0;
    if (f != NULL) {
        if (fscanf(f, "%lld %lld", &quota, &period) != 2) {
            quota = 0; /* "max" */
        }
        fclose(f);
    }
    return quota > 0 && period > 0 ? (int)MAX(1, div_ceil(quota, period)) : 0;
}

/* Logical processors this process may use, one a physical core, in core[]. Returns how many (at least 1). */
static int usable_cores(int core[CPU_POOL_MAX_THREADS])
{
    cpu_set_t allowed;
    int n = 0;
    if (sched_getaffinity(0, sizeof(allowed), &allowed) == 0) {
        bool taken[CPU_SETSIZE] = {false};
        for (int i = 0; i < CPU_SETSIZE && n < CPU_POOL_MAX_THREADS; i++) {
            if (!CPU_ISSET(i, &allowed)) {
                continue;
            }
            int first = first_sibling(i);
            int physical = first >= 0 && first < CPU_SETSIZE ? first : i;
            if (!taken[physical]) {
                taken[physical] = true;
                core[n++] = i;
            }
        }
    }
    if (n == 0) {
        core[n++] = -1;
    }
    int quota = cgroup_quota();
    return quota > 0 ? MIN(n, quota) : n;
}

static int start_helper(struct helper *h, struct err *e)
{
    int rc = pthread_create(&h->thread, NULL, helper_main, h);
    if (rc != 0) {
        return err_set(e, ERR_IO, "cpu: thread %d could not be started: %s", h->index, strerror(rc));
    }
    if (h->core >= 0) {
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(h->core, &one);
        pthread_setaffinity_np(h->thread, sizeof(one), &one); /* a wish: without it the thread only wanders */
    }
    return 0;
}

/* Keep the share's part of core[n]: how many. Cores fewer than shares are shared by all of them. */
static int share_cores(int *core, int n, int32_t share, int32_t n_shares)
{
    if (n < n_shares) {
        core[0] = -1;
        return 1;
    }
    int first = share * n / n_shares;
    int end = (share + 1) * n / n_shares;
    memmove(core, core + first, (size_t)(end - first) * sizeof(*core));
    return end - first;
}

int cpu_pool_new(struct cpu_pool **ret, int32_t threads, struct err *e)
{
    return cpu_pool_new_share(ret, threads, 0, 1, e);
}

int cpu_pool_new_share(struct cpu_pool **ret, int32_t threads, int32_t share, int32_t n_shares, struct err *e)
{
    if (threads < 0 || threads > CPU_POOL_MAX_THREADS) {
        return err_set_param(e, ERR_INVALID, "threads", "threads must be 0 (physical cores) to %d, not %d",
                             CPU_POOL_MAX_THREADS, threads);
    }
    int core[CPU_POOL_MAX_THREADS];
    int n_cores = usable_cores(core);
    if (n_shares > 1) {
        n_cores = share_cores(core, n_cores, share, n_shares);
        threads = threads > 0 ? MAX(threads / n_shares, 1) : 0;
    }
    struct cpu_pool *p = aligned_alloc(64, (sizeof(*p) + 63) / 64 * 64);
    if (p == NULL) {
        return err_nomem(e, "threads");
    }
    memset(p, 0, sizeof(*p));
    p->n_threads = threads > 0 ? threads : n_cores;
    int rc = 0;
    p->helper = calloc((size_t)p->n_threads, sizeof(*p->helper));
    if (p->helper == NULL) {
        rc = err_nomem(e, "threads");
        goto out;
    }
    for (int32_t i = 1; i < p->n_threads && rc == 0; i++) {
        struct helper *h = &p->helper[i];
        *h = (struct helper){.pool = p, .index = i, .core = p->n_threads <= n_cores ? core[i] : -1};
        rc = start_helper(h, e);
        p->n_started += rc == 0;
    }
out:
    if (rc < 0) {
        cpu_pool_free(p);
        return rc;
    }
    *ret = p;
    return 0;
}

void cpu_pool_free(struct cpu_pool *p)
{
    if (p == NULL) {
        return;
    }
    atomic_store(&p->stop, true);
    atomic_fetch_add(&p->epoch, 1);
    futex_wake_all(&p->epoch);
    for (int32_t i = 1; i <= p->n_started; i++) {
        pthread_join(p->helper[i].thread, NULL);
    }
    free(p->helper);
    free(p);
}
