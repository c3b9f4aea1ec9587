/* A backtrace on standard error when the process crashes. */
#ifndef QUIRE_SERVER_CRASH_H
#define QUIRE_SERVER_CRASH_H

/* From here on SIGSEGV, SIGBUS, SIGILL, SIGFPE and SIGABRT write a backtrace on
 * standard error, then end the process as they would. */
void crash_report(void);

#endif
