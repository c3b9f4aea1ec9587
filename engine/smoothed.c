/* See smoothed.h. A directory is named after its source and a hash of all that decides
 * what is in it; it is there only when it is whole (models/quantise/quantise.h), so of
 * several processes that make the same one, the first to end leaves it to the others.
 *
 * The child is `quire quantize`, which removes what it has written when it is ended.
 * The kernel ends it when this process ends. */
#include "engine/smoothed.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <xxhash.h>

#include "config/base/buf.h"
#include "config/base/cache_dir.h"
#include "engine/model_path.h"
#include "engine/workers/ranks/worker_process.h"
#include "models/checkpoint/file.h"
#include "models/quantise/quantise.h"

enum { MOST_KEY_BYTES = 65 << 20, STOP_MS = 10000, TICK_MS = 5 };

/* How the child's errors begin. */
static const char COMMAND[] = "quire quantize: ";

/* The child of this process, one at most. */
static struct {
    pthread_mutex_t lock;
    pid_t child; /* 0: none */
    bool stopped;
} job = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* ---- which directory ---- */

/* Weights, and what a model's texts and configuration are read from. */
static int is_read(const struct dirent *d)
{
    static const char *const ENDINGS[] = {".safetensors", ".json", ".model", ".txt", ".jinja"};
    const char *ending = strrchr(d->d_name, '.');

    for (size_t i = 0; ending && i < ARRAY_LEN(ENDINGS); i++) {
        if (strcmp(ending, ENDINGS[i]) == 0) {
            return 1;
        }
    }
    return 0;
}

/* Append name, size and time of each file of `dir`. */
static int add_files(struct buf *key, const char *dir, struct err *e)
{
    struct dirent **list;
    int n = scandir(dir, &list, is_read, alphasort);

    if (n < 0) {
        return err_set(e, ERR_IO, "%s: %s", dir, strerror(errno));
    }
    for (int i = 0; i < n; i++) {
        char path[PATH_MAX];
        struct stat st = {0};
        snprintf(path, sizeof(path), "%s/%s", dir, list[i]->d_name);
        stat(path, &st); /* a link that leads nowhere is all zeros */
        buf_printf(key, "%s %lld %lld.%09ld\n", list[i]->d_name, (long long)st.st_size,
                   (long long)st.st_mtim.tv_sec, st.st_mtim.tv_nsec);
        free(list[i]);
    }
    free(list);
    return 0;
}

/* A hash of all that decides what the child writes. */
static int hash_source(uint64_t *ret, const char *dir, const struct settings *s, struct err *e)
{
    struct buf key;

    buf_init(&key, MOST_KEY_BYTES);
    buf_printf(&key, "%d\n%s\n%d %.17g\n", QUANTISE_VERSION, dir, s->quantization,
               s->quantization_smooth);
    int rc = add_files(&key, dir, e);
    if (rc == 0) {
        rc = buf_read_file(&key, s->quantization_text, e);
        rc = rc < 0 ? err_prefix(e, "quantization_text") : 0;
    }
    if (rc == 0 && key.failed) {
        rc = err_nomem(e, "the names of a model's files");
    }
    if (rc == 0) {
        *ret = XXH64(key.data, key.len, 0);
    }
    buf_release(&key);
    return rc;
}

/* The path of the directory, whose parents are made. */
static int target_path(char ret[PATH_MAX], const char *dir, const struct settings *s, struct err *e)
{
    char cache[PATH_MAX];
    uint64_t hash = 0;

    if (!cache_dir(cache, sizeof(cache))) {
        return err_set(e, ERR_NOT_FOUND,
                       "no directory to keep the quantised weights in: CACHE_DIRECTORY, "
                       "XDG_CACHE_HOME or HOME must be set");
    }
    int rc = hash_source(&hash, dir, s, e);
    char *name = rc == 0 ? model_path_name(dir) : NULL;
    if (!name) {
        return rc < 0 ? rc : err_nomem(e, "the model's name");
    }
    const char *slash = strrchr(name, '/');
    int n = snprintf(ret, PATH_MAX, "%s/quantised/%.100s-%016llx", cache, slash ? slash + 1 : name,
                     (unsigned long long)hash);
    free(name);
    if (n >= PATH_MAX) {
        return err_set(e, ERR_INVALID, "%.200s: the path is too long", cache);
    }
    cache_make_dirs(ret);
    return 0;
}

/* ---- the child ---- */

/* In the child: its errors go to `fd`. */
static void exec_quantize(pid_t parent, int fd, char *const *argv)
{
    worker_before_exec(parent, SIGTERM);
    dup2(fd, STDERR_FILENO);
    execv("/proc/self/exe", argv);
    _exit(127);
}

/* Start it; *ret_fd: what to read its errors from, up to their end. */
static int spawn(int *ret_fd, char *const *argv, struct err *e)
{
    pid_t parent = getpid();
    int fd[2];

    if (pipe2(fd, O_CLOEXEC) < 0) {
        return err_set(e, ERR_IO, "pipe: %s", strerror(errno));
    }
    pthread_mutex_lock(&job.lock);
    pid_t child = job.stopped ? -1 : fork();
    int why = job.stopped ? EINTR : errno;
    if (child == 0) {
        exec_quantize(parent, fd[1], argv);
    }
    job.child = MAX(child, 0);
    pthread_mutex_unlock(&job.lock);
    close(fd[1]);
    if (child < 0) {
        close(fd[0]);
        return err_set(e, ERR_IO, "fork: %s", strerror(why));
    }
    *ret_fd = fd[0];
    return 0;
}

/* The child's status, once it has ended. */
static int reap(void)
{
    int status = -1;

    pthread_mutex_lock(&job.lock);
    while (waitpid(job.child, &status, 0) < 0 && errno == EINTR)
        ;
    job.child = 0;
    pthread_mutex_unlock(&job.lock);
    return status;
}

/* Read what the child says until it ends; its error becomes `e`. */
static int follow(int fd, struct err *e)
{
    char *line = NULL, why[sizeof(e->text)] = "it ended without a reason";
    size_t cap = 0;
    FILE *f = fdopen(fd, "r");

    while (f && getline(&line, &cap, f) > 0) {
        if (strncmp(line, COMMAND, strlen(COMMAND)) == 0) {
            line[strcspn(line, "\n")] = '\0';
            snprintf(why, sizeof(why), "%s", line + strlen(COMMAND));
        }
    }
    free(line);
    if (f) {
        fclose(f);
    } else {
        close(fd);
    }
    return reap() == 0 ? 0 : err_set(e, ERR_IO, "%s", why);
}

static int quantize(const char *from, const char *to, const struct settings *s, struct err *e)
{
    char alpha[32];
    bool zeros = s->quantization == QUANTIZE_INT8_ASYMMETRIC;
    const char *argv[] = {program_invocation_name,
                          "quantize",
                          from,
                          to,
                          "--format",
                          "int8",
                          "--report",
                          "--text",
                          s->quantization_text,
                          "--smooth",
                          alpha,
                          zeros ? "--asymmetric" : NULL,
                          NULL};
    int fd = -1;

    snprintf(alpha, sizeof(alpha), "%.17g", s->quantization_smooth);
    int rc = spawn(&fd, (char *const *)argv, e);
    return rc < 0 ? rc : follow(fd, e);
}

bool smoothed_running(void)
{
    pthread_mutex_lock(&job.lock);
    bool running = job.child > 0;
    pthread_mutex_unlock(&job.lock);
    return running;
}

void smoothed_stop(void)
{
    pthread_mutex_lock(&job.lock);
    job.stopped = true;
    if (job.child > 0) {
        kill(job.child, SIGTERM);
    }
    pthread_mutex_unlock(&job.lock);
    for (int ms = 0; smoothed_running() && ms < STOP_MS; ms += TICK_MS) {
        nanosleep(&(struct timespec){.tv_nsec = TICK_MS * 1000000L}, NULL);
    }
}

/* ---- both ---- */

/* Whether the directory was made; then all of it is there. */
static bool is_made(const char *dir)
{
    return model_file_exists(dir, "config.json");
}

/* What the last line of the report says. */
static void log_made(const char *dir, int64_t us)
{
    char path[PATH_MAX + 16], *line = NULL;
    size_t cap = 0;
    double before = 0, after = 0;

    snprintf(path, sizeof(path), "%s/%s", dir, QUANTISE_REPORT);
    FILE *f = fopen(path, "re");
    while (f && getline(&line, &cap, f) > 0) {
        sscanf(line, "perplexity of %*d tokens %lf, quantised %lf", &before, &after);
    }
    free(line);
    if (f) {
        fclose(f);
    }
    log_event(LOG_INFO, "quantised", LOG_STR("path", dir), LOG_F64("seconds", (double)us / 1e6),
              LOG_F64("perplexity_before", before), LOG_F64("perplexity", after));
}

static int make(const char *from, const char *to, const struct settings *s, struct err *e)
{
    int64_t since = clock_us();

    log_event(LOG_INFO, "quantising", LOG_STR("model", from), LOG_STR("into", to));
    int rc = quantize(from, to, s, e);
    if (rc < 0 && !is_made(to)) {
        return rc;
    }
    log_made(to, clock_us() - since); /* or another process has made it meanwhile */
    return 0;
}

/* The same as smoothed_find, of a model that is to be smoothed. */
static int find(char **path, const struct settings *s, struct err *e)
{
    char to[PATH_MAX];
    int rc = quantise_check_source(*path, e);

    rc = rc < 0 ? rc : target_path(to, *path, s, e);
    if (rc < 0) {
        return rc;
    }
    if (is_made(to)) {
        log_event(LOG_INFO, "quantised at an earlier start", LOG_STR("path", to));
    } else {
        rc = make(*path, to, s, e);
    }
    char *copy = rc == 0 ? strdup(to) : NULL;
    if (!copy) {
        return rc < 0 ? rc : err_nomem(e, "the model's path");
    }
    free(*path);
    *path = copy;
    return 0;
}

int smoothed_find(char **path, const struct settings *s, struct err *e)
{
    int rc = s->quantization_smooth > 0 ? find(path, s, e) : 0;

    return rc < 0 ? err_prefix(e, "quantization_smooth") : 0;
}
