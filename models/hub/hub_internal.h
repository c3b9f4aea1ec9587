/* The inside of hub.h. hub.c decides what is needed, hub_listing.c asks what there is,
 * hub_cache.c knows where it lies, hub_fetch.c and hub_blob.c bring it, hub_progress.c
 * tells how far it is. */
#ifndef QUIRE_MODELS_HUB_HUB_INTERNAL_H
#define QUIRE_MODELS_HUB_HUB_INTERNAL_H

#include <curl/curl.h>
#include <gnutls/crypto.h>
#include <limits.h>

#include "config/base/buf.h"
#include "config/base/limits.h"

enum {
    HUB_REPO_BYTES = 200,
    HUB_FILE_BYTES = 128,
    HUB_REVISION_BYTES = 128,
    HUB_OID_BYTES = 65,
    HUB_COMMIT_BYTES = 41,
    HUB_HASH_BYTES = 32,
};

/* ---- hub.c: what was asked for, and of whom ---- */

struct hub_name {
    char repo[HUB_REPO_BYTES];         /* "org/name" */
    char file[HUB_FILE_BYTES];         /* a GGUF file of it, or "" */
    char revision[HUB_REVISION_BYTES]; /* branch, tag or commit; "main" */
};

struct hub {
    struct hub_name name;
    char endpoint[256];  /* without a slash at the end */
    char token[1024];    /* "": none */
    char root[PATH_MAX]; /* the cache */
    char repo[PATH_MAX]; /* the model's folder in it */
    bool offline;
};

/* Fill *ret; 0, or ERR_INVALID with what is wrong with it. */
int hub_name_parse(struct hub_name *ret, const char *text, struct err *e);
/* The variable's value; NULL when it is not set or empty. */
const char *hub_env(const char *name);
/* A name of a file that may stand in a snapshot: letters, digits, '.', '_', '-', '+',
 * no dot in front, not too long. */
bool hub_file_name_ok(const char *name);

/* ---- hub_listing.c: the files of a revision ---- */

struct hub_file {
    char name[HUB_FILE_BYTES];
    /* SHA-256 of the contents where `lfs`, else git's SHA-1 of a blob; hexadecimal */
    char oid[HUB_OID_BYTES];
    bool lfs;
    int64_t n_bytes;
};

struct hub_listing {
    char commit[HUB_COMMIT_BYTES];
    struct hub_file *file; /* those that a model could need: at the top, with sane names */
    int32_t n_files, cap;
};

void hub_listing_release(struct hub_listing *l);
/* The hub's answer about a revision; for hub_listing_get and the fuzzer. On failure *l
 * may only be released. */
int hub_listing_parse(struct hub_listing *l, const char *text, size_t len, struct err *e);
int hub_listing_get(struct hub_listing *l, const struct hub *h, struct err *e);
const struct hub_file *hub_listing_find(const struct hub_listing *l, const char *name);
/* The GGUF file to take when none is named: see hub_listing.c. NULL: there is none, or
 * no way to choose. */
const struct hub_file *hub_listing_gguf(const struct hub_listing *l);
/* The better one of two names of GGUF files has the lower rank; HUB_NO_GGUF: no name of
 * a whole model's file. */
enum { HUB_NO_GGUF = INT32_MAX };
int32_t hub_gguf_rank(const char *name);
/* What is needed beside weights, as far as there is such a file; NULL-terminated. */
extern const char *const hub_small_files[];

/* The files that the index in `dir` names. */
struct hub_shards {
    char (*name)[HUB_FILE_BYTES];
    int32_t n;
};
int hub_shards_read(struct hub_shards *ret, const char *dir, struct err *e);
void hub_shards_release(struct hub_shards *s);

/* ---- hub_cache.c: folders ---- */

/* HF_HOME or where it is when it is not set, and `name` in it. */
int hub_cache_home(char ret[PATH_MAX], const char *name, struct err *e);
/* h->root and h->repo from the environment and h->name. */
int hub_cache_locate(struct hub *h, struct err *e);
/* The commit that the revision means in the cache; false: it is not known there. */
bool hub_cache_commit(const struct hub *h, char ret[HUB_COMMIT_BYTES]);
/* <repo>/snapshots/<commit>, not made. */
int hub_cache_snapshot(const struct hub *h, const char *commit, char ret[PATH_MAX], struct err *e);
/* The snapshot directory `dir`, or the GGUF file in it, in ret; or 0 and the name of
 * what is missing. 1: complete. */
int hub_cache_complete(const struct hub *h, const char *dir, char ret[PATH_MAX],
                       char missing[HUB_FILE_BYTES], struct err *e);
/* Make the folders that downloading to `commit` needs. */
int hub_cache_prepare(const struct hub *h, const char *commit, struct err *e);
/* Remove those that stayed empty. */
void hub_cache_tidy(const struct hub *h, const char *commit);
/* <repo>/blobs/<oid><suffix>, or its lock. */
int hub_cache_blob(const struct hub *h, const char *oid, const char *suffix, char ret[PATH_MAX],
                   struct err *e);
int hub_cache_lock(const struct hub *h, const char *oid, char ret[PATH_MAX], struct err *e);
/* The blob is there whole, as far as its size says. */
bool hub_cache_has(const struct hub *h, const struct hub_file *f);
/* Name the blob in the snapshot. Atomic. */
int hub_cache_link(const struct hub *h, const char *commit, const struct hub_file *f,
                   struct err *e);
/* From now on the revision means this commit. Atomic; nothing for a revision that is a
 * commit itself. */
int hub_cache_set_ref(const struct hub *h, const char *commit, struct err *e);

/* ---- hub_blob.c: a blob while it comes ---- */

struct hub_blob {
    const struct hub_file *file;
    char path[PATH_MAX]; /* <oid>.incomplete, renamed when it is whole and right */
    int fd, lock_fd;     /* -1: none */
    int64_t have;        /* bytes in the file, all of them in the hash */
    gnutls_hash_hd_t hash;
};

void hub_blob_init(struct hub_blob *b, const struct hub_file *f);
/* An incomplete file stays for the next attempt, unless it is empty. */
void hub_blob_release(struct hub_blob *b);
/* Take the blob's lock and what an earlier attempt left. 1: ready to go on at b->have;
 * 0: another process has the lock, try later; 2: meanwhile another process has brought
 * it. */
int hub_blob_open(struct hub_blob *b, const struct hub *h, struct err *e);
/* Forget what there is. */
int hub_blob_restart(struct hub_blob *b, struct err *e);
/* More than the listing says is refused. */
int hub_blob_write(struct hub_blob *b, const void *data, size_t len, struct err *e);
/* Whether all bytes are there and are the right ones; only once, then restart or
 * finish. */
bool hub_blob_verify(struct hub_blob *b);
int hub_blob_finish(struct hub_blob *b, const struct hub *h, struct err *e);

/* ---- hub_fetch.c: requests ---- */

/* What the head of the last answer said. */
struct hub_answer {
    int64_t range_first; /* of Content-Range; -1: none */
    char code[32];       /* X-Error-Code: "GatedRepo", "RevisionNotFound", ... */
};

/* A request for `url` with what all requests have in common; answers' heads go to *a.
 * NULL without memory. */
CURL *hub_request(const struct hub *h, const char *url, struct hub_answer *a);
/* The sentence for a request that failed: `result` of curl, or the HTTP status. Returns
 * its code. */
int hub_refusal(const struct hub *h, const struct hub_answer *a, CURL *easy, CURLcode result,
                const char *what, struct err *e);
/* A status or a failure that another attempt may mend. */
bool hub_may_retry(CURLcode result, long status);
/* Bring the files into the cache, several at once, and name them in the snapshot. */
int hub_fetch(const struct hub *h, const char *commit, const struct hub_file *const *file,
              int32_t n, struct err *e);

/* ---- hub_progress.c ---- */

struct hub_progress {
    const char *model;
    int64_t total, done, first_done; /* bytes; first_done: what there was at the start */
    int64_t start_us, told_us;
    int32_t n_files;
    bool terminal;
};

void hub_progress_begin(struct hub_progress *p, const char *model, int32_t n_files, int64_t total,
                        int64_t done);
/* Tells when it is time to. */
void hub_progress_step(struct hub_progress *p, int64_t done);
void hub_progress_end(struct hub_progress *p, bool ok);

#endif
