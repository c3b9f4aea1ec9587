/* See mapped.h.
 *
 * To read a mapped page that its file no longer has is a SIGBUS, wherever the thread
 * is: there is no way back to who opened the file. So the handler looks the address up
 * in a list of what is mapped, says which file it is and leaves with status 1; any
 * other SIGBUS goes to the handler that was there before.
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
    _Atomic(char *) at; /* NULL: free; set last, so that the handler finds the rest */
    size_t n_bytes;
    char name[96];
};

/* A file beyond as many is not looked up: its SIGBUS is that of a crash. */
static struct mapped list[LIMIT_SHARDS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct sigaction before;
static bool handled;
static atomic_flag told = ATOMIC_FLAG_INIT;

static void say(const char *text)
{
    ssize_t n = write(STDERR_FILENO, text, strlen(text));

    (void)n; /* nobody to tell */
}

/* Calls async-signal-safe functions only. */
static void on_bus(int sig, siginfo_t *info, void *context)
{
    (void)context;
    const char *address = info->si_addr;
    for (size_t i = 0; i < ARRAY_LEN(list) && info->si_code > 0; i++) { /* else kill() sent it */
        const char *at = list[i].at;
        if (at && address >= at && address < at + list[i].n_bytes) {
            /* several threads read the file: the first tells and ends all */
            while (atomic_flag_test_and_set(&told)) {
                pause();
            }
            say("\nquire " QUIRE_VERSION " ended: ");
            say(list[i].name);
            say(" cannot be read any more: it was cut short while in use, or its disk failed\n");
            _exit(1);
        }
    }
    sigaction(sig, &before, NULL);
    raise(sig); /* comes when this handler returns */
}

static void watch(void *data, size_t n_bytes, const char *name)
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
    watch(data, n_bytes, name);
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
