/* The listening socket: host and port, a Unix path, or one that systemd passed. */
#ifndef QUIRE_SERVER_HTTP_LISTEN_H
#define QUIRE_SERVER_HTTP_LISTEN_H

#include "config/settings/settings.h"

/* Open the main listening socket; `url` gets its address as text. ERR_IO names address
 * and reason. */
int listen_open(int *ret_fd, char *url, size_t url_size, const struct settings *s, struct err *e);
/* The same for the setting admin-listen: "ADDRESS:PORT" or "unix:PATH". */
int listen_admin(int *ret_fd, char *url, size_t url_size, const char *where, struct err *e);
/* Whether only this machine can reach the socket: it is bound to a loopback address or
 * a path. */
bool listen_is_local(int fd);
/* Raise the limit of open files to what `connections` sockets, files and a model's
 * shards need. *ret is how many connections fit; fewer are logged as a warning.
 * ERR_INVALID: the limit is too low to serve at all. */
int raise_nofile(int64_t *ret, int64_t connections, struct err *e);

#endif
