/* What all backends share: names of types, the cache's layout, and opening a backend by
 * name (plugins included). */
#include "kernels/backend.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "config/base/log.h"

const char *dtype_name(enum dtype t)
{
    switch (t) {
    case DTYPE_F32:
        return "float32";
    case DTYPE_F16:
        return "float16";
    case DTYPE_BF16:
        return "bfloat16";
    case DTYPE_I32:
        return "int32";
    case DTYPE_F8:
        return "fp8";
    case DTYPE_I8:
        return "int8";
    }
    return "unknown";
}

void kv_layout_init(struct kv_layout *l, int32_t block_size, int32_t n_layers, int32_t n_kv_heads,
                    int32_t head_dim, enum dtype dtype)
{
    *l = (struct kv_layout){.block_size = block_size,
                            .n_layers = n_layers,
                            .n_kv_heads = n_kv_heads,
                            .head_dim = head_dim,
                            .dtype = dtype};
    l->token_stride = head_dim;
    l->head_stride = l->token_stride * block_size;
    if (dtype == DTYPE_I8) {
        l->scale_offset = div_ceil(l->head_stride, 16) * 16;
        l->head_stride = div_ceil(l->scale_offset + 4 * (int64_t)block_size, 16) * 16;
    }
    l->kv_stride = l->head_stride * n_kv_heads;
    l->layer_stride = l->kv_stride * 2;
    l->block_stride = l->layer_stride * n_layers;
}

void kv_layout_init_states(struct kv_layout *l, int32_t block_size, int32_t n_layers,
                           int64_t state_floats)
{
    *l = (struct kv_layout){.kind = KV_STATE,
                            .block_size = block_size,
                            .n_layers = n_layers,
                            .dtype = DTYPE_F32,
                            .layer_stride = state_floats,
                            .block_stride = state_floats * n_layers};
}

void kv_layouts_pad(struct kv_layout *l, int32_t n)
{
    int64_t bytes = 0;

    for (int32_t i = 0; i < n; i++) {
        bytes = MAX(bytes, kv_layout_block_bytes(&l[i]));
    }
    bytes = (bytes + 127) / 128 * 128; /* a device copies and reads whole lines */
    for (int32_t i = 0; i < n; i++) {
        l[i].block_stride = bytes / dtype_bytes(l[i].dtype);
    }
}

void kv_layout_init_latent(struct kv_layout *l, int32_t block_size, int32_t n_layers, int32_t width,
                           enum dtype dtype)
{
    kv_layout_init(l, block_size, n_layers, 1, width, dtype);
    l->kind = KV_LATENT;
    l->kv_stride = 0;
    l->layer_stride = l->head_stride;
    l->block_stride = l->layer_stride * n_layers;
}

void kv_layouts_add_hidden(struct kv_layout *l, int32_t n, int32_t hidden, enum dtype t)
{
    int64_t row_bytes = hidden * dtype_bytes(t);

    kv_layouts_pad(l, n);
    for (int32_t i = 0; i < n; i++) {
        int64_t bytes = kv_layout_block_bytes(&l[i]);
        int64_t with_hidden = (bytes + l[i].block_size * row_bytes + 127) / 128 * 128;
        l[i].hidden = hidden;
        l[i].hidden_dtype = t;
        l[i].hidden_offset = bytes;
        l[i].block_stride = with_hidden / dtype_bytes(l[i].dtype);
    }
}

bool kv_layouts_agree(const struct kv_layout *l, int32_t n)
{
    for (int32_t i = 1; i < n; i++) {
        if (l[i].block_size != l[0].block_size ||
            kv_layout_block_bytes(&l[i]) != kv_layout_block_bytes(&l[0])) {
            return false;
        }
    }
    return true;
}

/* The plugin's path in `dir`, relative to the executable's folder; false if there is no
 * such file. */
static bool plugin_path(char *path, size_t path_bytes, const char *dir, const char *file)
{
    char exe[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", exe, sizeof(exe) - 1);

    if (n <= 0) {
        return false;
    }
    exe[n] = '\0';
    char *slash = strrchr(exe, '/');
    if (!slash) {
        return false;
    }
    *slash = '\0';
    int len = snprintf(path, path_bytes, "%s/%s%s", exe, dir, file);
    return len > 0 && (size_t)len < path_bytes && access(path, R_OK) == 0;
}

/* Open libquire_<name>.so: beside the executable, in ../lib/quire, then where the
 * loader looks. NULL: not usable, `why` says why. */
static void *plugin_load(const char *name, char *why, size_t why_bytes)
{
    char file[64];
    char path[PATH_MAX + 64];

    snprintf(file, sizeof(file), "libquire_%s.so", name);
    if (!plugin_path(path, sizeof(path), "", file) &&
        !plugin_path(path, sizeof(path), "../lib/quire/", file)) {
        snprintf(path, sizeof(path), "%s", file);
    }
    void *so = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!so) {
        const char *text = dlerror();
        snprintf(why, why_bytes, "%s", text != NULL ? text : "no reason given");
    }
    return so;
}

/* A plugin that was opened stays loaded for the process's life: its device runtime does
 * not survive being unloaded. */
static int plugin_open(struct backend **ret, const char *name, const struct backend_config *c,
                       struct err *e)
{
    char why[256];
    void *so = plugin_load(name, why, sizeof(why));

    if (!so) {
        return err_set(e, ERR_NOT_FOUND, "device %s: its plugin libquire_%s.so is not usable: %s",
                       name, name, why);
    }
    backend_open_fn *open_fn = NULL;
    *(void **)&open_fn = dlsym(so, "quire_backend_open");
    if (!open_fn) {
        dlclose(so);
        return err_set(e, ERR_UNSUPPORTED,
                       "device %s: libquire_%s.so does not export quire_backend_open", name, name);
    }
    int rc = open_fn(ret, BACKEND_ABI, c, e);
    return rc < 0 ? err_prefix(e, "device %s", name) : 0;
}

int backend_open(struct backend **ret, const char *name, const struct backend_config *c,
                 struct err *e)
{
    if (strcmp(name, "cpu") == 0) {
        return cpu_backend_open(ret, BACKEND_ABI, c, e);
    }
    if (strcmp(name, "cuda") == 0) {
        return plugin_open(ret, "cuda", c, e);
    }
    if (strcmp(name, "auto") == 0) {
        struct err why = {0};
        if (plugin_open(ret, "cuda", c, &why) == 0) {
            return 0;
        }
        log_event(LOG_INFO, "no GPU used", LOG_STR("because", why.text));
        return cpu_backend_open(ret, BACKEND_ABI, c, e);
    }
    return err_set(e, ERR_INVALID, "device \"%s\" is not known: auto, cpu or cuda", name);
}
