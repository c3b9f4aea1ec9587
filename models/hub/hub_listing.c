/* The files of a model's revision: the hub's answer, and the choice among GGUF files.
 *
 * Of several GGUF files Q8_0 is preferred, which is nearly exact at half the size, then
 * the exact ones, then fewer and fewer bits.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>

#include "config/base/json.h"
#include "models/checkpoint/file.h"
#include "models/hub/hub_internal.h"

static const char LISTING[] = "the hub's list of files", INDEX[] = "model.safetensors.index.json";
enum { LISTING_MAX_FILES = 1 << 14, ATTEMPTS = 3 };
#define LISTING_BYTES ((size_t)32 << 20)

const char *const hub_small_files[] = {
    "config.json",         "generation_config.json", "hf_quant_config.json",
    "tokenizer.json",      "tokenizer.model",        "vocab.json",
    "merges.txt",          "tokenizer_config.json",  "special_tokens_map.json",
    "chat_template.jinja", "chat_template.json",     NULL};

void hub_listing_release(struct hub_listing *l)
{
    free(l->file);
    *l = (struct hub_listing){0};
}

const struct hub_file *hub_listing_find(const struct hub_listing *l, const char *name)
{
    for (int32_t i = 0; i < l->n_files; i++) {
        if (strcmp(l->file[i].name, name) == 0) {
            return &l->file[i];
        }
    }
    return NULL;
}

bool hub_listing_tokenizer(const struct hub_listing *l)
{
    return hub_listing_find(l, "tokenizer.json") || hub_listing_find(l, "tokenizer.model") ||
           (hub_listing_find(l, "vocab.json") && hub_listing_find(l, "merges.txt"));
}

static bool ends_with(const char *text, const char *end)
{
    size_t n = strlen(text), m = strlen(end);

    return n > m && strcasecmp(text + n - m, end) == 0;
}

int32_t hub_gguf_rank(const char *name)
{
    static const char *const BEST_FIRST[] = {"q8_0",   "bf16",   "f16",  "f32",  "q6_k",
                                             "q5_k_m", "q5_k_s", "q5_1", "q5_0", "q4_k_m",
                                             "q4_k_s", "q4_1",   "q4_0"};

    bool several = model_file_parts(name) > 0;

    if (!ends_with(name, ".gguf") || strcasestr(name, "mmproj") || strcasestr(name, "imatrix") ||
        strchr(name, '/') || (strcasestr(name, "-of-0") && !several)) {
        return HUB_NO_GGUF;
    }
    size_t i = 0;
    while (i < ARRAY_LEN(BEST_FIRST) && !strcasestr(name, BEST_FIRST[i])) {
        i++;
    }
    return 2 * (int32_t)i + several; /* one file before several */
}

const struct hub_file *hub_listing_gguf(const struct hub_listing *l)
{
    const struct hub_file *best = NULL;
    int32_t best_rank = HUB_NO_GGUF, n_alike = 0;

    for (int32_t i = 0; i < l->n_files; i++) {
        int32_t rank = hub_gguf_rank(l->file[i].name);
        n_alike = rank < best_rank ? 1 : n_alike + (rank == best_rank);
        if (rank < best_rank) {
            best_rank = rank;
            best = &l->file[i];
        }
    }
    return n_alike == 1 ? best : NULL;
}

/* ---- the answer ---- */

static bool is_hex(const char *text, size_t n)
{
    return strlen(text) == n && strspn(text, "0123456789abcdef") == n;
}

/* Whether a model may need the file. */
static bool is_of_use(const char *name)
{
    for (const char *const *small = hub_small_files; *small; small++) {
        if (strcmp(name, *small) == 0) {
            return true;
        }
    }
    return hub_gguf_name_ok(name) || (hub_file_name_ok(name) && (ends_with(name, ".safetensors") ||
                                                                 strcmp(name, INDEX) == 0));
}

/* "lfs": {"sha256": .., "size": ..} */
static void read_lfs(struct json *j, struct hub_file *f)
{
    if (json_peek(j) == JSON_NULL) {
        json_skip(j);
        return;
    }
    f->lfs = true;
    json_enter_object(j);
    while (json_next_member(j)) {
        if (json_key_is(j, "sha256")) {
            json_read_string(j, f->oid, sizeof(f->oid), NULL);
        } else if (json_key_is(j, "size")) {
            json_read_int(j, &f->n_bytes);
        } else {
            json_skip(j);
        }
    }
}

static int add(struct hub_listing *l, const struct hub_file *f, struct err *e)
{
    if (l->n_files == LISTING_MAX_FILES) {
        return err_set(e, ERR_INVALID, "%s has more than %d files that could be a model's", LISTING,
                       LISTING_MAX_FILES);
    }
    if (l->n_files == l->cap) {
        int32_t cap = l->cap ? 2 * l->cap : 32;
        struct hub_file *file = realloc(l->file, (size_t)cap * sizeof(*file));
        if (!file) {
            return err_nomem(e, LISTING);
        }
        l->file = file;
        l->cap = cap;
    }
    l->file[l->n_files++] = *f;
    return 0;
}

/* One of "siblings": {"rfilename": .., "size": .., "blobId": .., "lfs": ..}. Files that
 * no model needs are skipped, and with them all names that are not plain. */
static int read_file(struct json *j, struct hub_listing *l, struct err *e)
{
    struct hub_file f = {.n_bytes = -1};
    char name[1024] = "", blob[HUB_OID_BYTES] = "";
    int64_t n_bytes = -1;

    json_enter_object(j);
    while (json_next_member(j)) {
        if (json_key_is(j, "rfilename")) {
            json_read_string(j, name, sizeof(name), NULL);
        } else if (json_key_is(j, "size") && json_peek(j) == JSON_NUMBER) {
            json_read_int(j, &n_bytes);
        } else if (json_key_is(j, "blobId") && json_peek(j) == JSON_STRING) {
            json_read_string(j, blob, sizeof(blob), NULL);
        } else if (json_key_is(j, "lfs")) {
            read_lfs(j, &f);
        } else {
            json_skip(j);
        }
    }
    if (j->failed || !is_of_use(name)) {
        return j->failed ? ERR_INVALID : 0;
    }
    memcpy(f.name, name, strlen(name) + 1);
    if (!f.lfs) {
        memcpy(f.oid, blob, sizeof(blob));
        f.n_bytes = n_bytes;
    }
    if (!is_hex(f.oid, f.lfs ? 64 : 40) || f.n_bytes < 0 || f.n_bytes > (int64_t)1 << 50) {
        return err_set(e, ERR_INVALID, "%s gives no checksum and size of %s", LISTING, f.name);
    }
    return hub_listing_find(l, f.name) ? err_set(e, ERR_INVALID, "%s has %s twice", LISTING, f.name)
                                       : add(l, &f, e);
}

int hub_listing_parse(struct hub_listing *l, const char *text, size_t len, struct err *e)
{
    struct json j;
    int rc = 0;
    char commit[HUB_COMMIT_BYTES] = "";

    json_init(&j, text, len, LISTING, e);
    json_enter_object(&j);
    while (rc == 0 && json_next_member(&j)) {
        if (json_key_is(&j, "sha")) {
            json_read_string(&j, commit, sizeof(commit), NULL);
        } else if (json_key_is(&j, "siblings") && json_enter_array(&j)) {
            while (rc == 0 && json_next_element(&j)) {
                rc = read_file(&j, l, e);
            }
        } else {
            json_skip(&j);
        }
    }
    if (rc == 0 && !json_finish(&j)) {
        rc = ERR_INVALID;
    }
    if (rc == 0 && !is_hex(commit, 40)) {
        rc = err_set(e, ERR_INVALID, "%s names no commit", LISTING);
    }
    memcpy(l->commit, commit, sizeof(commit));
    return rc;
}

/* ---- asking ---- */

static size_t take(char *data, size_t size, size_t n, void *arg)
{
    return buf_append(arg, data, size * n) == 0 ? size * n : 0;
}

/* <endpoint>/api/models/<repo>/revision/<revision>; a slash in the revision is
 * escaped. */
static int make_url(struct buf *url, const struct hub *h, struct err *e)
{
    buf_printf(url, "%s/api/models/%s/revision/", h->endpoint, h->name.repo);
    for (const char *p = h->name.revision; *p; p++) {
        if (*p == '/') {
            buf_puts(url, "%2F");
        } else {
            buf_putc(url, *p);
        }
    }
    return buf_puts(url, "?blobs=true") == 0 ? 0 : err_nomem(e, LISTING);
}

static int ask(struct buf *answer, const struct hub *h, const char *url, struct err *e)
{
    CURLcode result = CURLE_OK;
    long status = 0;
    struct hub_answer head;
    CURL *easy = hub_request(h, url, &head);

    if (!easy) {
        return err_nomem(e, LISTING);
    }
    curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, take);
    curl_easy_setopt(easy, CURLOPT_WRITEDATA, answer);
    curl_easy_setopt(easy, CURLOPT_ACCEPT_ENCODING, "");
    curl_easy_setopt(easy, CURLOPT_TIMEOUT, 60L);
    for (int i = 0; i < ATTEMPTS; i++) {
        buf_clear(answer);
        if (i > 0) {
            nanosleep(&(struct timespec){.tv_nsec = 200000000L * i}, NULL);
        }
        result = curl_easy_perform(easy);
        curl_easy_getinfo(easy, CURLINFO_RESPONSE_CODE, &status);
        if (!hub_may_retry(result, status) || answer->failed) {
            break;
        }
    }
    int rc = 0;
    if (answer->failed) {
        rc = err_set(e, ERR_INVALID, "%s is larger than %zu bytes", LISTING, LISTING_BYTES);
    } else if (result != CURLE_OK || status != 200) {
        rc = hub_refusal(h, &head, easy, result, LISTING, e);
    }
    curl_easy_cleanup(easy);
    return rc;
}

int hub_listing_get(struct hub_listing *l, const struct hub *h, struct err *e)
{
    struct buf url, answer;

    buf_init(&url, 4096);
    buf_init(&answer, LISTING_BYTES);
    int rc = make_url(&url, h, e);
    if (rc == 0) {
        rc = ask(&answer, h, url.data, e);
    }
    if (rc == 0) {
        rc = hub_listing_parse(l, answer.data ? answer.data : "", answer.len, e);
    }
    buf_release(&url);
    buf_release(&answer);
    return rc;
}

/* ---- shards ---- */

void hub_shards_release(struct hub_shards *s)
{
    free(s->name);
    *s = (struct hub_shards){0};
}

/* Add a shard, unless the list has it. */
static bool add_shard(struct hub_shards *s, struct json *j, const char *name)
{
    for (int32_t i = s->n - 1; i >= 0; i--) {
        if (strcmp(s->name[i], name) == 0) {
            return true;
        }
    }
    if (!hub_file_name_ok(name)) {
        return json_fail(j, "'%.100s' is not the name of a shard", name);
    }
    if (s->n == LIMIT_SHARDS) {
        return json_fail(j, "more than %d shards", LIMIT_SHARDS);
    }
    memcpy(s->name[s->n++], name, strlen(name) + 1);
    return true;
}

int hub_shards_read(struct hub_shards *ret, const char *dir, struct err *e)
{
    char *text, name[HUB_FILE_BYTES];
    size_t len;
    struct json j;

    *ret = (struct hub_shards){.name = malloc((size_t)LIMIT_SHARDS * HUB_FILE_BYTES)};
    int rc = ret->name ? 0 : err_nomem(e, INDEX);
    if (rc == 0) {
        rc = model_file_read(dir, INDEX, LIMIT_SAFETENSORS_HEADER_BYTES, &text, &len, e);
    }
    if (rc < 0) {
        return rc;
    }
    json_init(&j, text, len, INDEX, e);
    json_enter_object(&j);
    while (json_next_member(&j)) {
        if (!json_key_is(&j, "weight_map")) {
            json_skip(&j);
            continue;
        }
        json_enter_object(&j);
        while (json_next_member(&j) && json_read_string(&j, name, sizeof(name), NULL) &&
               add_shard(ret, &j, name))
            ;
    }
    rc = json_finish(&j) ? 0 : ERR_INVALID;
    free(text);
    return rc;
}
