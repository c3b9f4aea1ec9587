/* The CPU backend's threads: fork and join over numbered tasks.
 *
 * The caller is thread 0 and works too. Helpers spin for a short while after a job,
 * because the next operation of the step follows within microseconds, and sleep on a
 * futex after that; an idle daemon uses no processor time.
 */
#ifndef QUIRE_KERNELS_CPU_POOL_H
#define QUIRE_KERNELS_CPU_POOL_H

#include "config/base/base.h"

enum { CPU_POOL_MAX_THREADS = 256 };

struct cpu_pool;

/* Task `task` of a job, on thread `thread` of [0, n_threads). */
typedef void cpu_task_fn(void *arg, int32_t task, int32_t thread);

/* `threads` 0: the physical cores this process may use (affinity and cgroup quota
 * counted). */
int cpu_pool_new(struct cpu_pool **ret, int32_t threads, struct err *e);
/* The same for the share-th of local_world_size processes: its part of the cores and of
 * `threads`, one at least. */
int cpu_pool_new_share(struct cpu_pool **ret, int32_t threads, int32_t share,
                       int32_t local_world_size, struct err *e);
void cpu_pool_free(struct cpu_pool *p);
int32_t cpu_pool_threads(const struct cpu_pool *p);

/* Run tasks 0 .. n_tasks-1, each once, taken in ascending order by whichever thread is
 * free; return when all are done. */
void cpu_pool_run(struct cpu_pool *p, int32_t n_tasks, cpu_task_fn *fn, void *arg);

/* Memory that the threads will read soon, while they wait for it to be asked for: of
 * `share` (thread t's begins at data + t * share_bytes) the first n_bytes of each of
 * n_streams pieces, stream_bytes apart, all inside n_total bytes of data. */
struct cpu_ahead {
    const char *data; /* NULL: nothing */
    int64_t n_total, share_bytes, stream_bytes, n_bytes;
    int32_t n_streams;
};

/* Run n_each tasks of each thread: thread t begins with t * n_each, t * n_each + 1,
 * ..., so that neighbours stay on one thread, and then takes from the ends of those
 * that are behind. A thread that finds nothing left fetches `ahead` (may be NULL) into
 * its cache, until the next job comes. */
void cpu_pool_run_shares(struct cpu_pool *p, int32_t n_each, cpu_task_fn *fn, void *arg,
                         const struct cpu_ahead *ahead);

#endif
