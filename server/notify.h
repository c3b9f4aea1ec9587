/* What systemd is told (sd_notify's protocol, without libsystemd). All of it does
 * nothing outside systemd. */
#ifndef QUIRE_SERVER_NOTIFY_H
#define QUIRE_SERVER_NOTIFY_H

#include "config/base/base.h"

/* Send "READY=1", "STOPPING=1", "WATCHDOG=1", "STATUS=…". */
void notify(const char *state);
/* How often WATCHDOG=1 is expected, 0: never. */
int64_t notify_watchdog_us(void);

#endif
