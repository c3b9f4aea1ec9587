#include "engine/model_path.h"

#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "models/checkpoint/file.h"
#include "models/hub/hub.h"

static bool has_config(const char *dir)
{
    char path[PATH_MAX + 16];

    snprintf(path, sizeof(path), "%s/config.json", dir);
    return access(path, R_OK) == 0;
}

static int copy_path(char **ret, const char *dir, struct err *e)
{
    char *copy = strdup(dir);

    if (!copy) {
        return err_nomem(e, "the model's path");
    }
    *ret = copy;
    return 0;
}

static int find_bundled(char **ret, struct err *e)
{
    char dir[PATH_MAX], exe[PATH_MAX / 2] = "";
    const char *share = getenv("QUIRE_SHARE");

    if (share && *share && snprintf(dir, sizeof(dir), "%s/models/demo", share) < (int)sizeof(dir) &&
        has_config(dir)) {
        return copy_path(ret, dir, e);
    }
    ssize_t n = readlink("/proc/self/exe", exe, sizeof(exe) - 1);
    exe[MAX(n, 0)] = '\0';
    char *slash = strrchr(exe, '/');
    if (slash) {
        *slash = '\0';
    }
    static const char *const beside[] = {"../share/quire/models/demo", "../models/demo"};
    for (size_t i = 0; slash && i < ARRAY_LEN(beside); i++) {
        snprintf(dir, sizeof(dir), "%s/%s", exe, beside[i]);
        char *real = has_config(dir) ? realpath(dir, NULL) : NULL;
        if (real) {
            *ret = real;
            return 0;
        }
    }
    return err_set_param(
        e, ERR_NOT_FOUND, "model",
        "the bundled model is not installed; give --model DIR, or set QUIRE_SHARE");
}

/* Finds the only GGUF file, or the first one of the only model in several, of a
 * directory that has no config.json. 1: found; 0: the
 * directory has a config.json (or cannot be listed); else an error. */
static int find_gguf(char **ret, const char *dir, struct err *e)
{
    struct dirent *d;
    int n = 0;
    char name[NAME_MAX + 1] = "", path[PATH_MAX];
    DIR *list = has_config(dir) ? NULL : opendir(dir);

    if (!list) {
        return 0;
    }
    while ((d = readdir(list))) {
        size_t len = strlen(d->d_name);
        bool later = strstr(d->d_name, "-of-0") && model_file_parts(d->d_name) == 0;
        if (len > 5 && strcmp(d->d_name + len - 5, ".gguf") == 0 && !later && n++ == 0) {
            memcpy(name, d->d_name, len + 1);
        }
    }
    closedir(list);
    if (n != 1) {
        return err_set_param(e, ERR_NOT_FOUND, "model",
                             "\"%.200s\": no config.json there that can be read, and %s", dir,
                             n ? "several GGUF files: name one" : "no GGUF file");
    }
    if (snprintf(path, sizeof(path), "%s/%s", dir, name) >= (int)sizeof(path)) {
        return err_set_param(e, ERR_INVALID, "model", "\"%.200s\": the path is too long", dir);
    }
    return copy_path(ret, path, e) < 0 ? ERR_NOMEM : 1;
}

/* The real path of a file's folder, and in it the name that was given: where that is a
 * link, as in a hub cache, the name of what it leads to says nothing. malloc'd. */
static char *real_file(const char *path)
{
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    char folder[PATH_MAX], real[PATH_MAX], *ret = NULL;

    if (snprintf(folder, sizeof(folder), "%.*s", slash ? (int)(slash + 1 - path) : 1,
                 slash ? path : ".") >= PATH_MAX) {
        errno = ENAMETOOLONG;
        return NULL;
    }
    if (realpath(folder, real) && asprintf(&ret, "%s/%s", real[1] ? real : "", name) < 0) {
        ret = NULL;
    }
    return ret;
}

int model_path_find(char **ret, const char *model, enum model_use use, struct err *e)
{
    struct stat st;

    if (!model || !*model) {
        return find_bundled(ret, e);
    }
    if (stat(model, &st) != 0 && errno == ENOENT && hub_is_name(model)) {
        return hub_find(ret, model, use == MODEL_SERVED, e);
    }
    if (stat(model, &st) != 0) {
        return err_set_param(e, ERR_NOT_FOUND, "model",
                             "\"%.200s\": %s; a directory in Hugging Face's layout, a GGUF file or "
                             "a hub name (org/name, org/name/[folder/]file.gguf) is wanted",
                             model, strerror(errno));
    }
    if (!S_ISDIR(st.st_mode) && !S_ISREG(st.st_mode)) {
        return err_set_param(
            e, ERR_UNSUPPORTED, "model",
            "\"%.200s\" is neither a directory in Hugging Face's layout nor a GGUF file", model);
    }
    int found = S_ISDIR(st.st_mode) ? find_gguf(ret, model, e) : 0;
    if (found != 0) {
        return MIN(found, 0);
    }
    char *real = S_ISDIR(st.st_mode) ? realpath(model, NULL) : real_file(model);
    if (!real) {
        return err_set_param(e, ERR_IO, "model", "\"%.200s\": %s", model, strerror(errno));
    }
    *ret = real;
    return 0;
}

char *model_path_name(const char *path)
{
    char *hub_name = hub_name_of_path(path);

    if (hub_name) {
        return hub_name;
    }
    size_t len = strlen(path);
    while (len > 1 && path[len - 1] == '/') {
        len--;
    }
    size_t start = len;
    while (start > 0 && path[start - 1] != '/') {
        start--;
    }
    return start < len ? strndup(path + start, len - start) : strdup(path);
}
