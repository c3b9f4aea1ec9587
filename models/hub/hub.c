/* From a hub name to a path: the cache first, then the hub (see hub.h).
 *
 *     parse the name ─► cache: refs/<revision> ─► snapshot complete? ─► its directory
 *                                                    │ no
 *                                                    ▼
 *     list the revision's files ─► small files, index ─► weights ─► refs/<revision>
 *
 * The network is not trusted: names of files are matched against a list or a narrow
 * alphabet before they become paths, and every byte is counted and hashed before a file
 * gets its name. refs/<revision> is written last, so an interrupted download is not
 * taken for a complete one.
 */
#include "models/hub/hub.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "models/checkpoint/file.h"
#include "models/hub/hub_internal.h"

static const char DEFAULT_ENDPOINT[] = "https://huggingface.co",
                  INDEX[] = "model.safetensors.index.json";

/* ---- names ---- */

bool hub_file_name_ok(const char *name)
{
    size_t n = strspn(name, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-+");

    return n > 0 && n < HUB_FILE_BYTES && name[n] == '\0' && name[0] != '.';
}

bool hub_gguf_name_ok(const char *name)
{
    size_t len = strlen(name);
    const char *end = name;
    char part[HUB_FILE_BYTES];

    if (len < 6 || len >= HUB_FILE_BYTES || strcasecmp(name + len - 5, ".gguf") != 0) {
        return false;
    }
    for (const char *at = name; at; at = *end ? end + 1 : NULL) {
        end = strchrnul(at, '/');
        snprintf(part, sizeof(part), "%.*s", (int)(end - at), at);
        if (!hub_file_name_ok(part)) {
            return false;
        }
    }
    return true;
}

/* Whether the hub allows this as the name of an organisation or a model. */
static bool part_ok(const char *text, size_t len)
{
    if (len == 0 || len > 96 || text[0] == '.' || text[0] == '-' || text[len - 1] == '.' ||
        text[len - 1] == '-') {
        return false;
    }
    for (size_t i = 0; i < len; i++) {
        bool twice = i > 0 && (text[i] == '.' || text[i] == '-') && text[i] == text[i - 1];
        if ((!isalnum((unsigned char)text[i]) && !strchr("._-", text[i])) || text[i] == '\0' ||
            twice) {
            return false;
        }
    }
    return true;
}

static bool revision_ok(const char *text)
{
    size_t n = strspn(text, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-/");

    return n > 0 && n < HUB_REVISION_BYTES && text[n] == '\0' && text[0] != '/' &&
           text[n - 1] != '/' && text[0] != '.' && !strstr(text, "..") && !strstr(text, "//") &&
           !strstr(text, "/.");
}

int hub_name_parse(struct hub_name *ret, const char *text, struct err *e)
{
    static const char FORM[] =
        "a name on the hub is org/name, org/name@revision or org/name/[folder/]file.gguf";
    struct hub_name n = {.revision = "main"};
    const char *at = strchr(text, '@'), *end = at ? at : text + strlen(text);
    const char *slash = memchr(text, '/', (size_t)(end - text));
    const char *file = slash ? memchr(slash + 1, '/', (size_t)(end - slash - 1)) : NULL;
    const char *repo_end = file ? file : end;

    if (!slash || !part_ok(text, (size_t)(slash - text)) ||
        !part_ok(slash + 1, (size_t)(repo_end - slash - 1))) {
        return err_set_param(e, ERR_INVALID, "model", "\"%.200s\": %s", text, FORM);
    }
    memcpy(n.repo, text, (size_t)(repo_end - text));
    if (at && !revision_ok(at + 1)) {
        return err_set_param(e, ERR_INVALID, "model",
                             "\"%.200s\": what follows @ is no branch, tag or commit", text);
    }
    if (at) {
        memcpy(n.revision, at + 1, strlen(at + 1) + 1);
    }
    size_t len = file ? (size_t)(end - file - 1) : 0;
    if (file && len < sizeof(n.file)) {
        memcpy(n.file, file + 1, len);
    }
    if (file && !hub_gguf_name_ok(n.file)) {
        return err_set_param(e, ERR_INVALID, "model", "\"%.200s\": %s", text, FORM);
    }
    *ret = n;
    return 0;
}

bool hub_is_name(const char *model)
{
    struct hub_name n;

    return hub_name_parse(&n, model, NULL) == 0;
}

char *hub_name_of_path(const char *path)
{
    static const char PREFIX[] = "/models--";
    const char *at = strstr(path, PREFIX), *end = at ? strstr(at + 1, "/snapshots/") : NULL;

    if (!end || memchr(at + 1, '/', (size_t)(end - at - 1))) {
        return NULL;
    }
    at += sizeof(PREFIX) - 1;
    char *name = strndup(at, (size_t)(end - at)), *dashes = name ? strstr(name, "--") : NULL;
    if (dashes) {
        *dashes = '/';
        memmove(dashes + 1, dashes + 2, strlen(dashes + 2) + 1);
    }
    return name;
}

/* ---- environment ---- */

const char *hub_env(const char *name)
{
    const char *value = getenv(name);

    return value && *value ? value : NULL;
}

static bool env_true(const char *name)
{
    static const char *const YES[] = {"1", "ON", "YES", "TRUE"};
    const char *value = hub_env(name);

    for (size_t i = 0; value && i < ARRAY_LEN(YES); i++) {
        if (strcasecmp(value, YES[i]) == 0) {
            return true;
        }
    }
    return false;
}

static int set_endpoint(struct hub *h, struct err *e)
{
    const char *value = hub_env("HF_ENDPOINT");
    size_t len = strlen(value ? value : DEFAULT_ENDPOINT);

    if (value && strncmp(value, "https://", 8) != 0 && strncmp(value, "http://", 7) != 0) {
        return err_set(e, ERR_INVALID,
                       "HF_ENDPOINT is \"%.100s\"; it begins with https:// or http://", value);
    }
    if (len >= sizeof(h->endpoint) || (value && strpbrk(value, " \t\r\n?#"))) {
        return err_set(e, ERR_INVALID, "HF_ENDPOINT is not an address, or longer than %zu bytes",
                       sizeof(h->endpoint) - 1);
    }
    memcpy(h->endpoint, value ? value : DEFAULT_ENDPOINT, len + 1);
    while (len > 0 && h->endpoint[len - 1] == '/') {
        h->endpoint[--len] = '\0';
    }
    return 0;
}

/* Set the token to `text` without surrounding white space. No message contains it. */
static int set_token(struct hub *h, const char *text, size_t len, const char *from, struct err *e)
{
    while (len > 0 && isspace((unsigned char)text[len - 1])) {
        len--;
    }
    while (len > 0 && isspace((unsigned char)*text)) {
        text++, len--;
    }
    bool ok = len < sizeof(h->token);
    for (size_t i = 0; i < len; i++) {
        ok &= isgraph((unsigned char)text[i]) != 0;
    }
    if (!ok) {
        return err_set(e, ERR_INVALID, "%s does not hold a token: one word of at most %zu bytes",
                       from, sizeof(h->token) - 1);
    }
    memcpy(h->token, text, len);
    h->token[len] = '\0';
    return 0;
}

/* HF_TOKEN, or the file that `hf auth login` writes. */
static int find_token(struct hub *h, struct err *e)
{
    const char *value = hub_env("HF_TOKEN"), *path = hub_env("HF_TOKEN_PATH");
    char own[PATH_MAX], text[2 * sizeof(h->token)];

    if (!value) {
        value = hub_env("HUGGING_FACE_HUB_TOKEN");
    }
    if (value) {
        return set_token(h, value, strlen(value), "HF_TOKEN", e);
    }
    if (!path && hub_cache_home(own, "token", e) < 0) {
        return e ? e->code : ERR_INVALID;
    }
    FILE *f = fopen(path ? path : own, "re");
    size_t n = f ? fread(text, 1, sizeof(text), f) : 0;
    if (f) {
        fclose(f);
    }
    return set_token(h, text, n, path ? "HF_TOKEN_PATH" : "the token file", e);
}

static int hub_init(struct hub *h, const char *model, struct err *e)
{
    memset(h, 0, sizeof(*h));
    int rc = hub_name_parse(&h->name, model, e);
    if (rc == 0) {
        rc = set_endpoint(h, e);
    }
    if (rc == 0) {
        rc = hub_cache_locate(h, e);
    }
    if (rc == 0) {
        rc = find_token(h, e);
    }
    h->offline = env_true("HF_HUB_OFFLINE") || env_true("TRANSFORMERS_OFFLINE");
    return rc;
}

/* ---- what is needed ---- */

/* Files to fetch: all shards, and the others that a directory may have. */
struct wanted {
    const struct hub_file *file[LIMIT_SHARDS + 16]; /* [n] */
    int32_t n;
};

static void want(struct wanted *w, const struct hub_file *f)
{
    if (f) {
        w->file[w->n++] = f;
    }
}

/* Add all files but the weights and their index. */
static void want_small(struct wanted *w, const struct hub_listing *l)
{
    for (const char *const *name = hub_small_files; *name; name++) {
        want(w, hub_listing_find(l, *name));
    }
    if (!hub_listing_find(l, "tokenizer.json")) {
        return;
    }
    /* The other forms of a tokenizer are only read if tokenizer.json is missing. */
    int32_t n = 0;
    for (int32_t i = 0; i < w->n; i++) {
        const char *name = w->file[i]->name;
        if (strcmp(name, "tokenizer.model") != 0 && strcmp(name, "vocab.json") != 0 &&
            strcmp(name, "merges.txt") != 0) {
            w->file[n++] = w->file[i];
        }
    }
    w->n = n;
}

static int want_shards(struct wanted *w, const struct hub_listing *l, const char *dir,
                       struct err *e)
{
    struct hub_shards s;
    int rc = hub_shards_read(&s, dir, e);

    for (int32_t i = 0; rc == 0 && i < s.n; i++) {
        const struct hub_file *f = hub_listing_find(l, s.name[i]);
        if (!f) {
            rc = err_set(e, ERR_NOT_FOUND, "%s names the shard %.128s, which the hub does not have",
                         INDEX, s.name[i]);
        }
        want(w, f);
    }
    hub_shards_release(&s);
    return rc;
}

static int no_weights(const struct hub *h, const struct hub_listing *l, struct err *e)
{
    for (int32_t i = 0; i < l->n_files; i++) {
        const char *name = l->file[i].name, *folder = strrchr(name, '/');
        if (hub_gguf_rank(folder ? folder + 1 : name) != HUB_NO_GGUF) {
            return err_set(e, ERR_INVALID, "has %s: name one, as in %s/%s",
                           folder ? "GGUF files in folders"
                                  : "several GGUF files and none is preferred",
                           h->name.repo, name);
        }
    }
    return err_set(e, ERR_NOT_FOUND,
                   "has neither model.safetensors, nor %s, nor a GGUF file at revision %s "
                   "(pytorch_model.bin is not read; "
                   "many models have their conversion at a revision refs/pr/N)",
                   INDEX, h->name.revision);
}

/* ---- downloading ---- */

static int fetch_gguf(const struct hub *h, const struct hub_listing *l, const struct hub_file *f,
                      struct err *e)
{
    if (!f) {
        return err_set(e, ERR_NOT_FOUND, "has no file %s at revision %s", h->name.file,
                       h->name.revision);
    }
    int32_t n = MAX(model_file_parts(f->name), 1);
    struct wanted *w = calloc(1, sizeof(*w));
    int rc = w ? 0 : err_nomem(e, "list of files");
    for (int32_t i = 1; i <= n && rc == 0; i++) {
        char name[HUB_FILE_BYTES];
        snprintf(name, sizeof(name), "%s", f->name);
        if (n > 1) {
            model_file_part(name, name, i);
        }
        want(w, hub_listing_find(l, name));
        if (w->n < i) {
            rc = err_set(e, ERR_NOT_FOUND, "has no file %s at revision %s", name, h->name.revision);
        }
    }
    rc = rc < 0 ? rc : hub_fetch(h, l->commit, w->file, w->n, e);
    free(w);
    return rc;
}

/* Fetch small files first: a model that cannot be served is refused before its weights
 * are downloaded. */
static int fetch_directory(const struct hub *h, const struct hub_listing *l, const char *dir,
                           struct err *e)
{
    if (!hub_listing_find(l, "config.json")) {
        return err_set(e, ERR_NOT_FOUND, "has no config.json at revision %s", h->name.revision);
    }
    if (h->has_tokenizer && !hub_listing_tokenizer(l)) {
        return err_set(e, ERR_NOT_FOUND,
                       "has no tokenizer at revision %s: neither tokenizer.json, nor "
                       "tokenizer.model, nor vocab.json and merges.txt (tiktoken.model and "
                       "tekken.json are not read)",
                       h->name.revision);
    }
    struct wanted *w = calloc(1, sizeof(*w));
    if (!w) {
        return err_nomem(e, "list of files");
    }
    const struct hub_file *single = hub_listing_find(l, "model.safetensors"),
                          *index = hub_listing_find(l, INDEX);
    want_small(w, l);
    want(w, single ? NULL : index);
    int rc = hub_fetch(h, l->commit, w->file, w->n, e);
    w->n = 0;
    want(w, single);
    if (rc == 0 && !single) {
        rc = want_shards(w, l, dir, e);
    }
    if (rc == 0) {
        rc = hub_fetch(h, l->commit, w->file, w->n, e);
    }
    free(w);
    return rc;
}

static int fetch(const struct hub *h, const struct hub_listing *l, const char *dir, struct err *e)
{
    bool weights = hub_listing_find(l, "model.safetensors") || hub_listing_find(l, INDEX);

    if (h->name.file[0]) {
        return fetch_gguf(h, l, hub_listing_find(l, h->name.file), e);
    }
    if (weights) {
        return fetch_directory(h, l, dir, e);
    }
    const struct hub_file *gguf = hub_listing_gguf(l);
    return gguf ? fetch_gguf(h, l, gguf, e) : no_weights(h, l, e);
}

static int download(const struct hub *h, char dir[PATH_MAX], struct err *e)
{
    struct hub_listing l = {0};
    int rc = curl_global_init(CURL_GLOBAL_DEFAULT) == CURLE_OK ? 0 : err_nomem(e, "curl");

    if (rc < 0) {
        return rc;
    }
    rc = hub_listing_get(&l, h, e);
    if (rc == 0) {
        rc = hub_cache_snapshot(h, l.commit, dir, e);
    }
    if (rc == 0) {
        rc = hub_cache_prepare(h, l.commit, e);
    }
    if (rc == 0) {
        rc = fetch(h, &l, dir, e);
        if (rc == 0) {
            rc = hub_cache_set_ref(h, l.commit, e);
        }
        if (rc < 0) {
            hub_cache_tidy(h, l.commit);
        }
    }
    hub_listing_release(&l);
    curl_global_cleanup();
    return rc;
}

static int find(struct hub *h, char found[PATH_MAX], struct err *e)
{
    char dir[PATH_MAX], commit[HUB_COMMIT_BYTES], missing[HUB_FILE_BYTES] = "";
    int complete = 0;

    if (hub_cache_commit(h, commit)) {
        complete = hub_cache_snapshot(h, commit, dir, e);
        if (complete == 0) {
            complete = hub_cache_complete(h, dir, found, missing, e);
        }
    }
    if (complete != 0) {
        return MIN(complete, 0);
    }
    if (h->offline && !*missing) {
        return err_set(e, ERR_NOT_FOUND,
                       "not in the cache %.200s at revision %s, and HF_HUB_OFFLINE is set", h->root,
                       h->name.revision);
    }
    if (h->offline) {
        return err_set(e, ERR_NOT_FOUND, "the cache %.200s lacks its %s, and HF_HUB_OFFLINE is set",
                       h->root, missing);
    }
    int rc = download(h, dir, e);
    if (rc == 0) {
        rc = hub_cache_complete(h, dir, found, missing, e);
    }
    if (rc != 0) {
        return MIN(rc, 0);
    }
    return err_set(e, ERR_NOT_FOUND, "has no %s at revision %s", missing, h->name.revision);
}

int hub_find(char **ret, const char *model, bool has_tokenizer, struct err *e)
{
    char found[PATH_MAX];
    struct hub *h = malloc(sizeof(*h));

    if (!h) {
        return err_nomem(e, "the hub");
    }
    int rc = hub_init(h, model, e);
    h->has_tokenizer = has_tokenizer;
    if (rc == 0) {
        rc = find(h, found, e);
        if (rc < 0) {
            err_prefix(e, "model \"%s\" on the hub (no directory of that name is here)",
                       h->name.repo);
        }
    }
    explicit_bzero(h->token, sizeof(h->token));
    free(h);
    if (rc < 0) {
        return rc;
    }
    *ret = strdup(found);
    return *ret ? 0 : err_nomem(e, "the model's path");
}
