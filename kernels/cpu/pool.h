/* The CPU backend's threads: fork and join over numbered tasks.
 *
 * The caller is thread 0 and works too. After a job the other threads spin for a while,
 * because the next operation of the step follows within microseconds, and then sleep on
 * a futex: an idle daemon uses no processor time.
 */
#ifndef QUIRE_KERNELS_CPU_POOL_H
#define QUIRE_KERNELS_CPU_POOL_H

#include "config/base/base.h"

enum { CPU_POOL_MAX_THREADS = 256 };

struct cpu_pool;

/* Task `task` of a job, on thread `thread` of [0, n_threads). */
typedef void cpu_task_fn(void *arg, int32_t task, int32_t thread);

/* `threads` 0: one per physical core that affinity and the cgroup's quota allow. */
int cpu_pool_new(struct cpu_pool **ret, int32_t threads, struct err *e);
/* The same for process local_rank of the local_world_size that divide this machine: it
 * gets its fraction of the cores and of `threads`, at least one. */
int cpu_pool_new_local(struct cpu_pool **ret, int32_t threads, int32_t local_rank,
                       int32_t local_world_size, struct err *e);
void cpu_pool_free(struct cpu_pool *p);
int32_t cpu_pool_threads(const struct cpu_pool *p);
/* A number that changes with every job of several tasks; callable from any thread. */
unsigned cpu_pool_jobs(const struct cpu_pool *p);

/* Run tasks 0 .. n_tasks-1, each once; free threads take them in ascending order.
 * Returns when all are done. */
void cpu_pool_run(struct cpu_pool *p, int32_t n_tasks, cpu_task_fn *fn, void *arg);

/* Memory that the threads will read in a later job, to be prefetched while they wait
 * for it. Thread t reads n_streams streams side by side, which begin stream_bytes apart
 * from data + t * thread_bytes on. */
struct cpu_readahead {
    const char *data;     /* NULL: nothing to prefetch */
    int64_t n_total;      /* bytes of data; nothing beyond is touched */
    int64_t thread_bytes; /* from one thread's first stream to the next thread's */
    int64_t stream_bytes; /* from one stream to the next of the same thread */
    int64_t n_bytes;      /* to be prefetched of each stream */
    int32_t n_streams;    /* of a thread */
};

/* Run n_each tasks for each thread: thread t starts with t * n_each, t * n_each + 1,
 * ..., so that neighbouring tasks stay on one thread, and when done steals from the
 * ends of the other threads' ranges. A thread that finds no task left prefetches
 * `ahead` (may be NULL) until the next job arrives. */
void cpu_pool_run_ranges(struct cpu_pool *p, int32_t n_each, cpu_task_fn *fn, void *arg,
                         const struct cpu_readahead *ahead);

#endif
