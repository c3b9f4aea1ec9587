/* What of a request's head is refused although the HTTP library takes it: heads that
 * RFC 9112 calls faulty, and those that a proxy in front could read in another way
 * (request smuggling). Pure functions of what the library hands over.
 *
 * libmicrohttpd 0.9 parses a head in place: method, target, version, names and values
 * point into the bytes as they came, with separators overwritten by NUL. So the bytes
 * between one string and the next tell what the library has cut off or joined, and how
 * lines ended.
 */
#ifndef QUIRE_SERVER_HTTP_HTTP_HEAD_H
#define QUIRE_SERVER_HTTP_HTTP_HEAD_H

#include <stdbool.h>
#include <stddef.h>

/* As the library hands it over: NUL-terminated, the value without the blanks before
 * it. */
struct http_field {
    const char *name, *value;
};

struct http_head {
    const char *method, *url, *version;
    const struct http_field *field; /* [n_fields], in the order in which they came */
    size_t n_fields;
    size_t size;              /* in bytes, from the method to the end of the empty line */
    size_t target_len;        /* of the target as it came; `url` is its path, decoded in place */
    const char *target_error; /* what http_target_check said */
    bool in_place;            /* the strings point into the bytes as they came */
};

struct http_verdict {
    int status;          /* to refuse the request with; 0: it is to be served */
    const char *message; /* static; NULL with status 0 */
    bool close;          /* serve it, but read no other request of its connection */
};

/* What is wrong with the target of a request line, as it came; NULL: nothing. */
const char *http_target_check(const char *target);
struct http_verdict http_head_check(const struct http_head *h);

#endif
