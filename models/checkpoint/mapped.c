/* See mapped.h.
 *
 * Reading a mapped page that its file no longer has raises SIGBUS, at any place of the
 * program, so the error cannot be returned to the caller. The handler looks up the
 * address in a list of mapped files, reports the file on stderr and exits with status
 * 1. Any other SIGBUS goes to the previous handler.
 */
#include "models/checkpoint/mapped.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "config/base/limits.h"

struct mapped {
    _Atomic(char *) at; /* NULL: free; set last, so that the handler sees the other fields */
    size_t n_bytes;
    char name[96];
};

/* Files beyond this number are not listed: their SIGBUS ends the process without a
 * report. */
static struct mapped list[LIMIT_SHARDS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of writers of `list` */
static struct sigaction before;                          /* the previous handler */
static bool handled;                                     /* on_bus is installed */
static atomic_flag reported = ATOMIC_FLAG_INIT;

static void put(const char *text)
{
    ssize_t n = write(STDERR_FILENO, text, strlen(text));

    (void)n; /* an error of stderr cannot be reported */
}

/* Calls async-signal-safe functions only. */
static void on_bus(int sig, siginfo_t *info, void *context)
{
    (void)context;
    const char *address = info->si_addr;
    for (size_t i = 0; i < ARRAY_LEN(list) && info->si_code > 0; i++) { /* else kill() sent it */
        const char *at = list[i].at;
        if (at && address >= at && address < at + list[i].n_bytes) {
            /* the first of several threads reports and ends the process */
            while (atomic_flag_test_and_set(&reported)) {
                pause();
            }
            put("\nquire " QUIRE_VERSION " ended: ");
            put(list[i].name);
            put(" cannot be read any more: it was truncated while in use, or its disk failed\n");
            _exit(1);
        }
    }
    sigaction(sig, &before, NULL);
    raise(sig); /* delivered when this handler returns */
}

/* Add a mapping to the list; installs the handler the first time. */
static void list_add(void *data, size_t n_bytes, const char *name)
{
    const char *slash = strrchr(name, '/');

    pthread_mutex_lock(&lock);
    if (!handled) {
        struct sigaction a = {.sa_sigaction = on_bus, .sa_flags = SA_SIGINFO | SA_ONSTACK};
        handled = sigaction(SIGBUS, &a, &before) == 0;
    }
    for (size_t i = 0; i < ARRAY_LEN(list); i++) {
        if (!list[i].at) {
            snprintf(list[i].name, sizeof(list[i].name), "%s", slash ? slash + 1 : name);
            list[i].n_bytes = n_bytes;
            list[i].at = data;
            break;
        }
    }
    pthread_mutex_unlock(&lock);
}

int file_map(int fd, size_t n_bytes, const char *name, void **ret, struct err *e)
{
    void *data = mmap(NULL, n_bytes, PROT_READ, MAP_PRIVATE, fd, 0);

    if (data == MAP_FAILED) {
        return err_set(e, ERR_IO, "%s: %s", name, strerror(errno));
    }
    list_add(data, n_bytes, name);
    *ret = data;
    return 0;
}

void file_unmap(void *data, size_t n_bytes)
{
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < ARRAY_LEN(list); i++) {
        if (list[i].at == data) {
            list[i].at = NULL;
        }
    }
    pthread_mutex_unlock(&lock);
    munmap(data, n_bytes);
}
