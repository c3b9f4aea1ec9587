/* Opening a backend by name, the cache's layout, and the CPU threads. */
#include <dirent.h>
#include <errno.h>
#include <sched.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "kernels/cpu/pool.h"
#include "tests/unit/ops.h"

static const struct backend_config small = {
    .threads = 1, .max_tokens = 8, .max_seqs = 2, .max_samples = 2, .max_blocks_per_seq = 4};

static void an_unknown_device_is_named_in_the_error(void **state)
{
    (void)state;
    struct backend *b = NULL;
    struct err e = {0};
    assert_int_equal(backend_open(&b, "tpu", &small, &e), ERR_INVALID);
    assert_non_null(strstr(e.text, "\"tpu\""));
    assert_non_null(strstr(e.text, "auto, cpu or cuda"));
    assert_null(b);
}

static void auto_always_finds_a_device(void **state)
{
    (void)state;
    struct backend *b = NULL;
    struct err e = {0};
    assert_int_equal(backend_open(&b, "auto", &small, &e), 0);
    assert_true(strlen(b->device) > 0);
    b->ops->free(b);
}

static void wrong_sizes_and_interfaces_are_refused(void **state)
{
    (void)state;
    struct backend *b = NULL;
    struct err e = {0};
    struct backend_config bad = small;
    assert_int_equal(cpu_backend_open(&b, BACKEND_ABI + 1, &small, &e), ERR_UNSUPPORTED);
    bad.threads = -1;
    assert_int_equal(backend_open(&b, "cpu", &bad, &e), ERR_INVALID);
    bad = small;
    bad.max_tokens = 0;
    assert_int_equal(backend_open(&b, "cpu", &bad, &e), ERR_INVALID);
    setenv("QUIRE_CPU_ISA", "mmx", 1);
    assert_int_equal(backend_open(&b, "cpu", &small, &e), ERR_UNSUPPORTED);
    assert_non_null(strstr(e.text, "mmx"));
    unsetenv("QUIRE_CPU_ISA");
    assert_null(b);
}

static void a_block_is_one_contiguous_segment(void **state)
{
    (void)state;
    struct kv_layout l;
    kv_layout_init(&l, 16, 32, 8, 128, DTYPE_BF16);
    assert_int_equal(kv_layout_block_bytes(&l), 2 << 20); /* 2 MiB for an 8B model */
    assert_int_equal(l.token_stride, 128);
    assert_int_equal(l.head_stride, 16 * 128);
    assert_int_equal(l.kv_stride, 8 * 16 * 128);
    assert_int_equal(l.layer_stride, 2 * 8 * 16 * 128);
    assert_int_equal(l.block_stride, 32 * 2 * 8 * 16 * 128);
}

/* int8 codes are followed by a scale a token, at a multiple of 16 bytes. */
static void caches_of_8_bits_take_half_the_bytes(void **state)
{
    (void)state;
    struct kv_layout l;
    kv_layout_init(&l, 16, 32, 8, 128, DTYPE_F8);
    assert_int_equal(kv_layout_block_bytes(&l), 1 << 20);
    assert_int_equal(l.scale_offset, 0);
    kv_layout_init(&l, 16, 32, 8, 128, DTYPE_I8);
    assert_int_equal(l.scale_offset, 16 * 128);
    assert_int_equal(l.head_stride, 16 * 128 + 16 * 4);
    assert_int_equal(kv_layout_block_bytes(&l), 32 * 2 * 8 * l.head_stride);
    kv_layout_init(&l, 3, 1, 2, 5, DTYPE_I8);
    assert_int_equal(l.scale_offset, 16);
    assert_int_equal(l.head_stride, 32);
}

struct tally {
    atomic_int count[1000];
    atomic_int wrong_thread;
    int32_t n_threads;
};

static void count_task(void *arg, int32_t task, int32_t thread)
{
    struct tally *t = arg;

    atomic_fetch_add(&t->count[task], 1);
    if (thread < 0 || thread >= t->n_threads) {
        atomic_fetch_add(&t->wrong_thread, 1);
    }
}

static void matrices_of_different_turns_share_memory(void **state)
{
    (void)state;
    struct backend *b = NULL;
    struct err e = {0};
    struct mat m[4];
    const struct turn_scratch want[] = {{&m[0], 8, 40, DTYPE_F32, 0},
                                        {&m[1], 8, 100, DTYPE_F32, 1},
                                        {&m[2], 8, 24, DTYPE_F32, 0},
                                        {&m[3], 2, 3, DTYPE_I32, 2}};
    assert_int_equal(backend_open(&b, "cpu", &small, &e), 0);
    assert_int_equal(b->ops->scratch_in_turns(b, want, ARRAY_LEN(want), &e), 0);
    assert_ptr_equal(m[0].data, m[1].data);
    assert_ptr_equal(m[0].data, m[3].data);
    assert_true((float *)m[2].data >= (float *)m[0].data + 8 * m[0].stride);
    for (size_t i = 0; i < ARRAY_LEN(want); i++) {
        assert_int_equal(m[i].rows, want[i].rows);
        assert_int_equal(m[i].cols, want[i].cols);
        assert_true(m[i].stride >= m[i].cols && m[i].dtype == want[i].dtype);
    }
    struct turn_scratch none = want[1];
    none.rows = 0;
    assert_int_equal(b->ops->scratch_in_turns(b, &none, 1, &e), ERR_INVALID);
    b->ops->free(b);
}

static void note_reach(void *arg, int32_t n)
{
    *(int32_t *)arg = n;
}

static void rows_of_a_late_table_are_asked_for_by_the_step_that_reads_them(void **state)
{
    (void)state;
    float table[64] = {0};
    int32_t reached = 0, position[] = {3, 12, 5}, zero[3] = {0}, minus[] = {-1, -1, -1};
    int32_t q_start[] = {0, 3}, kv_len = 13;
    struct backend *b = NULL;
    struct err e = {0};
    struct mat m;
    struct weight_piece p = {.data = table, .dtype = DTYPE_F32, .rows = 16, .cols = 4, .stride = 4};
    struct weight_desc d = {.name = "table",
                            .kind = WEIGHT_TABLE,
                            .dtype = DTYPE_F32,
                            .rows = 16,
                            .cols = 4,
                            .piece = &p,
                            .n_pieces = 1,
                            .mapped = true,
                            .late = {note_reach, &reached}};
    struct batch batch = {.n_tokens = 3,
                          .token = zero,
                          .token_src = minus,
                          .position = position,
                          .slot = minus,
                          .n_seqs = 1,
                          .q_start = q_start,
                          .kv_len = &kv_len,
                          .row = zero,
                          .lcp_blocks = zero};
    assert_int_equal(backend_open(&b, "cpu", &small, &e), 0);
    assert_true(b->late_rows);
    assert_int_equal(b->ops->weight(b, &d, &m, &e), 0);
    assert_ptr_equal(m.data, table);
    assert_int_equal(reached, 0);
    assert_int_equal(b->ops->step_begin(b, &batch, &e), 0);
    assert_int_equal(reached, 13);
    assert_int_equal(b->ops->step_end(b, &e), 0);
    b->ops->free(b);
}

/* Many short jobs back to back, with pauses long enough for the helpers to sleep. */
static void every_task_runs_once(void **state)
{
    (void)state;
    for (int32_t threads = 1; threads <= 5; threads++) {
        struct cpu_pool *p = NULL;
        struct err e = {0};
        assert_int_equal(cpu_pool_new(&p, threads, &e), 0);
        assert_int_equal(cpu_pool_threads(p), threads);
        struct tally *t = rig_alloc(sizeof(*t));
        t->n_threads = threads;
        for (int32_t job = 0; job < 300; job++) {
            cpu_pool_run(p, job % 7 == 0 ? 1000 : job % 5, count_task, t);
            if (job % 60 == 0) {
                nanosleep(&(struct timespec){.tv_nsec = 3000000}, NULL);
            }
        }
        for (int32_t i = 0; i < 1000; i++) {
            int32_t want = 300 / 7 + 1;
            for (int32_t job = 0; job < 300; job++) {
                want += job % 7 != 0 && i < job % 5;
            }
            assert_int_equal(atomic_load(&t->count[i]), want);
        }
        assert_int_equal(atomic_load(&t->wrong_thread), 0);
        free(t);
        cpu_pool_free(p);
    }
}

/* The same by ranges: each task runs once, whichever threads steal it. */
static void every_task_of_every_range_runs_once(void **state)
{
    (void)state;
    for (int32_t threads = 1; threads <= 5; threads++) {
        struct cpu_pool *p = NULL;
        struct err e = {0};
        static char data[4096];
        struct cpu_readahead ahead = {.data = data,
                                      .n_total = sizeof(data),
                                      .thread_bytes = 1024,
                                      .stream_bytes = 256,
                                      .n_bytes = 1 << 20,
                                      .n_streams = 4};
        assert_int_equal(cpu_pool_new(&p, threads, &e), 0);
        struct tally *t = rig_alloc(sizeof(*t));
        t->n_threads = threads;
        for (int32_t job = 0; job < 300; job++) {
            cpu_pool_run_ranges(p, job % 7 == 0 ? 200 : job % 5, count_task, t,
                                job % 2 == 0 ? &ahead : NULL);
            cpu_pool_run(p, job % 3, count_task, t);
        }
        for (int32_t i = 0; i < 1000; i++) {
            int32_t want = 0;
            for (int32_t job = 0; job < 300; job++) {
                want += i < threads * (job % 7 == 0 ? 200 : job % 5);
                want += i < job % 3;
            }
            assert_int_equal(atomic_load(&t->count[i]), want);
        }
        assert_int_equal(atomic_load(&t->wrong_thread), 0);
        free(t);
        cpu_pool_free(p);
    }
}

/* The thread of this process that has such a name; 0: none. */
static pid_t thread_named(const char *name)
{
    DIR *tasks = opendir("/proc/self/task");
    pid_t found = 0;

    assert_non_null(tasks);
    for (struct dirent *d; !found && (d = readdir(tasks)) != NULL;) {
        char path[300], comm[32] = "";
        snprintf(path, sizeof(path), "/proc/self/task/%s/comm", d->d_name);
        FILE *f = fopen(path, "re");
        if (f && fgets(comm, sizeof(comm), f)) {
            comm[strcspn(comm, "\n")] = 0;
            found = strcmp(comm, name) == 0 ? (pid_t)strtol(d->d_name, NULL, 10) : 0;
        }
        if (f) {
            fclose(f);
        }
    }
    closedir(tasks);
    return found;
}

static sem_t held, let_go;

static void hold(int signal)
{
    (void)signal;
    int saved = errno;
    sem_post(&held);
    while (sem_wait(&let_go) < 0 && errno == EINTR) {
    }
    errno = saved;
}

/* As when something else runs on the helper's processor. */
static void a_helper_that_does_not_come_is_not_waited_for(void **state)
{
    (void)state;
    struct cpu_pool *p = NULL;
    struct err e = {0};
    struct sigaction act = {.sa_handler = hold, .sa_flags = SA_RESTART};
    static struct tally t;

    assert_int_equal(sem_init(&held, 0, 0) | sem_init(&let_go, 0, 0), 0);
    assert_int_equal(sigaction(SIGUSR1, &act, NULL), 0);
    assert_int_equal(cpu_pool_new(&p, 2, &e), 0);
    t.n_threads = 2;
    pid_t helper = 0;
    for (int i = 0; i < 2000 && (helper = thread_named("quire-cpu-1")) == 0; i++) {
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    assert_int_equal(syscall(SYS_tgkill, getpid(), helper, SIGUSR1), 0);
    assert_int_equal(sem_wait(&held), 0);
    alarm(60); /* a job that waits for it never ends */
    for (int32_t job = 0; job < 10; job++) {
        cpu_pool_run(p, 20, count_task, &t);
        cpu_pool_run_ranges(p, 10, count_task, &t, NULL);
    }
    alarm(0);
    for (int32_t i = 0; i < 20; i++) {
        assert_int_equal(atomic_load(&t.count[i]), 20);
    }
    sem_post(&let_go);
    cpu_pool_run(p, 20, count_task, &t);
    cpu_pool_free(p);
}

struct late {
    atomic_int begun;
    atomic_int ended; /* tasks of the helper */
};

/* Begins on both threads; the helper's takes longer than the caller spins. */
static void late_task(void *arg, int32_t task, int32_t thread)
{
    struct late *l = arg;

    (void)task;
    atomic_fetch_add(&l->begun, 1);
    while (atomic_load(&l->begun) < 2) {
        sched_yield();
    }
    if (thread > 0) {
        nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
        atomic_fetch_add(&l->ended, 1);
    }
}

static void a_job_ends_after_the_helper_that_is_long_in_it(void **state)
{
    (void)state;
    struct cpu_pool *p = NULL;
    struct err e = {0};

    assert_int_equal(cpu_pool_new(&p, 2, &e), 0);
    alarm(60); /* a caller that nobody wakes sleeps for ever */
    for (int32_t job = 0; job < 10; job++) {
        struct late l = {0};
        cpu_pool_run(p, 2, late_task, &l);
        assert_int_equal(atomic_load(&l.ended), 1);
    }
    alarm(0);
    cpu_pool_free(p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_unknown_device_is_named_in_the_error),
        cmocka_unit_test(auto_always_finds_a_device),
        cmocka_unit_test(wrong_sizes_and_interfaces_are_refused),
        cmocka_unit_test(a_block_is_one_contiguous_segment),
        cmocka_unit_test(caches_of_8_bits_take_half_the_bytes),
        cmocka_unit_test(matrices_of_different_turns_share_memory),
        cmocka_unit_test(rows_of_a_late_table_are_asked_for_by_the_step_that_reads_them),
        cmocka_unit_test(every_task_runs_once),
        cmocka_unit_test(every_task_of_every_range_runs_once),
        cmocka_unit_test(a_helper_that_does_not_come_is_not_waited_for),
        cmocka_unit_test(a_job_ends_after_the_helper_that_is_long_in_it),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
