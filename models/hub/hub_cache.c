/* The folders of a hub cache, in the layout that other tools use:
 *
 *     <cache>/models--org--name/refs/main                 the commit of "main" when
 *                                                         it was last requested
 *                               snapshots/<commit>/<file> a link ../../blobs/<oid>
 *                               blobs/<oid>               the contents;
 *                                                         <oid>.incomplete during the
 *                                                         download
 *             .locks/models--org--name/<oid>.lock         locked (flock) during the
 *                                                         download
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pwd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "models/checkpoint/file.h"
#include "models/hub/hub_internal.h"

static const char INDEX[] = "model.safetensors.index.json";

/* ---- paths ---- */

static int path_printf(char ret[PATH_MAX], struct err *e, const char *fmt, ...) PRINTF_LIKE(3, 4);
static int path_printf(char ret[PATH_MAX], struct err *e, const char *fmt, ...)
{
    va_list args;

    va_start(args, fmt);
    int n = vsnprintf(ret, PATH_MAX, fmt, args);
    va_end(args);
    return n >= 0 && n < PATH_MAX
               ? 0
               : err_set(e, ERR_INVALID, "the path of the hub's cache is too long");
}

static const char *home_directory(void)
{
    const struct passwd *user = hub_env("HOME") ? NULL : getpwuid(getuid());

    return hub_env("HOME") ? hub_env("HOME") : user ? user->pw_dir : "/";
}

/* The path of `name` in `folder`. A leading "~/" is the home directory, as in the hub's
 * own library: a variable set by a unit or a container was not expanded by a shell. */
static int in_folder(char ret[PATH_MAX], const char *folder, const char *name, struct err *e)
{
    bool home = folder[0] == '~' && (folder[1] == '/' || folder[1] == '\0');

    return path_printf(ret, e, "%s%s%s", home ? home_directory() : "", folder + home, name);
}

int hub_cache_home(char ret[PATH_MAX], const char *name, struct err *e)
{
    char behind[PATH_MAX];
    const char *own = hub_env("HF_HOME"), *cache = hub_env("XDG_CACHE_HOME");
    int rc = path_printf(behind, e, own ? "/%s" : "/huggingface/%s", name);

    return rc < 0 ? rc : in_folder(ret, own ? own : cache ? cache : "~/.cache", behind, e);
}

int hub_cache_locate(struct hub *h, struct err *e)
{
    const char *own =
        hub_env("HF_HUB_CACHE") ? hub_env("HF_HUB_CACHE") : hub_env("HUGGINGFACE_HUB_CACHE");
    const char *slash = strchr(h->name.repo, '/');
    int rc = own ? in_folder(h->root, own, "", e) : hub_cache_home(h->root, "hub", e);

    return rc < 0 ? rc
                  : path_printf(h->repo, e, "%s/models--%.*s--%s", h->root,
                                (int)(slash - h->name.repo), h->name.repo, slash + 1);
}

int hub_cache_snapshot(const struct hub *h, const char *commit, char ret[PATH_MAX], struct err *e)
{
    return path_printf(ret, e, "%s/snapshots/%s", h->repo, commit);
}

int hub_cache_blob(const struct hub *h, const char *oid, const char *suffix, char ret[PATH_MAX],
                   struct err *e)
{
    return path_printf(ret, e, "%s/blobs/%s%s", h->repo, oid, suffix);
}

int hub_cache_lock(const struct hub *h, const char *oid, char ret[PATH_MAX], struct err *e)
{
    return path_printf(ret, e, "%s/.locks%s/%s.lock", h->root, strrchr(h->repo, '/'), oid);
}

/* ---- reading ---- */

static bool is_commit(const char *text)
{
    return strlen(text) == HUB_COMMIT_BYTES - 1 &&
           strspn(text, "0123456789abcdef") == HUB_COMMIT_BYTES - 1;
}

bool hub_cache_commit(const struct hub *h, char ret[HUB_COMMIT_BYTES])
{
    char path[PATH_MAX], text[HUB_COMMIT_BYTES + 1] = "";

    if (is_commit(h->name.revision)) {
        memcpy(ret, h->name.revision, HUB_COMMIT_BYTES);
        return true;
    }
    if (path_printf(path, NULL, "%s/refs/%s", h->repo, h->name.revision) < 0) {
        return false;
    }
    FILE *f = fopen(path, "re");
    size_t n = f ? fread(text, 1, sizeof(text) - 1, f) : 0;
    if (f) {
        fclose(f);
    }
    text[n] = '\0';
    text[strcspn(text, "\r\n")] = '\0';
    if (!is_commit(text)) {
        return false;
    }
    memcpy(ret, text, HUB_COMMIT_BYTES);
    return true;
}

bool hub_cache_has(const struct hub *h, const struct hub_file *f)
{
    char path[PATH_MAX];
    struct stat st;

    return hub_cache_blob(h, f->oid, "", path, NULL) == 0 && stat(path, &st) == 0 &&
           S_ISREG(st.st_mode) && st.st_size == f->n_bytes;
}

static int lacks(char missing[HUB_FILE_BYTES], const char *name)
{
    snprintf(missing, HUB_FILE_BYTES, "%s", name);
    return 0;
}

/* 1, or 0 and the name of the shard that is missing. */
static int shards_complete(const char *dir, char missing[HUB_FILE_BYTES], struct err *e)
{
    struct hub_shards s;
    int rc = hub_shards_read(&s, dir, e);
    bool complete = rc == 0;

    for (int32_t i = 0; complete && i < s.n; i++) {
        complete = model_file_exists(dir, s.name[i]);
        if (!complete) {
            lacks(missing, s.name[i]);
        }
    }
    hub_shards_release(&s);
    return rc < 0 ? rc : complete;
}

static int directory_complete(const struct hub *h, const char *dir, char missing[HUB_FILE_BYTES],
                              struct err *e)
{
    bool tokenizer = model_file_exists(dir, "tokenizer.json") ||
                     model_file_exists(dir, "tokenizer.model") ||
                     (model_file_exists(dir, "vocab.json") && model_file_exists(dir, "merges.txt"));

    if (!model_file_exists(dir, "config.json")) {
        return lacks(missing, "config.json");
    }
    if (h->has_tokenizer && !tokenizer) {
        return lacks(missing, "tokenizer.json");
    }
    return model_file_exists(dir, "model.safetensors") ? 1 : shards_complete(dir, missing, e);
}

/* The GGUF file of the snapshot with the lowest hub_gguf_rank; "": there is none. */
static void find_gguf(const char *dir, char ret[HUB_FILE_BYTES])
{
    int32_t best = HUB_NO_GGUF;
    struct dirent *d;
    DIR *list = opendir(dir);

    ret[0] = '\0';
    while (list && (d = readdir(list))) {
        int32_t rank = hub_gguf_rank(d->d_name);
        if (rank < best && hub_file_name_ok(d->d_name) && model_file_exists(dir, d->d_name)) {
            best = rank;
            snprintf(ret, HUB_FILE_BYTES, "%.*s", HUB_FILE_BYTES - 1, d->d_name);
        }
    }
    if (list) {
        closedir(list);
    }
}

/* The path of a GGUF file, if it is one that model_file_open accepts: it is mapped by
 * its path later. */
static int gguf_complete(const char *dir, const char *name, char ret[PATH_MAX], struct err *e)
{
    int64_t n_bytes;
    int rc = path_printf(ret, e, "%s/%s", dir, name);

    if (rc < 0) {
        return rc;
    }
    char *slash = strrchr(ret, '/');
    *slash = '\0';
    int fd = model_file_open(ret, slash + 1, &n_bytes, e);
    *slash = '/';
    if (fd < 0) {
        return fd;
    }
    close(fd);
    return 1;
}

/* The same with the other files of its model. */
static int model_complete(const char *dir, const char *name, char ret[PATH_MAX],
                          char missing[HUB_FILE_BYTES], struct err *e)
{
    char part[HUB_FILE_BYTES];
    int rc = 1;

    for (int32_t i = MAX(model_file_parts(name), 1); i > 0 && rc > 0; i--) {
        snprintf(part, sizeof(part), "%s", name);
        if (model_file_parts(name) > 0) {
            model_file_part(part, part, i);
        }
        rc = model_file_exists(dir, part) ? gguf_complete(dir, part, ret, e) : lacks(missing, part);
    }
    return rc; /* of the first file at last */
}

int hub_cache_complete(const struct hub *h, const char *dir, char ret[PATH_MAX],
                       char missing[HUB_FILE_BYTES], struct err *e)
{
    char gguf[HUB_FILE_BYTES];

    missing[0] = '\0';
    if (h->name.file[0]) {
        return model_complete(dir, h->name.file, ret, missing, e);
    }
    if (model_file_exists(dir, "model.safetensors") || model_file_exists(dir, INDEX)) {
        int rc = path_printf(ret, e, "%s", dir);
        return rc < 0 ? rc : directory_complete(h, dir, missing, e);
    }
    find_gguf(dir, gguf);
    return *gguf ? model_complete(dir, gguf, ret, missing, e) : lacks(missing, "model.safetensors");
}

/* ---- writing ---- */

static int cannot(const char *what, const char *path, struct err *e)
{
    return err_set(e, ERR_IO, "cannot %s %.250s: %s; HF_HOME says where the hub's cache is", what,
                   path, strerror(errno));
}

/* Make the folder and its parents. */
static int make_folder(const char *path, struct err *e)
{
    char part[PATH_MAX];
    struct stat st;
    int rc = path_printf(part, e, "%s", path);

    for (char *p = part + 1; rc == 0 && *p; p++) {
        if (*p != '/') {
            continue;
        }
        *p = '\0';
        if (mkdir(part, 0777) != 0 && errno != EEXIST && stat(part, &st) != 0) {
            rc = cannot("make", part, e);
        }
        *p = '/';
    }
    if (rc == 0 && mkdir(part, 0777) != 0 &&
        (errno != EEXIST || stat(part, &st) != 0 || !S_ISDIR(st.st_mode))) {
        rc = cannot("make", part, e);
    }
    return rc;
}

/* Make the folder that `path` is in. */
static int make_parent(const char *path, struct err *e)
{
    char folder[PATH_MAX];
    int rc = path_printf(folder, e, "%.*s", (int)(strrchr(path, '/') - path), path);

    return rc < 0 ? rc : make_folder(folder, e);
}

static int make_in(const char *folder, const char *name, struct err *e)
{
    char path[PATH_MAX];
    int rc = path_printf(path, e, "%s/%s", folder, name);

    return rc < 0 ? rc : make_folder(path, e);
}

int hub_cache_prepare(const struct hub *h, const char *commit, struct err *e)
{
    char path[PATH_MAX];
    int rc = hub_cache_snapshot(h, commit, path, e);

    if (rc == 0) {
        rc = make_folder(path, e);
    }
    if (rc == 0) {
        rc = make_in(h->repo, "blobs", e);
    }
    if (rc == 0) {
        rc = path_printf(path, e, ".locks%s", strrchr(h->repo, '/'));
    }
    return rc < 0 ? rc : make_in(h->root, path, e);
}

void hub_cache_tidy(const struct hub *h, const char *commit)
{
    static const char *const FOLDERS[] = {"snapshots", "blobs", "refs"};
    char path[PATH_MAX];

    if (hub_cache_snapshot(h, commit, path, NULL) == 0) {
        rmdir(path);
    }
    for (size_t i = 0; i < ARRAY_LEN(FOLDERS); i++) {
        if (path_printf(path, NULL, "%s/%s", h->repo, FOLDERS[i]) == 0) {
            rmdir(path);
        }
    }
    rmdir(h->repo);
}

/* A name beside `path` that no other process uses. */
static int beside(char ret[PATH_MAX], const char *path, struct err *e)
{
    return path_printf(ret, e, "%s.%ld.new", path, (long)getpid());
}

int hub_cache_link(const struct hub *h, const char *commit, const struct hub_file *f, struct err *e)
{
    char path[PATH_MAX], fresh[PATH_MAX], target[PATH_MAX], there[PATH_MAX];
    char up[3 * HUB_FILE_BYTES + 1] = "";
    int rc = path_printf(path, e, "%s/snapshots/%s/%s", h->repo, commit, f->name);

    for (const char *p = strchr(f->name, '/'); p; p = strchr(p + 1, '/')) {
        strcat(up, "../");
    }
    if (rc == 0 && *up) {
        rc = make_parent(path, e);
    }
    if (rc == 0) {
        rc = beside(fresh, path, e);
    }
    if (rc == 0) {
        rc = path_printf(target, e, "%s../../blobs/%s", up, f->oid);
    }
    if (rc < 0) {
        return rc;
    }
    ssize_t n = readlink(path, there, sizeof(there) - 1);
    if (n >= 0 && (size_t)n == strlen(target) && memcmp(there, target, (size_t)n) == 0) {
        return 0;
    }
    unlink(fresh);
    if (symlink(target, fresh) != 0 || rename(fresh, path) != 0) {
        rc = cannot("link", path, e);
        unlink(fresh);
    }
    return rc;
}

int hub_cache_set_ref(const struct hub *h, const char *commit, struct err *e)
{
    char path[PATH_MAX], fresh[PATH_MAX];

    if (strcmp(h->name.revision, commit) == 0) {
        return 0;
    }
    int rc = path_printf(path, e, "%s/refs/%s", h->repo, h->name.revision);
    if (rc == 0) {
        rc = make_parent(path, e);
    }
    if (rc == 0) {
        rc = beside(fresh, path, e);
    }
    if (rc < 0) {
        return rc;
    }
    FILE *f = fopen(fresh, "we");
    bool ok = f && fputs(commit, f) >= 0;
    if (f) {
        ok &= fclose(f) == 0;
    }
    if (!ok || rename(fresh, path) != 0) {
        rc = cannot("write", path, e);
        unlink(fresh);
    }
    return rc;
}
