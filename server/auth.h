/* API keys: from the settings and a file, compared in constant time. */
#ifndef QUIRE_SERVER_AUTH_H
#define QUIRE_SERVER_AUTH_H

#include "config/settings.h"

enum { KEY_BYTES = 256 };

struct keys {
    char (*key)[KEY_BYTES]; /* [n] padded with NULs */
    int n;
};

/* Keys of `api-key` and `api-key-file` (one a line, # begins a comment). None: every request is let in. */
int keys_load(struct keys *k, const struct settings *s, struct err *e);
void keys_release(struct keys *k);
/* Whether an Authorization header's value (or NULL) is "Bearer" with one of the keys. The time does not depend on how
 * much of a key matched, nor on which. */
bool keys_allow(const struct keys *k, const char *authorization);

#endif
