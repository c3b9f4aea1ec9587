/* The inside of hub.h. hub.c decides which files are needed, hub_listing.c asks the hub
 * which there are, hub_cache.c knows the folders of the cache, hub_fetch.c and
 * hub_blob.c download, hub_progress.c reports progress. */
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
    HUB_OID_BYTES = 65,    /* 64 hexadecimal digits and a NUL */
    HUB_COMMIT_BYTES = 41, /* 40 hexadecimal digits and a NUL */
    HUB_HASH_BYTES = 32,   /* of the longest hash, SHA-256 */
};

/* ---- hub.c: the model and the hub it is requested from ---- */

struct hub_name {
    char repo[HUB_REPO_BYTES];         /* "org/name" */
    char file[HUB_FILE_BYTES];         /* a GGUF file in it, or "" */
    char revision[HUB_REVISION_BYTES]; /* branch, tag or commit; "main" if none is given */
};

struct hub {
    struct hub_name name; /* the model requested */
    char endpoint[256];   /* the hub's URL, without a slash at the end */
    char token[1024];     /* for authorization; "": none */
    char root[PATH_MAX];  /* the cache */
    char repo[PATH_MAX];  /* the model's folder in it */
    bool offline;         /* HF_HUB_OFFLINE: only the cache is used */
    bool has_tokenizer;   /* a directory without one is not complete */
};

/* Parse a hub name; 0 or ERR_INVALID. */
int hub_name_parse(struct hub_name *ret, const char *text, struct err *e);
/* The value of an environment variable; NULL if it is unset or empty. */
const char *hub_env(const char *name);
/* Whether a file of this name may be created in a snapshot: letters, digits, '.', '_',
 * '-', '+', no leading dot, not too long. */
bool hub_file_name_ok(const char *name);
/* The same of a GGUF file, which may be in folders: "Q4_0/name-00001-of-00002.gguf". */
bool hub_gguf_name_ok(const char *name);

/* ---- hub_listing.c: the files of a revision ---- */

/* A file of a repository; its identity is its contents' hash. */
struct hub_file {
    char name[HUB_FILE_BYTES]; /* passes hub_file_name_ok, or hub_gguf_name_ok */
    char oid[HUB_OID_BYTES];   /* hexadecimal: SHA-256 of the contents if lfs, else git's SHA-1 */
    bool lfs;                  /* stored with Git LFS */
    int64_t n_bytes;           /* of the contents */
};

struct hub_listing {
    char commit[HUB_COMMIT_BYTES]; /* that the revision is, hexadecimal */
    struct hub_file *file;         /* [n_files] that a model may need; in folders only GGUF */
    int32_t n_files, cap;          /* files, and how many fit */
};

void hub_listing_release(struct hub_listing *l);
/* Parse the hub's answer about a revision; for hub_listing_get and the fuzzer. After an
 * error *l may only be released. */
int hub_listing_parse(struct hub_listing *l, const char *text, size_t len, struct err *e);
/* Ask the hub for the files of h->name's revision. */
int hub_listing_get(struct hub_listing *l, const struct hub *h, struct err *e);
const struct hub_file *hub_listing_find(const struct hub_listing *l, const char *name);
/* The GGUF file to use if none is named: that of the lowest hub_gguf_rank. NULL: there
 * is none, or several share that rank. */
const struct hub_file *hub_listing_gguf(const struct hub_listing *l);
/* The preference among GGUF files by their names, the lowest first; HUB_NO_GGUF: not a
 * model or the first file of one, or in a folder. */
enum { HUB_NO_GGUF = INT32_MAX };
int32_t hub_gguf_rank(const char *name);
/* Whether there is a tokenizer in a form that is read. */
bool hub_listing_tokenizer(const struct hub_listing *l);
/* The files needed besides the weights, if the model has them; NULL-terminated. */
extern const char *const hub_small_files[];

/* The files that the index of a sharded checkpoint names. */
struct hub_shards {
    char (*name)[HUB_FILE_BYTES]; /* [n], each once */
    int32_t n;                    /* at most LIMIT_SHARDS */
};
/* Read the index in the directory `dir`. */
int hub_shards_read(struct hub_shards *ret, const char *dir, struct err *e);
void hub_shards_release(struct hub_shards *s);

/* ---- hub_cache.c: folders ---- */

/* The path of `name` in HF_HOME or its default. */
int hub_cache_home(char ret[PATH_MAX], const char *name, struct err *e);
/* Set h->root and h->repo from the environment and h->name. */
int hub_cache_locate(struct hub *h, struct err *e);
/* The commit of the revision according to the cache; false: the cache lacks it. */
bool hub_cache_commit(const struct hub *h, char ret[HUB_COMMIT_BYTES]);
/* The path <repo>/snapshots/<commit>; the folder is not made. */
int hub_cache_snapshot(const struct hub *h, const char *commit, char ret[PATH_MAX], struct err *e);
/* 1: the snapshot is complete, and ret is its directory `dir` or the GGUF file in it;
 * 0: a file is missing, named in `missing`. */
int hub_cache_complete(const struct hub *h, const char *dir, char ret[PATH_MAX],
                       char missing[HUB_FILE_BYTES], struct err *e);
/* Make the folders that a download of `commit` needs. */
int hub_cache_prepare(const struct hub *h, const char *commit, struct err *e);
/* Remove those of them that are empty. */
void hub_cache_tidy(const struct hub *h, const char *commit);
/* The path <repo>/blobs/<oid><suffix>, and that of its lock. */
int hub_cache_blob(const struct hub *h, const char *oid, const char *suffix, char ret[PATH_MAX],
                   struct err *e);
int hub_cache_lock(const struct hub *h, const char *oid, char ret[PATH_MAX], struct err *e);
/* Whether the cache has the blob, judged by its size. */
bool hub_cache_has(const struct hub *h, const struct hub_file *f);
/* Link the blob into the snapshot under its file's name. Atomic. */
int hub_cache_link(const struct hub *h, const char *commit, const struct hub_file *f,
                   struct err *e);
/* Record that the revision is this commit. Atomic; does nothing if the revision itself
 * is a commit. */
int hub_cache_set_ref(const struct hub *h, const char *commit, struct err *e);

/* ---- hub_blob.c: a blob that is being downloaded ---- */

struct hub_blob {
    const struct hub_file *file; /* not owned */
    char path[PATH_MAX];         /* <oid>.incomplete, renamed once it is verified */
    int fd, lock_fd;             /* -1: not open */
    int64_t have;                /* bytes in the file, all of them hashed */
    gnutls_hash_hd_t hash;       /* of those bytes */
};

void hub_blob_init(struct hub_blob *b, const struct hub_file *f);
/* An incomplete file is kept for the next attempt, unless it is empty. */
void hub_blob_release(struct hub_blob *b);
/* Take the blob's lock and resume an earlier attempt. 1: ready to write at b->have; 0:
 * another process holds the lock, try later; 2: another process has completed the
 * blob. */
int hub_blob_open(struct hub_blob *b, const struct hub *h, struct err *e);
/* Discard the bytes so far. */
int hub_blob_restart(struct hub_blob *b, struct err *e);
/* Append bytes; more than the listing says are an error. */
int hub_blob_write(struct hub_blob *b, const void *data, size_t len, struct err *e);
/* Whether all bytes have been written and their hash is right. Ends the hash: only
 * hub_blob_restart or hub_blob_finish may follow. */
bool hub_blob_verify(struct hub_blob *b);
/* Give the verified blob its name. */
int hub_blob_finish(struct hub_blob *b, const struct hub *h, struct err *e);

/* ---- hub_fetch.c: requests ---- */

/* From the headers of the last response. */
struct hub_answer {
    int64_t range_first; /* of Content-Range; -1: none */
    char code[32];       /* X-Error-Code: "GatedRepo", "RevisionNotFound", ... */
};

/* A request for `url` with the options that all requests share; response headers go to
 * *a. NULL if memory is out. */
CURL *hub_request(const struct hub *h, const char *url, struct hub_answer *a);
/* Set the error of a request that failed, by libcurl's `result` or by its HTTP status,
 * and return its code. */
int hub_refusal(const struct hub *h, const struct hub_answer *a, CURL *easy, CURLcode result,
                const char *what, struct err *e);
/* Whether another attempt may succeed after this result. */
bool hub_may_retry(CURLcode result, long status);
/* Download files into the cache, several at once, and link them into the snapshot. */
int hub_fetch(const struct hub *h, const char *commit, const struct hub_file *const *file,
              int32_t n, struct err *e);

/* ---- hub_progress.c ---- */

struct hub_progress {
    const char *model;               /* for messages */
    int64_t total, done, first_done; /* bytes: in all, so far, and when it began */
    int64_t start_us, reported_us;   /* clock_us of the begin and of the last report */
    int32_t n_files;
    bool terminal; /* stderr is a terminal: a bar is drawn instead of log lines */
};

void hub_progress_begin(struct hub_progress *p, const char *model, int32_t n_files, int64_t total,
                        int64_t done);
/* Report, if enough time has passed since the last report. */
void hub_progress_step(struct hub_progress *p, int64_t done);
void hub_progress_end(struct hub_progress *p, bool ok);

#endif
