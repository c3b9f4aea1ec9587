/* The datagram socket named by NOTIFY_SOCKET. */
#include "server/notify.h"

#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

void notify(const char *state)
{
    const char *path = getenv("NOTIFY_SOCKET");
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    size_t len = path ? strlen(path) : 0;

    if (len < 2 || len >= sizeof(a.sun_path)) {
        return;
    }
    memcpy(a.sun_path, path, len);
    if (a.sun_path[0] == '@') {
        a.sun_path[0] = '\0'; /* an abstract socket */
    }
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        return;
    }
    socklen_t size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + len);
    ssize_t n = sendto(fd, state, strlen(state), MSG_NOSIGNAL, (struct sockaddr *)&a, size);
    (void)n; /* a lost notification cannot be reported */
    close(fd);
}

int64_t notify_watchdog_us(void)
{
    const char *us = getenv("WATCHDOG_USEC"), *pid = getenv("WATCHDOG_PID");

    if (!us || (pid && strtol(pid, NULL, 10) != (long)getpid())) {
        return 0;
    }
    return MAX(0, strtoll(us, NULL, 10));
}
