/* The signal handler calls only async-signal-safe functions: write(2), prctl(2),
 * raise(3), and backtrace(3), which is safe after a first call (that one loads
 * libgcc_s). Addresses are printed as file(+offset); `addr2line -fe quire OFFSET` gives
 * the source line. */
#include "server/crash.h"

#include <execinfo.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "config/base/base.h"

enum { FRAMES = 64, STACK_BYTES = 64 * 1024, TIMEOUT_S = 10 };

static const struct {
    int number;
    const char *name;
} fatal[] = {{SIGSEGV, "SIGSEGV"},
             {SIGBUS, "SIGBUS"},
             {SIGILL, "SIGILL"},
             {SIGFPE, "SIGFPE"},
             {SIGABRT, "SIGABRT"}};

static void write_text(const char *text)
{
    ssize_t n = write(STDERR_FILENO, text, strlen(text));

    (void)n; /* a failure cannot be reported */
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

    alarm(TIMEOUT_S); /* in case the unwinder hangs */
    prctl(PR_GET_NAME, thread);
    thread[sizeof(thread) - 1] = '\0';
    write_text("\nquire " QUIRE_VERSION " crashed: ");
    write_text(name_of(sig));
    write_text(" in thread ");
    write_text(thread);
    write_text("\n");
    backtrace_symbols_fd(frame, backtrace(frame, FRAMES), STDERR_FILENO);
    /* The default action is in force again (SA_RESETHAND): this ends the process when
     * the handler returns. */
    raise(sig);
}

/* Sanitizers print better reports of their own. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { SANITIZED = 1 };
#else
enum { SANITIZED = 0 };
#endif

void crash_report(void)
{
    static char stack[STACK_BYTES]; /* in case the main thread has used up its own */
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
