/* Requests to the hub: their common options, the errors for refusals, and the download
 * of several files at once.
 *
 * The token is sent to the endpoint only: libcurl omits it when a redirect leads to
 * another host, port or protocol, and redirects from https to http are not followed. A
 * broken transfer is resumed at its last byte, until ATTEMPTS in a row have brought
 * none.
 */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#include "config/base/log.h"
#include "models/hub/hub_internal.h"

enum {
    PARALLEL = 8,
    ATTEMPTS = 5,
    BACKOFF_US = 200 * 1000, /* doubled with each attempt */
    MAX_WAIT_US = 60 * 1000 * 1000,
    LOCK_WAIT_US = 200 * 1000,
    POLL_MS = 100,
    CONNECT_S = 10,
    SILENCE_S = 30, /* a transfer without a byte for so long is aborted */
    REDIRECTS = 10,
};

/* ---- one request ---- */

/* The length of the value of header `name` in a line, without surrounding white space;
 * 0: another header. */
static size_t header_value(const char *line, size_t len, const char *name, const char **ret)
{
    size_t n = strlen(name);

    if (len <= n || strncasecmp(line, name, n) != 0 || line[n] != ':') {
        return 0;
    }
    for (line += n + 1, len -= n + 1; len > 0 && isspace((unsigned char)*line); line++) {
        len--;
    }
    while (len > 0 && isspace((unsigned char)line[len - 1])) {
        len--;
    }
    *ret = line;
    return len;
}

static size_t take_header(char *line, size_t size, size_t n, void *arg)
{
    struct hub_answer *a = arg;
    const char *value;
    char text[64];
    size_t len = size * n;

    if (len > 5 && strncmp(line, "HTTP/", 5) == 0) {
        *a = (struct hub_answer){.range_first = -1}; /* a new response, after a redirect */
    }
    size_t m = header_value(line, len, "Content-Range", &value);
    if (m > 0) {
        long long first;
        snprintf(text, sizeof(text), "%.*s", (int)MIN(m, sizeof(text) - 1), value);
        a->range_first = sscanf(text, "bytes %lld-", &first) == 1 ? first : -1;
    }
    m = header_value(line, len, "X-Error-Code", &value);
    if (m > 0) {
        snprintf(a->code, sizeof(a->code), "%.*s", (int)MIN(m, sizeof(a->code) - 1), value);
    }
    return len;
}

static void set_protocols(CURL *easy, bool https)
{
#if LIBCURL_VERSION_NUM >= 0x075500
    curl_easy_setopt(easy, CURLOPT_PROTOCOLS_STR, "http,https");
    curl_easy_setopt(easy, CURLOPT_REDIR_PROTOCOLS_STR, https ? "https" : "http,https");
#else
    curl_easy_setopt(easy, CURLOPT_PROTOCOLS, (long)(CURLPROTO_HTTP | CURLPROTO_HTTPS));
    curl_easy_setopt(easy, CURLOPT_REDIR_PROTOCOLS,
                     (long)(CURLPROTO_HTTPS | (https ? 0 : CURLPROTO_HTTP)));
#endif
}

CURL *hub_request(const struct hub *h, const char *url, struct hub_answer *a)
{
    const char *ca = hub_env("SSL_CERT_FILE");
    CURL *easy = curl_easy_init();

    if (!easy) {
        return NULL;
    }
    *a = (struct hub_answer){.range_first = -1};
    bool ok = curl_easy_setopt(easy, CURLOPT_URL, url) == CURLE_OK;
    if (h->token[0]) {
        ok &= curl_easy_setopt(easy, CURLOPT_HTTPAUTH, (long)CURLAUTH_BEARER) == CURLE_OK;
        ok &= curl_easy_setopt(easy, CURLOPT_XOAUTH2_BEARER, h->token) == CURLE_OK;
    }
    if (ca) {
        ok &= curl_easy_setopt(easy, CURLOPT_CAINFO, ca) == CURLE_OK;
    }
    set_protocols(easy, strncmp(h->endpoint, "https:", 6) == 0);
    curl_easy_setopt(easy, CURLOPT_USERAGENT, "quire/" QUIRE_VERSION);
    curl_easy_setopt(easy, CURLOPT_FOLLOWLOCATION, 1L);
    curl_easy_setopt(easy, CURLOPT_MAXREDIRS, (long)REDIRECTS);
    curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(easy, CURLOPT_CONNECTTIMEOUT, (long)CONNECT_S);
    curl_easy_setopt(easy, CURLOPT_LOW_SPEED_LIMIT, 1L);
    curl_easy_setopt(easy, CURLOPT_LOW_SPEED_TIME, (long)SILENCE_S);
    /* Several connections are faster than the streams of one HTTP/2 connection, which
     * share its window. */
    curl_easy_setopt(easy, CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1);
    curl_easy_setopt(easy, CURLOPT_HEADERFUNCTION, take_header);
    curl_easy_setopt(easy, CURLOPT_HEADERDATA, a);
    if (ok) {
        return easy;
    }
    curl_easy_cleanup(easy);
    return NULL;
}

bool hub_may_retry(CURLcode result, long status)
{
    if (result == CURLE_OK) {
        return status == 408 || status == 416 || status == 429 || status >= 500;
    }
    return result == CURLE_COULDNT_CONNECT || result == CURLE_OPERATION_TIMEDOUT ||
           result == CURLE_PARTIAL_FILE || result == CURLE_RECV_ERROR ||
           result == CURLE_SEND_ERROR || result == CURLE_GOT_NOTHING ||
           result == CURLE_SSL_CONNECT_ERROR || result == CURLE_RANGE_ERROR ||
           result == CURLE_HTTP2 || result == CURLE_HTTP2_STREAM;
}

int hub_refusal(const struct hub *h, const struct hub_answer *a, CURL *easy, CURLcode result,
                const char *what, struct err *e)
{
    long status = 0;
    const char *token = h->token[0] ? "the token has no access to it" : "no HF_TOKEN is given";

    curl_easy_getinfo(easy, CURLINFO_RESPONSE_CODE, &status);
    if (result != CURLE_OK) {
        return err_set(e, ERR_IO, "%s could not be fetched from %s: %s", what, h->endpoint,
                       curl_easy_strerror(result));
    }
    if (strcmp(a->code, "GatedRepo") == 0) {
        return err_set(e, ERR_NOT_FOUND, "is gated: accept its terms at %s/%s; %s", h->endpoint,
                       h->name.repo, token);
    }
    if (strcmp(a->code, "RevisionNotFound") == 0) {
        return err_set(e, ERR_NOT_FOUND, "has no revision %s", h->name.revision);
    }
    if (status == 401 || status == 403 || strcmp(a->code, "RepoNotFound") == 0) {
        return err_set(e, ERR_NOT_FOUND, "%s has no such model or keeps it private: %s",
                       h->endpoint, token);
    }
    if (status == 404) {
        return err_set(e, ERR_NOT_FOUND, "%s does not have %s at revision %s", h->endpoint, what,
                       h->name.revision);
    }
    return err_set(e, ERR_IO, "%s could not be fetched from %s: HTTP status %ld", what, h->endpoint,
                   status);
}

/* ---- one file among several ---- */

enum transfer_state { TRANSFER_WAITS, TRANSFER_RUNS, TRANSFER_DONE };

struct transfer {
    const struct hub *hub;
    const char *commit;
    struct hub_blob blob;
    struct hub_answer answer;
    CURL *easy;
    enum transfer_state state;
    bool begun;            /* the first bytes of the response were checked */
    bool again;            /* the hash was wrong once: this is the last attempt */
    bool misplaced;        /* the server sent another range than was requested */
    int32_t n_attempts;    /* in a row without progress */
    int64_t had;           /* bytes when this attempt began */
    int64_t not_before_us; /* clock_us of the next attempt */
    struct err err;        /* of writing: the disk, or more bytes than announced */
};

static size_t take_body(char *data, size_t size, size_t n, void *arg)
{
    struct transfer *t = arg;
    long status = 0;

    curl_easy_getinfo(t->easy, CURLINFO_RESPONSE_CODE, &status);
    if (status != 200 && status != 206) {
        return size * n; /* the page of an error */
    }
    if (!t->begun) {
        t->begun = true;
        t->misplaced = status == 206 && t->answer.range_first != t->blob.have;
        if (t->misplaced ||
            (status == 200 && t->blob.have > 0 && hub_blob_restart(&t->blob, &t->err) < 0)) {
            return 0;
        }
    }
    return hub_blob_write(&t->blob, data, size * n, &t->err) == 0 ? size * n : 0;
}

static int start_request(struct transfer *t, CURLM *multi, struct err *e)
{
    char range[32];
    struct buf url;
    const struct hub *h = t->hub;

    buf_init(&url, 4096);
    buf_printf(&url, "%s/%s/resolve/%s/%s", h->endpoint, h->name.repo, t->commit,
               t->blob.file->name);
    t->easy = url.failed ? NULL : hub_request(h, url.data, &t->answer);
    buf_release(&url);
    if (!t->easy) {
        return err_nomem(e, "a request");
    }
    snprintf(range, sizeof(range), "%lld-", (long long)t->blob.have);
    if (t->blob.have > 0) {
        curl_easy_setopt(t->easy, CURLOPT_RANGE, range);
    }
    curl_easy_setopt(t->easy, CURLOPT_WRITEFUNCTION, take_body);
    curl_easy_setopt(t->easy, CURLOPT_WRITEDATA, t);
    curl_easy_setopt(t->easy, CURLOPT_PRIVATE, t);
    t->begun = t->misplaced = false;
    t->had = t->blob.have;
    t->state = TRANSFER_RUNS;
    return curl_multi_add_handle(multi, t->easy) == CURLM_OK ? 0 : err_nomem(e, "a request");
}

static void end_request(struct transfer *t, CURLM *multi)
{
    if (!t->easy) {
        return;
    }
    curl_multi_remove_handle(multi, t->easy);
    curl_easy_cleanup(t->easy);
    t->easy = NULL;
}

/* All bytes have been received. If their hash is wrong, start once more from the
 * beginning. */
static int check_bytes(struct transfer *t, struct err *e)
{
    if (hub_blob_verify(&t->blob)) {
        t->state = TRANSFER_DONE;
        int rc = hub_blob_finish(&t->blob, t->hub, e);
        return rc < 0 ? rc : hub_cache_link(t->hub, t->commit, t->blob.file, e);
    }
    int rc = hub_blob_restart(&t->blob, e);
    if (rc < 0) {
        return rc;
    }
    if (t->again) {
        return err_set(e, ERR_INVALID, "%s is not what the hub says it is: its %s differs, twice",
                       t->blob.file->name, t->blob.file->lfs ? "SHA-256" : "checksum");
    }
    t->again = true;
    t->state = TRANSFER_WAITS;
    log_event(LOG_WARN, "wrong checksum, fetched again", LOG_STR("file", t->blob.file->name));
    return 0;
}

/* Open the blob and request the bytes that are missing. */
static int start_transfer(struct transfer *t, CURLM *multi, struct err *e)
{
    int rc = t->blob.fd >= 0 ? 1 : hub_blob_open(&t->blob, t->hub, e);

    if (rc < 0) {
        return rc;
    }
    if (rc == 2) {
        t->state = TRANSFER_DONE;
        return hub_cache_link(t->hub, t->commit, t->blob.file, e);
    }
    if (rc == 0) {
        t->not_before_us = clock_us() + LOCK_WAIT_US;
        return 0;
    }
    return t->blob.have == t->blob.file->n_bytes ? check_bytes(t, e) : start_request(t, multi, e);
}

/* Schedule another attempt, or set the error if there will be none. */
static int retry(struct transfer *t, CURLcode result, struct err *e)
{
    long status = 0;
    curl_off_t wait_s = 0;

    curl_easy_getinfo(t->easy, CURLINFO_RESPONSE_CODE, &status);
    curl_easy_getinfo(t->easy, CURLINFO_RETRY_AFTER, &wait_s);
    bool odd_range = t->misplaced || (result == CURLE_OK && status == 416);
    if (t->blob.have > t->had) {
        t->n_attempts = 0;
    }
    if (odd_range && hub_blob_restart(&t->blob, e) < 0) {
        return ERR_IO;
    }
    /* A complete response that is too short: one more attempt only, as the next one is
     * unlikely to be longer. */
    bool too_short = result == CURLE_OK && (status == 200 || status == 206);
    if (++t->n_attempts > (too_short ? 1 : ATTEMPTS) ||
        !(odd_range || too_short || hub_may_retry(result, status))) {
        return too_short
                   ? err_set(e, ERR_IO, "%s ends after %lld of %lld bytes", t->blob.file->name,
                             (long long)t->blob.have, (long long)t->blob.file->n_bytes)
                   : hub_refusal(t->hub, &t->answer, t->easy, result, t->blob.file->name, e);
    }
    int64_t wait_us = MAX((int64_t)BACKOFF_US << (t->n_attempts - 1), (int64_t)wait_s * 1000000);
    t->not_before_us = clock_us() + MIN(wait_us, MAX_WAIT_US);
    t->state = TRANSFER_WAITS;
    log_event(LOG_DEBUG, "transfer broken", LOG_STR("file", t->blob.file->name),
              LOG_I64("status", status), LOG_STR("reason", curl_easy_strerror(result)),
              LOG_I64("have", t->blob.have));
    return 0;
}

static int end_transfer(struct transfer *t, CURLM *multi, CURLcode result, struct err *e)
{
    int rc = t->err.code;

    if (rc < 0 && e) {
        *e = t->err;
    }
    if (rc == ERR_INVALID) {
        hub_blob_restart(&t->blob, NULL); /* the bytes received are useless */
    }
    if (rc == 0 && result == CURLE_OK && t->begun && t->blob.have == t->blob.file->n_bytes) {
        rc = check_bytes(t, e);
    } else if (rc == 0) {
        rc = retry(t, result, e);
    }
    end_request(t, multi);
    return rc;
}

/* ---- all ---- */

struct fetch {
    struct transfer *transfer;
    int32_t n, n_running, n_done;
    CURLM *multi;
    struct hub_progress progress;
};

static int start_some(struct fetch *f, struct err *e)
{
    int64_t now = clock_us();
    int rc = 0;

    for (int32_t i = 0; i < f->n && rc == 0 && f->n_running < PARALLEL; i++) {
        struct transfer *t = &f->transfer[i];
        if (t->state != TRANSFER_WAITS || now < t->not_before_us) {
            continue;
        }
        rc = start_transfer(t, f->multi, e);
        f->n_running += t->state == TRANSFER_RUNS;
        f->n_done += t->state == TRANSFER_DONE;
    }
    return rc;
}

static int end_some(struct fetch *f, struct err *e)
{
    CURLMsg *m;
    int left, code = 0;

    while (code == 0 && (m = curl_multi_info_read(f->multi, &left))) {
        struct transfer *t = NULL;
        CURLcode result = m->data.result;
        curl_easy_getinfo(m->easy_handle, CURLINFO_PRIVATE, (char **)&t);
        code = end_transfer(t, f->multi, result, e);
        f->n_running--;
        f->n_done += t->state == TRANSFER_DONE;
    }
    return code;
}

static int64_t bytes_done(const struct fetch *f)
{
    int64_t n = 0;

    for (int32_t i = 0; i < f->n; i++) {
        n += f->transfer[i].state == TRANSFER_DONE ? f->transfer[i].blob.file->n_bytes
                                                   : f->transfer[i].blob.have;
    }
    return n;
}

static int run(struct fetch *f, struct err *e)
{
    int rc = 0, running;

    while (rc == 0 && f->n_done < f->n) {
        rc = start_some(f, e);
        if (rc == 0 && (curl_multi_perform(f->multi, &running) != CURLM_OK ||
                        curl_multi_poll(f->multi, NULL, 0, f->n_done < f->n ? POLL_MS : 0, NULL) !=
                            CURLM_OK)) {
            rc = err_set(e, ERR_IO, "libcurl cannot go on with the download");
        }
        if (rc == 0) {
            rc = end_some(f, e);
        }
        hub_progress_step(&f->progress, bytes_done(f));
    }
    return rc;
}

/* The size of a file's incomplete blob from an earlier attempt. */
static int64_t incomplete_bytes(const struct hub *h, const struct hub_file *file)
{
    char path[PATH_MAX];
    struct stat st;
    bool there =
        hub_cache_blob(h, file->oid, ".incomplete", path, NULL) == 0 && stat(path, &st) == 0;

    return there && st.st_size <= file->n_bytes ? st.st_size : 0;
}

static int check_space(const struct hub *h, int64_t n_bytes, struct err *e)
{
    struct statvfs fs;

    if (statvfs(h->repo, &fs) != 0) {
        return 0; /* unknown: an error of writing will tell */
    }
    double there = (double)fs.f_bavail * (double)fs.f_frsize;
    if ((double)n_bytes <= there) {
        return 0;
    }
    return err_set(e, ERR_IO, "needs %.3f GB in %.200s, where %.3f GB are free",
                   (double)n_bytes / 1e9, h->root, there / 1e9);
}

static int fetch_missing(struct fetch *f, const struct hub *h, struct err *e)
{
    int64_t total = 0, there = 0;

    for (int32_t i = 0; i < f->n; i++) {
        const struct hub_file *file = f->transfer[i].blob.file;
        total += file->n_bytes;
        f->transfer[i].blob.have = incomplete_bytes(h, file);
        there += f->transfer[i].blob.have;
    }
    int rc = check_space(h, total - there, e);
    if (rc < 0) {
        return rc;
    }
    f->multi = curl_multi_init();
    if (!f->multi) {
        return err_nomem(e, "curl");
    }
    hub_progress_begin(&f->progress, h->name.repo, f->n, total, there);
    rc = run(f, e);
    hub_progress_end(&f->progress, rc == 0);
    for (int32_t i = 0; i < f->n; i++) {
        end_request(&f->transfer[i], f->multi);
        hub_blob_release(&f->transfer[i].blob);
    }
    curl_multi_cleanup(f->multi);
    return rc;
}

int hub_fetch(const struct hub *h, const char *commit, const struct hub_file *const *file,
              int32_t n, struct err *e)
{
    struct fetch f = {.transfer = calloc((size_t)MAX(n, 1), sizeof(*f.transfer))};
    int rc = f.transfer ? 0 : err_nomem(e, "list of files");

    for (int32_t i = 0; i < n && rc == 0; i++) {
        if (hub_cache_has(h, file[i])) {
            rc = hub_cache_link(h, commit, file[i], e);
            continue;
        }
        f.transfer[f.n] = (struct transfer){.hub = h, .commit = commit};
        hub_blob_init(&f.transfer[f.n++].blob, file[i]);
    }
    if (rc == 0 && f.n > 0) {
        rc = fetch_missing(&f, h, e);
    }
    free(f.transfer);
    return rc;
}
