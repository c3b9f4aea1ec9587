/* The files beside the weights of a quantised directory (see quantise.h). */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "config/base/buf.h"
#include "config/base/limits.h"
#include "models/checkpoint/file.h"
#include "models/checkpoint/gguf/gguf.h"
#include "models/checkpoint/quantised/quantised.h"
#include "models/quantise/quantise_internal.h"

static const char CONFIG[] = "config.json";

/* Files that are copied where they exist. */
static const char *const COPIED[] = {"generation_config.json",
                                     "tokenizer.json",
                                     "tokenizer.model",
                                     "vocab.json",
                                     "merges.txt",
                                     "tokenizer_config.json",
                                     "special_tokens_map.json",
                                     "chat_template.jinja",
                                     "chat_template.json"};

FILE *quantise_create(const struct conversion *k, const char *name, struct err *e)
{
    char path[4096];

    if ((size_t)snprintf(path, sizeof(path), "%s/%s", k->partial, name) >= sizeof(path)) {
        errno = ENAMETOOLONG;
        quantise_failed(k, name, e);
        return NULL;
    }
    FILE *f = fopen(path, "wxe");
    if (!f) {
        quantise_failed(k, name, e);
    }
    return f;
}

bool quantise_close(FILE *f)
{
    bool written = fflush(f) == 0 && fsync(fileno(f)) == 0;

    return fclose(f) == 0 && written;
}

static int write_file(const struct conversion *k, const char *name, const char *text, size_t len,
                      struct err *e)
{
    FILE *f = quantise_create(k, name, e);

    if (!f) {
        return ERR_IO;
    }
    bool done = fwrite(text, 1, len, f) == len;
    done = quantise_close(f) && done;
    return done ? 0 : quantise_failed(k, name, e);
}

static int copy_files(const struct conversion *k, struct err *e)
{
    int rc = 0;

    for (size_t i = 0; i < ARRAY_LEN(COPIED) && rc == 0; i++) {
        char *text;
        size_t len;
        if (model_file_exists(k->from, COPIED[i])) {
            rc = model_file_read(k->from, COPIED[i], (size_t)256 << 20, &text, &len, e);
            if (rc == 0) {
                rc = write_file(k, COPIED[i], text, len, e);
                free(text);
            }
        }
    }
    return rc;
}

/* The modules whose weights are left as they are: the head, routers, what the model's
 * text does not need. *ret_n: how many. */
static void print_ignored(const struct conversion *k, struct buf *b, int32_t *ret_n)
{
    static const char HEAD[] = "lm_head";

    *ret_n = 1;
    buf_printf(b, "\"%s\"", HEAD);
    for (int32_t i = 0; i < k->n_outputs; i++) {
        const char *name = output_name(&k->output[i]);
        size_t len = strlen(name) - MIN(strlen(name), strlen(".weight"));
        bool head = len == strlen(HEAD) && strncmp(name, HEAD, len) == 0;
        if (k->output[i].product_alone && !head) {
            buf_puts(b, ", ");
            buf_json_string(b, name, len);
            (*ret_n)++;
        }
    }
}

/* The member that compressed-tensors reads. *ret_ignored: modules on its list. */
static void print_quantization(const struct conversion *k, struct buf *b, int32_t *ret_ignored)
{
    enum weight_format_id f = k->rounding.format;
    bool nvfp4 = quantise_nvfp4(k), packed = f == FORMAT_INT4 || f == FORMAT_FP4;
    const char *type = f == FORMAT_FP8 || f == FORMAT_FP4 ? "float" : "int",
               *pack = f == FORMAT_INT4 ? "pack"
                       : nvfp4          ? "nvfp4-pack"
                                        : "mxfp4-pack";

    buf_printf(b,
               ",\n  \"quantization_config\": {\"quant_method\": \"compressed-tensors\", "
               "\"format\": \"%s-quantized\", \"quantization_status\": \"compressed\", "
               "\"ignore\": [",
               packed ? pack : type);
    print_ignored(k, b, ret_ignored);
    buf_printf(b,
               "], \"config_groups\": {\"group_0\": {\"targets\": "
               "[\"Linear\"], \"weights\": {\"num_bits\": %d, \"type\": \"%s\", \"symmetric\": "
               "%s, \"dynamic\": false, ",
               packed ? 4 : 8, type, k->rounding.zeros ? "false" : "true");
    if (packed) {
        buf_printf(b, "\"strategy\": \"%s\", \"group_size\": %d}}}}",
                   nvfp4 ? "tensor_group" : "group", k->rounding.group);
    } else {
        buf_printf(b,
                   "\"strategy\": \"channel\"}, \"input_activations\": {\"num_bits\": 8, \"type\": "
                   "\"%s\", \"strategy\": \"%s\", \"symmetric\": true, \"dynamic\": %s}}}}",
                   type, k->input_scale ? "tensor" : "token", k->input_scale ? "false" : "true");
    }
}

/* config.json, which was read as JSON before, with one member more. */
static int write_config(const struct conversion *k, struct err *e)
{
    struct buf b;
    char *text;
    size_t len;
    int rc = model_file_read(k->from, CONFIG, LIMIT_CONFIG_JSON_BYTES, &text, &len, e);

    if (rc < 0) {
        return rc;
    }
    const char *end = memrchr(text, '}', len);
    buf_init(&b, 2 * LIMIT_CONFIG_JSON_BYTES);
    if (end) {
        while (end > text && strchr(" \t\r\n", end[-1])) {
            end--;
        }
        buf_append(&b, text, (size_t)(end - text));
        int32_t n_ignored;
        print_quantization(k, &b, &n_ignored);
        buf_puts(&b, "\n}\n");
        rc = b.failed                      ? err_nomem(e, CONFIG)
             : n_ignored > QUANT_MAX_NAMES ? err_set(e, ERR_FULL,
                                                     "%s: %d modules that are not quantised, at "
                                                     "most %d can be listed",
                                                     k->from, n_ignored, QUANT_MAX_NAMES)
                                           : write_file(k, CONFIG, b.data, b.len, e);
    }
    buf_release(&b);
    free(text);
    return rc;
}

int quantise_check_source(const char *from, struct err *e)
{
    struct quant_config q;
    char *text;
    size_t len;
    bool found = false;

    if (gguf_is_file(from)) {
        return err_set(e, ERR_UNSUPPORTED, "%s is a GGUF file, a directory is needed", from);
    }
    int rc = model_file_read(from, CONFIG, LIMIT_CONFIG_JSON_BYTES, &text, &len, e);
    if (rc < 0) {
        return rc;
    }
    rc = quant_config_parse(&q, &found, text, len, e);
    if (rc == 0 && found) {
        quant_config_release(&q);
    }
    free(text);
    found = found || model_file_exists(from, "hf_quant_config.json");
    return rc == 0 && found ? err_set(e, ERR_INVALID, "%s is quantised already", from) : rc;
}

int quantise_write_files(const struct conversion *k, struct err *e)
{
    int rc = write_config(k, e);

    return rc < 0 ? rc : copy_files(k, e);
}
