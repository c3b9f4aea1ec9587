/* The values of quantised tensors as Quire decodes them.
 *
 *     build/tests/tools/decoded MODEL OUT
 *
 * MODEL is a directory of safetensors, of which the quantised weights are decoded, or a
 * GGUF file, of which all tensors are, in the file's order. OUT gets the values,
 * float32, one tensor after another; the standard output a line of each: its name and
 * its sizes. tests/http/test_decoders.py compares them with the formats' own decoders.
 */
#include <stdio.h>
#include <stdlib.h>

#include "models/checkpoint/gguf/gguf.h"
#include "models/checkpoint/quantised/quantised.h"

static void check(int rc, const struct err *e)
{
    if (rc < 0) {
        fprintf(stderr, "decoded: %s\n", e->text);
        exit(1);
    }
}

static float *room_for(int64_t n)
{
    float *values = calloc((size_t)MAX(n, 1), sizeof(*values));

    if (!values) {
        fprintf(stderr, "decoded: out of memory\n");
        exit(1);
    }
    return values;
}

static void put(FILE *out, const float *values, int64_t n)
{
    if (fwrite(values, sizeof(*values), (size_t)n, out) != (size_t)n) {
        perror("decoded");
        exit(1);
    }
}

static void put_directory(FILE *out, const char *dir)
{
    struct checkpoint *c = NULL;
    struct err e = {0};

    check(checkpoint_open(&c, dir, &e), &e);
    check(checkpoint_read_quantised(c, dir, DTYPE_F32, &e), &e);
    for (int32_t i = 0; i < checkpoint_count(c); i++) {
        const struct tensor *t = checkpoint_at(c, i);
        if (!t->quantised) {
            continue;
        }
        float *values = room_for(t->n_bytes / (int64_t)sizeof(*values));
        check(tensor_decode(t, values), &e);
        put(out, values, t->n_bytes / (int64_t)sizeof(*values));
        free(values);
        printf("%s", t->name);
        for (int32_t d = 0; d < t->n_dims; d++) {
            printf(" %lld", (long long)t->dim[d]);
        }
        printf("\n");
    }
    checkpoint_free(c);
}

static void put_file(FILE *out, const char *path)
{
    struct gguf *g = NULL;
    struct err e = {0};

    check(gguf_open(&g, path, &e), &e);
    for (int32_t i = 0; i < g->n_tensors; i++) {
        const struct gguf_tensor *t = &g->tensor[i];
        int64_t n = 1;
        printf("%.*s", (int)t->name.len, t->name.at);
        for (int32_t d = t->n_dims - 1; d >= 0; d--) {
            n *= t->dim[d];
            printf(" %lld", (long long)t->dim[d]);
        }
        printf("\n");
        float *values = room_for(n);
        gguf_decode(t->encoding, t->data, n, values);
        put(out, values, n);
        free(values);
    }
    gguf_free(g);
}

int main(int argc, char **argv)
{
    FILE *out = argc == 3 ? fopen(argv[2], "wbe") : NULL;

    if (!out) {
        fprintf(stderr, "usage: decoded MODEL OUT\n");
        return 2;
    }
    if (gguf_is_file(argv[1])) {
        put_file(out, argv[1]);
    } else {
        put_directory(out, argv[1]);
    }
    return fclose(out) == 0 ? 0 : 1;
}
