/* Checks of a request's head beyond those of the HTTP library: heads that RFC 9112
 * calls invalid, and those that a proxy in front of the server could parse differently
 * (request smuggling). Pure functions of the strings that the library provides.
 *
 * libmicrohttpd 0.9 parses a head in place: method, target, version, names and values
 * point into the received bytes, with separators overwritten by NUL. So the bytes
 * between one string and the next show what the library has dropped or joined, and how
 * each line ended.
 */
#ifndef QUIRE_SERVER_HTTP_HTTP_HEAD_H
#define QUIRE_SERVER_HTTP_HTTP_HEAD_H

#include <stdbool.h>
#include <stddef.h>

/* One header as the library provides it. */
struct http_field {
    const char *name, *value; /* NUL-terminated; the value without leading blanks */
};

struct http_head {
    const char *method, *url, *version; /* `url`: the path, percent-decoded in place */
    const struct http_field *field;     /* [n_fields], in order of arrival */
    size_t n_fields;
    size_t size;              /* bytes from the method to the end of the empty line */
    size_t target_len;        /* bytes of the target as received */
    const char *target_error; /* result of http_target_check */
    bool in_place;            /* the strings point into the received bytes */
};

struct http_verdict {
    int status;          /* HTTP status of the refusal; 0: the request is accepted */
    const char *message; /* static; NULL with status 0 */
    bool close;          /* serve it, but read no further request from its connection */
};

/* What is wrong with a request target, before it is decoded; NULL: nothing. */
const char *http_target_check(const char *target);
/* The path of a decoded target without its query: the target itself, or what follows
 * the authority of one in absolute form, "http://HOST/PATH". */
const char *http_target_path(const char *url);
struct http_verdict http_head_check(const struct http_head *h);

#endif
