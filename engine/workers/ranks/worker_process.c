/* See worker_process.h.
 *
 * Between fork and exec only async-signal-safe calls are made, because the parent has
 * threads. The child keeps two descriptors, the shared memory and the control socket;
 * all others close on exec, so that no worker keeps a port or a client's connection
 * open. Workers ignore the signals that stop the service: rank 0 sends them a stop
 * message. If the parent is killed, the kernel kills its workers (PR_SET_PDEATHSIG); a
 * parent that exited before the worker asked for that is detected by its process id. */
#include "engine/workers/ranks/worker_process.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum {
    N_WORDS = 11,
    WORD_BYTES = 24, /* of one number as text */
    EXIT_NO_EXEC = 127,
    CLOSE_RANGE_CLOEXEC_FLAG = 4,
    TICK_MS = 2,    /* between polls of a child */
    EXIT_FIELD = 52 /* of /proc/PID/stat */
};

static const char NAME[] = "rank";

static void keep_open(int fd)
{
    fcntl(fd, F_SETFD, 0);
}

void worker_before_exec(pid_t parent, int death)
{
    sigset_t none;

    prctl(PR_SET_PDEATHSIG, death);
    if (getppid() != parent) {
        _exit(0);
    }
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    /* fails on old kernels, where only descriptors opened with O_CLOEXEC close */
    syscall(SYS_close_range, 3U, ~0U, CLOSE_RANGE_CLOEXEC_FLAG);
}

/* Runs in the child. */
static void exec_worker(const struct worker_args *o, char *const *argv, char *const *env)
{
    /* before signals are let in, which must not end it */
    signal(SIGINT, SIG_IGN);
    signal(SIGTERM, SIG_IGN);
    signal(SIGPIPE, SIG_IGN);
    worker_before_exec(o->parent, SIGKILL);
    if (!o->over_tcp) {
        keep_open(o->shm_fd);
        keep_open(o->control_fd);
    }
    execve("/proc/self/exe", argv, env);
    _exit(EXIT_NO_EXEC);
}

/* The environment without settings, which are passed as flags. NULL: out of memory. */
static char **environment(void)
{
    extern char **environ;
    int n = 0, kept = 0;

    while (environ[n]) {
        n++;
    }
    char **env = calloc((size_t)n + 1, sizeof(*env));
    for (int i = 0; env && i < n; i++) {
        if (strncmp(environ[i], "QUIRE_", 6) != 0 || strncmp(environ[i], "QUIRE_CPU", 9) == 0 ||
            strncmp(environ[i], "QUIRE_TEST", 10) == 0) {
            env[kept++] = environ[i];
        }
    }
    return env;
}

int worker_spawn(pid_t *ret, const struct worker_args *o, struct err *e)
{
    char word[N_WORDS][WORD_BYTES];
    int n = 0, n_flags = 0;

    const long long number[N_WORDS - 1] = {
        o->rank,   o->n_ranks,    o->shm_fd,           o->control_fd, (long long)o->slot_bytes,
        o->parent, o->local_rank, o->local_world_size, o->over_tcp,   o->n_stages};
    while (o->settings[n_flags]) {
        n_flags++;
    }
    char **argv = calloc((size_t)(n_flags + N_WORDS + 2), sizeof(*argv)), **env = environment();
    if (!argv || !env) {
        free(argv);
        free(env);
        return err_nomem(e, "a rank's process");
    }
    argv[n++] = program_invocation_name;
    argv[n++] = (char *)NAME;
    for (int i = 0; i < N_WORDS - 1; i++) {
        snprintf(word[i], WORD_BYTES, "%lld", number[i]);
        argv[n++] = word[i];
    }
    memcpy(argv + n, o->settings, (size_t)n_flags * sizeof(*argv));
    pid_t pid = fork();
    if (pid == 0) {
        exec_worker(o, argv, env);
    }
    int why = errno;
    free(argv);
    free(env);
    if (pid < 0) {
        return err_set(e, ERR_IO, "rank %d could not be started: %s", o->rank, strerror(why));
    }
    *ret = pid;
    return 0;
}

int worker_args_parse(struct worker_args *ret, int argc, char **argv, struct err *e)
{
    long long number[N_WORDS - 1];
    for (int i = 0; i < N_WORDS - 1; i++) {
        char *end = NULL;
        number[i] = i < argc ? strtoll(argv[i], &end, 10) : -1;
        if (number[i] < 0 || !end || *end) {
            return err_set(e, ERR_INVALID, "quire rank is started by quire serve, not by hand");
        }
    }
    if (number[9] < 1 || number[1] % number[9] != 0) {
        return err_set(e, ERR_INVALID, "quire rank is started by quire serve, not by hand");
    }
    *ret = (struct worker_args){
        .rank = (int32_t)number[0],
        .n_ranks = (int32_t)number[1],
        .shm_fd = (int)number[2],
        .control_fd = (int)number[3],
        .slot_bytes = (size_t)number[4],
        .parent = (pid_t)number[5],
        .local_rank = (int32_t)number[6],
        .local_world_size = (int32_t)number[7],
        .over_tcp = number[8] != 0,
        .n_stages = (int32_t)number[9],
        .settings = argv + N_WORDS - 1,
    };
    return 0;
}

/* The status with which a process is exiting; 0: it is not, or exits with 0. */
static int ending_status(pid_t pid)
{
    char path[32], text[1024];

    snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? 0 : read(fd, text, sizeof(text) - 1);
    if (fd >= 0) {
        close(fd);
    }
    text[MAX(n, 0)] = '\0';
    char *at = strrchr(text, ')'); /* the second field, the name, may hold anything */
    for (int field = 2; at && field < EXIT_FIELD; field++) {
        at = strchr(at + 1, ' ');
    }
    return at ? atoi(at) : 0;
}

static void tick(void)
{
    nanosleep(&(struct timespec){.tv_nsec = TICK_MS * 1000000L}, NULL);
}

bool worker_reap(pid_t *pid, int ms, int *ret_status)
{
    for (int waited = 0; *pid > 0; waited += TICK_MS) {
        if (waitpid(*pid, ret_status, WNOHANG) != 0) {
            *pid = 0;
        } else if (waited >= ms) {
            return false;
        } else {
            tick();
        }
    }
    return true;
}

bool worker_ended(pid_t *pid, int ms, int *ret_status)
{
    for (int waited = 0; !worker_reap(pid, 0, ret_status); waited += TICK_MS) {
        *ret_status = ending_status(*pid);
        if (*ret_status != 0) {
            return true;
        }
        if (waited >= ms) {
            return false;
        }
        tick();
    }
    return true;
}

void worker_exit_text(char *ret, size_t cap, int32_t rank, pid_t pid, int status)
{
    if (WIFSIGNALED(status)) {
        snprintf(ret, cap, "rank %d (process %d) was ended by signal %d (%s)", rank, (int)pid,
                 WTERMSIG(status), strsignal(WTERMSIG(status)));
    } else {
        snprintf(ret, cap, "rank %d (process %d) ended with status %d", rank, (int)pid,
                 WEXITSTATUS(status));
    }
}
