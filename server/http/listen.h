/* The listening socket: host and port, a Unix path, or one that systemd passed. */
#ifndef QUIRE_SERVER_HTTP_LISTEN_H
#define QUIRE_SERVER_HTTP_LISTEN_H

#include "config/settings/settings.h"

/* A socket that listens, and a line that says where. ERR_IO names address and
 * reason. */
int listen_open(int *ret_fd, char *url, size_t url_size, const struct settings *s, struct err *e);
/* The same for the setting admin-listen: "ADDRESS:PORT" or "unix:PATH". */
int listen_admin(int *ret_fd, char *url, size_t url_size, const char *where, struct err *e);
/* Whether only this machine reaches the socket: its address is a loopback one, or a
 * path. */
bool listen_is_local(int fd);
/* Descriptors for `connections`, files and a model's shards; returns how many
 * connections fit, with a warning where fewer. */
int64_t raise_nofile(int64_t connections);

#endif
