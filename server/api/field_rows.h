/* Rows of the field tables that fill a `struct completion`. */
#ifndef QUIRE_SERVER_API_FIELD_ROWS_H
#define QUIRE_SERVER_API_FIELD_ROWS_H

#include "server/api/api.h"

#define AT(m) .offset = offsetof(struct completion, m)
#define GIVEN(m) .given = offsetof(struct completion, m)

#define ROW_BOOL(n, m, h) {.name = n, .type = FIELD_BOOL, AT(m), .given = -1, .help = h}
#define ROW_INT(n, m, l, u, h) \
    {.name = n, .type = FIELD_INT, AT(m), .given = -1, .lo = l, .hi = u, .help = h}
#define ROW_FLOAT(n, m, l, u, h) \
    {.name = n, .type = FIELD_FLOAT, AT(m), .given = -1, .lo = l, .hi = u, .help = h}
#define ROW_OVER(n, m, l, u, h) \
    {.name = n,                 \
     .type = FIELD_FLOAT,       \
     AT(m),                     \
     .given = -1,               \
     .lo = l,                   \
     .hi = u,                   \
     .lo_open = true,           \
     .help = h}
#define ROW_CUSTOM(n, f, s, h) \
    {.name = n, .type = FIELD_CUSTOM, .given = -1, .read = f, .schema = s, .help = h}
#define ROW_STRING(n, h) {.name = n, .type = FIELD_STRING, .given = -1, .help = h}
#define ROW_MISSING(n, h) {.name = n, .type = FIELD_MISSING, .given = -1, .help = h}

#endif
