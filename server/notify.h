/* Notifications to systemd (sd_notify's protocol, without libsystemd). Outside systemd
 * these functions do nothing. */
#ifndef QUIRE_SERVER_NOTIFY_H
#define QUIRE_SERVER_NOTIFY_H

#include "config/base/base.h"

/* Send "READY=1", "STOPPING=1", "WATCHDOG=1", "EXTEND_TIMEOUT_USEC=…". */
void notify(const char *state);
/* The interval in which systemd expects WATCHDOG=1; 0: never. */
int64_t notify_watchdog_us(void);

#endif
