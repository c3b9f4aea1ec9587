/* The handler calls async-signal-safe functions only: write(2), prctl(2), raise(3), and
 * backtrace(3), which is safe once it was called before (the first call loads
 * libgcc_s). Addresses stand as file(+offset): `addr2line -fe quire OFFSET` tells the
 * line. */
#include "server/crash.h"

#include <execinfo.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "config/base/base.h"

enum { FRAMES = 64, STACK_BYTES = 64 * 1024, PATIENCE_S = 10 };

static const struct {
    int number;
    const char *name;
} fatal[] = {{SIGSEGV, "SIGSEGV"},
             {SIGBUS, "SIGBUS"},
             {SIGILL, "SIGILL"},
             {SIGFPE, "SIGFPE"},
             {SIGABRT, "SIGABRT"}};

static void say(const char *text)
{
    ssize_t n = write(STDERR_FILENO, text, strlen(text));

    (void)n; /* nobody to tell */
}

static const char *name_of(int sig)
{
    for (size_t i = 0; i < ARRAY_LEN(fatal); i++) {
        if (fatal[i].number == sig) {
            return fatal[i].name;
        }
    }
    return "a fatal signal";
}

static void on_crash(int sig)
{
    void *frame[FRAMES];
    char thread[16] = "";

    alarm(PATIENCE_S); /* should the unwinder hang */
    prctl(PR_GET_NAME, thread);
    thread[sizeof(thread) - 1] = '\0';
    say("\nquire " QUIRE_VERSION " crashed: ");
    say(name_of(sig));
    say(" in thread ");
    say(thread);
    say("\n");
    backtrace_symbols_fd(frame, backtrace(frame, FRAMES), STDERR_FILENO);
    /* The handler is gone (SA_RESETHAND): this ends the process when it returns. */
    raise(sig);
}

/* Sanitizers report better themselves. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { SANITIZED = 1 };
#else
enum { SANITIZED = 0 };
#endif

void crash_report(void)
{
    static char stack[STACK_BYTES]; /* for a main thread that has used up its own */
    struct sigaction a = {.sa_handler = on_crash, .sa_flags = (int)SA_RESETHAND | SA_ONSTACK};
    void *frame[1];

    if (SANITIZED) {
        return;
    }
    backtrace(frame, 1);
    sigaltstack(&(stack_t){.ss_sp = stack, .ss_size = sizeof(stack)}, NULL);
    for (size_t i = 0; i < ARRAY_LEN(fatal); i++) {
        sigaction(fatal[i].number, &a, NULL);
    }
}
