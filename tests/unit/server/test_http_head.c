/* Heads that are refused although libmicrohttpd accepts them. The test parses them in
 * place as the library does, and passes the result to the check. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config/base/limits.h"
#include "server/http/http_head.h"

enum { MOST_FIELDS = 200 };

/* The line at *at with its end overwritten; *at moves to after it. */
static char *cut_line(char **at, const char *end)
{
    char *line = *at, *lf = memchr(line, '\n', (size_t)(end - line));

    assert_non_null(lf);
    if (lf > line && lf[-1] == '\r') {
        lf[-1] = '\0';
    }
    *lf = '\0';
    *at = lf + 1;
    return line;
}

/* Split a head of `len` bytes, without folded lines, as libmicrohttpd 0.9.75 does. */
static struct http_verdict check(const char *text, size_t len, bool in_place)
{
    char *copy = malloc(len + 1), *at = copy, *line;
    struct http_field *field = calloc(MOST_FIELDS, sizeof(*field));
    struct http_head h = {.method = copy, .field = field, .in_place = in_place};

    assert_true(copy && field);
    memcpy(copy, text, len);
    copy[len] = '\0';
    line = cut_line(&at, copy + len);
    char *end = at[-2] ? at - 1 : at - 2, *target = memchr(line, ' ', (size_t)(end - line));
    char *version = memrchr(line, ' ', (size_t)(end - line));
    assert_true(target && version > target);
    *target++ = *version++ = '\0';
    while (*target == ' ') {
        target++;
    }
    h.target_len = strlen(target);
    h.target_error = http_target_check(target);
    target[strcspn(target, "?")] = '\0';
    h.url = target;
    h.version = version;
    while (*(line = cut_line(&at, copy + len))) {
        char *colon = strchr(line, ':');
        assert_true(colon && h.n_fields < MOST_FIELDS);
        *colon = '\0';
        field[h.n_fields++] = (struct http_field){line, colon + 1 + strspn(colon + 1, " \t")};
    }
    h.size = (size_t)(at - copy);
    struct http_verdict v = http_head_check(&h);
    free(field);
    free(copy);
    return v;
}

struct row {
    const char *text;
    size_t len;
    int status;
    bool close;
};

#define ROW(text, status, close) {text, sizeof(text) - 1, status, close}
#define LINE "POST /a?b=c HTTP/1.1\r\n"
#define HEAD LINE "Host: x\r\n"

static const struct row rows[] = {
    ROW(HEAD "\r\n", 0, false),
    ROW(HEAD "X:\r\nY: \t\r\nZ: a b \r\n\r\n", 0, false),
    ROW("GET / HTTP/1.0\r\n\r\n", 0, false),
    ROW("OPTIONS * HTTP/1.1\r\nHost:\r\n\r\n", 0, false),
    ROW("GET http://x/a%20b HTTP/1.1\r\nHost: [::1]:80\r\n\r\n", 0, false),
    ROW(HEAD "Content-Length: 18446744073709551615\r\n\r\n", 0, false),
    ROW(HEAD "X: \xc3\xa9\r\n\r\n", 0, false),
    /* Line ends: a bare LF is accepted, and the connection is closed. */
    ROW("GET HTTPS://x?a HTTP/1.1\r\nHost: x\r\n\r\n", 0, false),
    ROW("GET http://x%2fa/b HTTP/1.1\r\nHost: x\r\n\r\n", 400, true),
    ROW("GET http:///b HTTP/1.1\r\nHost: x\r\n\r\n", 400, true),
    ROW("GET / HTTP/1.1\nHost: x\r\n\r\n", 0, true),
    ROW("GET / HTTP/1.1\r\nHost: x\n\r\n", 0, true),
    ROW("GET / HTTP/1.1\r\nHost: x\nX: y\r\n\r\n", 0, true),
    ROW("GET / HTTP/1.1\r\nHost: x\r\n\n", 0, true),
    ROW("GET / HTTP/1.1\nHost: x\n\n", 0, true),
    ROW("GET / HTTP/1.0\n\n", 0, true),
    /* What the library drops. */
    ROW(HEAD "X: a\0\r\n\r\n", 400, true),
    ROW(HEAD "X: a\0b\r\nY: c\r\n\r\n", 400, true),
    ROW(HEAD "X: \0b\r\n\r\n", 400, true),
    ROW(HEAD "\0X: b\r\n\r\n", 400, true),
    ROW(LINE "Host: x\0\r\nX: y\r\n\r\n", 400, true),
    ROW("G\0T / HTTP/1.1\r\nHost: x\r\n\r\n", 400, true),
    ROW("GET  / HTTP/1.1\r\nHost: x\r\n\r\n", 400, true),
    ROW("GET /\0 HTTP/1.1\r\nHost: x\r\n\r\n", 400, true),
    ROW("GET /a\0b HTTP/1.1\r\nHost: x\r\n\r\n", 400, true),
    ROW("GET / a HTTP/1.1\r\nHost: x\r\n\r\n", 400, true),
    /* The request line. */
    ROW("G(T / HTTP/1.1\r\nHost: x\r\n\r\n", 400, true),
    ROW("GET a HTTP/1.1\r\nHost: x\r\n\r\n", 400, true),
    ROW("GET /#a HTTP/1.1\r\nHost: x\r\n\r\n", 400, true),
    ROW("GET /\x7f HTTP/1.1\r\nHost: x\r\n\r\n", 400, true),
    ROW("GET /%0 HTTP/1.1\r\nHost: x\r\n\r\n", 400, true),
    ROW("GET /?a=%1f HTTP/1.1\r\nHost: x\r\n\r\n", 400, true),
    /* Names and values. */
    ROW(HEAD "X : y\r\n\r\n", 400, true),
    ROW(HEAD "X\t: y\r\n\r\n", 400, true),
    ROW(HEAD ": y\r\n\r\n", 400, true),
    ROW(HEAD "X\x80: y\r\n\r\n", 400, true),
    ROW(HEAD "X: y\rz\r\n\r\n", 400, true),
    ROW(HEAD "X: y\r\r\n\r\n", 400, true),
    ROW(HEAD "X: \x01\r\n\r\n", 400, true),
    ROW(HEAD "X: \x7f\r\n\r\n", 400, true),
    /* Host. */
    ROW(LINE "\r\n", 400, true),
    ROW(HEAD "host: x\r\n\r\n", 400, true),
    ROW(LINE "Host: a b\r\n\r\n", 400, true),
    ROW(LINE "Host: a/b\r\n\r\n", 400, true),
    ROW(LINE "Host: a@b\r\n\r\n", 400, true),
    /* The body's end. */
    ROW(HEAD "Transfer-Encoding: chunked\r\n\r\n", 0, true),
    ROW(HEAD "transfer-encoding: CHUNKED\r\n\r\n", 0, true),
    ROW(HEAD "Transfer-Encoding: chunked \r\n\r\n", 400, true),
    ROW(HEAD "Transfer-Encoding: \r\n\r\n", 400, true),
    ROW(HEAD "Transfer-Encoding: chunked,\r\n\r\n", 400, true),
    ROW(HEAD "Transfer-Encoding: chunked, chunked\r\n\r\n", 400, true),
    ROW(HEAD "Transfer-Encoding: chunked chunked\r\n\r\n", 400, true),
    ROW(HEAD "Transfer-Encoding: xchunked\r\n\r\n", 501, true),
    ROW(HEAD "Transfer-Encoding: gzip, chunked\r\n\r\n", 501, true),
    ROW(HEAD "Transfer-Encoding: chunked , identity\r\n\r\n", 501, true),
    ROW(HEAD "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n", 400, true),
    ROW(HEAD "Transfer-Encoding: chunked\r\nTransfer-Encoding: x\r\n\r\n", 501, true),
    ROW(HEAD "Transfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n", 400, true),
    ROW("POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n", 400, true),
    ROW(HEAD "Content-Length: 1\r\nContent-Length: 1\r\n\r\n", 400, true),
    ROW(HEAD "Content-Length: 1\r\nContent-Length: 2\r\n\r\n", 400, true),
    ROW(HEAD "Content-Length:\r\n\r\n", 400, true),
    ROW(HEAD "Content-Length: +1\r\n\r\n", 400, true),
    ROW(HEAD "Content-Length: 1, 1\r\n\r\n", 400, true),
    ROW(HEAD "Content-Length: 0x1\r\n\r\n", 400, true),
};

static void each_row(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct http_verdict v = check(rows[i].text, rows[i].len, true);
        if (v.status != rows[i].status || v.close != rows[i].close || !v.message != !v.status) {
            fail_msg("row %zu: status %d, close %d, %s", i, v.status, v.close, v.message);
        }
    }
}

/* Every byte, NUL included, at the end of a value and between two bytes of it. */
static void each_byte_of_a_value(void **state)
{
    (void)state;
    for (int byte = 0; byte < 256; byte++) {
        char end[] = HEAD "X: a?\r\n\r\n", between[] = HEAD "X: a?b\r\n\r\n";
        bool bad = (byte < ' ' && byte != '\t') || byte == 0x7f;
        strchr(strstr(end, "X:"), '?')[0] = (char)byte;
        strchr(strstr(between, "X:"), '?')[0] = (char)byte;
        if (byte == '\n') {
            continue; /* it ends the line */
        }
        assert_int_equal(check(end, sizeof(end) - 1, true).status, bad ? 400 : 0);
        assert_int_equal(check(between, sizeof(between) - 1, true).status, bad ? 400 : 0);
    }
}

/* Strings in another place are those of lines that the library has joined. */
static void strings_out_of_their_place(void **state)
{
    char text[] = "GET\0/\0HTTP/1.1\0\0Host\0 x\0\0\0\0", name[] = "Host", far[] = "x";
    struct http_field field = {text + 16, text + 22};
    struct http_head h = {.method = text,
                          .url = text + 4,
                          .version = text + 6,
                          .field = &field,
                          .n_fields = 1,
                          .size = 27,
                          .target_len = 1,
                          .in_place = true};

    (void)state;
    assert_int_equal(http_head_check(&h).status, 0);
    field.name = name;
    assert_int_equal(http_head_check(&h).status, 400);
    h.in_place = false;
    assert_int_equal(http_head_check(&h).status, 0);
    h.in_place = true;
    field = (struct http_field){text + 16, far};
    assert_int_equal(http_head_check(&h).status, 400);
    field.value = text + 22;
    for (size_t size = 0; size < 40; size++) {
        h.size = size;
        assert_int_equal(http_head_check(&h).status, size >= 25 && size <= 27 ? 0 : 400);
    }
}

static void sizes(void **state)
{
    enum { MANY = LIMIT_HEADER_FIELDS };
    char text[LIMIT_HEADER_BYTES + 100];
    size_t n = (size_t)snprintf(text, sizeof(text), HEAD);

    (void)state;
    for (int i = 1; i < MANY; i++) {
        n += (size_t)snprintf(text + n, sizeof(text) - n, "a:\r\n");
    }
    memcpy(text + n, "\r\n", 3);
    assert_int_equal(check(text, n + 2, true).status, 0);
    memcpy(text + n, "a:\r\n\r\n", 7);
    assert_int_equal(check(text, n + 6, true).status, 431);

    n = (size_t)snprintf(text, sizeof(text), HEAD "X: ");
    memset(text + n, 'a', LIMIT_HEADER_BYTES - n - 4);
    memcpy(text + LIMIT_HEADER_BYTES - 4, "\r\n\r\n", 4);
    assert_int_equal(check(text, LIMIT_HEADER_BYTES, true).status, 0);
    memcpy(text + LIMIT_HEADER_BYTES - 4, "a\r\n\r\n", 5);
    assert_int_equal(check(text, LIMIT_HEADER_BYTES + 1, true).status, 431);
}

static void a_target_in_absolute_form_has_a_path(void **state)
{
    (void)state;
    assert_string_equal(http_target_path("/a/http://b/c"), "/a/http://b/c");
    assert_string_equal(http_target_path("*"), "*");
    assert_string_equal(http_target_path("http://x:80/v1/models"), "/v1/models");
    assert_string_equal(http_target_path("HTTPS://[::1]/"), "/");
    assert_string_equal(http_target_path("http://x"), "/");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_target_in_absolute_form_has_a_path),
        cmocka_unit_test(each_row),
        cmocka_unit_test(each_byte_of_a_value),
        cmocka_unit_test(strings_out_of_their_place),
        cmocka_unit_test(sizes),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
