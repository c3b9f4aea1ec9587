/* Threads of the CPU backend: thread 0 is the caller, the others are helpers.
 *
 * There is one job at a time. The caller publishes it by raising the epoch in `gate`.
 * Helpers that see a new epoch join the job, which `gate` counts, take tasks until none
 * is left, and raise `done`. The caller takes tasks too. When none is left it closes
 * the gate and waits for those who joined, so that no helper looks at a job that has
 * ended; a helper whose processor does something else at the time is not waited for. A
 * helper that has spun for long enough counts itself in `sleeping` and waits on the
 * futex `gate`; the caller makes the system call that wakes helpers only if `sleeping`
 * is above 0.
 *
 * Tasks are ranges of numbers. A plain job has one range, thread 0's, and every thread
 * takes from its front. A job by ranges has one per thread: its owner takes from the
 * front, and threads whose own range is empty steal from the end.
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

enum { SPIN_ROUNDS = 20000, YIELD_EVERY = 2000, LINE_BYTES = 64 };

/* `gate`: helpers that joined the job in the lowest bits, whether it takes no more, and
 * in all bits above the number of the job. */
enum { GATE_JOINED = CPU_POOL_MAX_THREADS * 2 - 1, GATE_CLOSED = GATE_JOINED + 1 };

static unsigned gate_epoch(unsigned gate)
{
    return gate / (GATE_CLOSED * 2);
}

/* Open for the next job, which nobody has joined. */
static unsigned next_gate(unsigned gate)
{
    return (gate_epoch(gate) + 1) * (GATE_CLOSED * 2);
}

struct helper {
    struct cpu_pool *pool;
    pthread_t thread;
    int32_t index; /* thread number, 1 .. n_threads-1 */
    int32_t core;  /* that it is pinned to; -1: none */
};

/* Of one thread, on cache lines of its own. */
struct thread_state {
    /* tasks left: the first in the lower half, one past the last in the upper half */
    _Alignas(64) _Atomic uint64_t range;
    _Alignas(64) struct cpu_readahead ahead; /* this and `fetched`: its thread's alone */
    int64_t fetched;                         /* bytes done of each stream of `ahead` */
};

struct cpu_pool {
    int32_t n_threads;
    int32_t n_started; /* helpers running */
    struct helper *helper;
    struct thread_state *state; /* [n_threads] */

    /* The job; written by the caller before it raises the epoch. */
    cpu_task_fn *fn;
    void *arg;
    bool by_ranges;
    struct cpu_readahead ahead;

    /* Each on a cache line of its own. */
    _Alignas(64) atomic_uint gate;    /* GATE_*; helpers sleep on it */
    _Alignas(64) atomic_int done;     /* helpers that joined the job and have finished */
    _Alignas(64) atomic_int sleeping; /* helpers in futex_wait, or about to be */
    atomic_bool stop;                 /* helpers end at the next epoch */
};

static void futex_wait(atomic_uint *word, unsigned value)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void futex_wake_all(atomic_uint *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, CPU_POOL_MAX_THREADS, NULL, NULL, 0);
}

/* ---- tasks ---- */

static uint64_t make_range(int32_t first, int32_t end)
{
    return (uint64_t)(uint32_t)end << 32 | (uint32_t)first;
}

/* Take the first (or `last`) task from the range of thread `of`. -1: it is empty. */
static int32_t take(struct cpu_pool *p, int32_t of, bool last)
{
    _Atomic uint64_t *range = &p->state[of].range;
    uint64_t now = atomic_load_explicit(range, memory_order_relaxed);

    for (;;) {
        int32_t first = (int32_t)(uint32_t)now;
        int32_t end = (int32_t)(now >> 32);
        if (first >= end) {
            return -1;
        }
        uint64_t then = last ? make_range(first, end - 1) : make_range(first + 1, end);
        if (atomic_compare_exchange_weak_explicit(range, &now, then, memory_order_relaxed,
                                                  memory_order_relaxed)) {
            return last ? end - 1 : first;
        }
    }
}

static void work(struct cpu_pool *p, int32_t thread)
{
    int32_t task;
    int32_t own = p->by_ranges ? thread : 0;

    while ((task = take(p, own, false)) >= 0) {
        p->fn(p->arg, task, thread);
    }
    for (int32_t i = 1; i < p->n_threads && p->by_ranges; i++) {
        while ((task = take(p, (thread + i) % p->n_threads, true)) >= 0) {
            p->fn(p->arg, task, thread);
        }
    }
    if (p->by_ranges) {
        p->state[thread].ahead = p->ahead;
        p->state[thread].fetched = 0;
    }
}

/* Prefetch the next cache line of each stream; called again and again while waiting. */
static void fetch_ahead(struct thread_state *s, int32_t thread)
{
    const struct cpu_readahead *a = &s->ahead;

    if (!a->data || s->fetched >= a->n_bytes) {
        return;
    }
    for (int32_t i = 0; i < a->n_streams; i++) {
        int64_t at = thread * a->thread_bytes + i * a->stream_bytes + s->fetched;
        if (at < a->n_total) {
            __builtin_prefetch(a->data + at, 0, 2);
        }
    }
    s->fetched += LINE_BYTES;
}

/* ---- threads ---- */

/* Wait for another job than number `seen`. */
static void await_job(struct cpu_pool *p, int32_t thread, unsigned seen)
{
    for (int i = 0; i < SPIN_ROUNDS; i++) {
        if (gate_epoch(atomic_load_explicit(&p->gate, memory_order_acquire)) != seen) {
            return;
        }
        fetch_ahead(&p->state[thread], thread);
        cpu_relax();
        if (i % YIELD_EVERY == YIELD_EVERY - 1) {
            sched_yield();
        }
    }
    unsigned gate;
    do {
        /* Sequentially consistent, so that either the caller sees the sleeper or the
         * sleeper sees the new epoch. */
        atomic_fetch_add(&p->sleeping, 1);
        gate = atomic_load(&p->gate);
        if (gate_epoch(gate) == seen) {
            futex_wait(&p->gate, gate);
        }
        atomic_fetch_sub(&p->sleeping, 1);
    } while (gate_epoch(atomic_load(&p->gate)) == seen);
}

/* Count this helper as one of the job's, unless it takes no more; returns the number of
 * the job in *epoch. */
static bool join(struct cpu_pool *p, unsigned *epoch)
{
    unsigned gate = atomic_load_explicit(&p->gate, memory_order_acquire);

    do {
        *epoch = gate_epoch(gate);
        if (gate & GATE_CLOSED) {
            return false;
        }
    } while (!atomic_compare_exchange_weak_explicit(&p->gate, &gate, gate + 1, memory_order_acquire,
                                                    memory_order_acquire));
    return true;
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
        await_job(p, h->index, seen);
        if (atomic_load(&p->stop)) {
            return NULL;
        }
        if (join(p, &seen)) {
            work(p, h->index);
            atomic_fetch_add_explicit(&p->done, 1, memory_order_release);
        }
    }
}

/* Open the gate for the next job, and wake the helpers that sleep. */
static void open_gate(struct cpu_pool *p)
{
    unsigned now = atomic_load_explicit(&p->gate, memory_order_relaxed);

    atomic_store(&p->gate, next_gate(now));
    if (atomic_load(&p->sleeping) > 0) {
        futex_wake_all(&p->gate);
    }
}

/* Publish the job, whose ranges are set, work on it, and wait for the helpers that
 * joined. */
static void run_job(struct cpu_pool *p, cpu_task_fn *fn, void *arg, bool by_ranges,
                    const struct cpu_readahead *ahead)
{
    p->fn = fn;
    p->arg = arg;
    p->by_ranges = by_ranges;
    p->ahead = ahead ? *ahead : (struct cpu_readahead){0};
    atomic_store_explicit(&p->done, 0, memory_order_relaxed);
    open_gate(p);
    work(p, 0);
    unsigned gate = atomic_fetch_or(&p->gate, GATE_CLOSED);
    int joined = (int)(gate & GATE_JOINED);
    for (int i = 1; atomic_load_explicit(&p->done, memory_order_acquire) < joined; i++) {
        fetch_ahead(&p->state[0], 0);
        cpu_relax();
        if (i % YIELD_EVERY == 0) {
            sched_yield(); /* a helper may wait for this core */
        }
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
    atomic_store_explicit(&p->state[0].range, make_range(0, n_tasks), memory_order_relaxed);
    run_job(p, fn, arg, false, NULL);
}

void cpu_pool_run_ranges(struct cpu_pool *p, int32_t n_each, cpu_task_fn *fn, void *arg,
                         const struct cpu_readahead *ahead)
{
    for (int32_t t = 0; t < p->n_threads; t++) {
        atomic_store_explicit(&p->state[t].range, make_range(t * n_each, (t + 1) * n_each),
                              memory_order_relaxed);
    }
    run_job(p, fn, arg, true, ahead);
}

int32_t cpu_pool_threads(const struct cpu_pool *p)
{
    return p->n_threads;
}

unsigned cpu_pool_jobs(const struct cpu_pool *p)
{
    return gate_epoch(atomic_load_explicit(&p->gate, memory_order_relaxed));
}

/* The first hardware thread of `core`'s physical core, from a list like "0,64" or
 * "0-1"; -1: unknown. */
static int first_sibling(int core)
{
    char path[96];

    snprintf(path, sizeof(path), "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list",
             core);
    FILE *f = fopen(path, "re");
    int first = -1;
    if (f) {
        if (fscanf(f, "%d", &first) != 1) {
            first = -1;
        }
        fclose(f);
    }
    return first;
}

/* The cgroup's quota in processors, rounded up; 0: no quota. */
static int cgroup_quota(void)
{
    FILE *f = fopen("/sys/fs/cgroup/cpu.max", "re");

    long long quota = 0;
    long long period = 0;
    if (f) {
        if (fscanf(f, "%lld %lld", &quota, &period) != 2) {
            quota = 0; /* "max" */
        }
        fclose(f);
    }
    return quota > 0 && period > 0 ? (int)MAX(1, div_ceil(quota, period)) : 0;
}

/* core[] = one logical processor for each physical core that this process may use.
 * Returns their number, at least 1. */
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
        core[n++] = -1; /* not pinned */
    }
    int quota = cgroup_quota();
    return quota > 0 ? MIN(n, quota) : n;
}

static int start_helper(struct helper *h, struct err *e)
{
    int rc = pthread_create(&h->thread, NULL, helper_main, h);

    if (rc != 0) {
        return err_set(e, ERR_IO, "cpu: thread %d could not be started: %s", h->index,
                       strerror(rc));
    }
    if (h->core >= 0) {
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(h->core, &one);
        /* best effort: the thread works unpinned too */
        pthread_setaffinity_np(h->thread, sizeof(one), &one);
    }
    return 0;
}

/* Keep this process's fraction of core[n], and return its size. If there are fewer
 * cores than processes, each gets one thread that is not pinned. */
static int divide_cores(int *core, int n, int32_t local_rank, int32_t local_world_size)
{
    if (n < local_world_size) {
        core[0] = -1;
        return 1;
    }
    int first = local_rank * n / local_world_size;
    int end = (local_rank + 1) * n / local_world_size;
    memmove(core, core + first, (size_t)(end - first) * sizeof(*core));
    return end - first;
}

int cpu_pool_new(struct cpu_pool **ret, int32_t threads, struct err *e)
{
    return cpu_pool_new_local(ret, threads, 0, 1, e);
}

int cpu_pool_new_local(struct cpu_pool **ret, int32_t threads, int32_t local_rank,
                       int32_t local_world_size, struct err *e)
{
    if (threads < 0 || threads > CPU_POOL_MAX_THREADS) {
        return err_set_param(e, ERR_INVALID, "threads",
                             "threads must be 0 (physical cores) to %d, not %d",
                             CPU_POOL_MAX_THREADS, threads);
    }
    int core[CPU_POOL_MAX_THREADS];
    int n_cores = usable_cores(core);
    if (local_world_size > 1) {
        n_cores = divide_cores(core, n_cores, local_rank, local_world_size);
        threads = threads > 0 ? MAX(threads / local_world_size, 1) : 0;
    }
    struct cpu_pool *p = aligned_alloc(64, (sizeof(*p) + 63) / 64 * 64);
    if (!p) {
        return err_nomem(e, "threads");
    }
    memset(p, 0, sizeof(*p));
    p->n_threads = threads > 0 ? threads : n_cores;
    int rc = 0;
    p->helper = calloc((size_t)p->n_threads, sizeof(*p->helper));
    p->state = aligned_alloc(64, (size_t)p->n_threads * sizeof(*p->state));
    if (!p->helper || !p->state) {
        rc = err_nomem(e, "threads");
        goto out;
    }
    memset(p->state, 0, (size_t)p->n_threads * sizeof(*p->state));
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
    if (!p) {
        return;
    }
    atomic_store(&p->stop, true);
    unsigned gate = atomic_load(&p->gate);
    atomic_store(&p->gate, next_gate(gate) | GATE_CLOSED);
    futex_wake_all(&p->gate);
    for (int32_t i = 1; i <= p->n_started; i++) {
        pthread_join(p->helper[i].thread, NULL);
    }
    free(p->helper);
    free(p->state);
    free(p);
}
