/* Memory of the CPU backend: weights, scratch and the cache, all allocated from regions
 * of 2 MiB pages.
 *
 * Weights are copied, except for large ones whose mapped file has the layout that the
 * kernels need (hugepages.c). Rows stay as stored, [out, in], zero-padded to whole
 * chunks of the tiles. Every kernel reads whole rows, so decoding, prefill, embedding
 * and a tied head share one copy.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "config/base/memory.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/simd/convert.h"
#include "kernels/weight_pieces.h"

#define REGION_BYTES ((size_t)64 << 20) /* of a region, at least */

static size_t round_up(size_t n, size_t to)
{
    return (n + to - 1) / to * to;
}

char *cpu_map_huge(size_t n_bytes)
{
    char *raw = mmap(NULL, n_bytes + CPU_HUGE_BYTES, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    if (raw == MAP_FAILED) {
        return NULL;
    }
    char *base = (char *)round_up((size_t)raw, CPU_HUGE_BYTES);
    if (base > raw) {
        munmap(raw, (size_t)(base - raw));
    }
    if (raw + CPU_HUGE_BYTES > base) {
        munmap(base + n_bytes, (size_t)(raw + CPU_HUGE_BYTES - base));
    }
    madvise(base, n_bytes, MADV_HUGEPAGE); /* a hint: without support there are 4 KiB pages */
    return base;
}

static struct cpu_region *region_new(size_t n_bytes)
{
    size_t want = round_up(n_bytes, CPU_HUGE_BYTES);
    struct cpu_region *r = calloc(1, sizeof(*r));
    char *base = r ? cpu_map_huge(want) : NULL;

    if (!base) {
        free(r);
        return NULL;
    }
    *r = (struct cpu_region){.base = base, .n_bytes = want};
    return r;
}

void *cpu_alloc(struct cpu_backend *c, size_t n_bytes)
{
    n_bytes = round_up(MAX(n_bytes, (size_t)1), 64);
    struct cpu_region *r = c->region;
    if (!r || r->n_bytes - r->used_bytes < n_bytes) {
        struct cpu_region *fresh = region_new(MAX(n_bytes, REGION_BYTES));
        if (!fresh) {
            return NULL;
        }
        /* The region with more memory left stays at the head. */
        if (r && fresh->n_bytes - n_bytes < r->n_bytes - r->used_bytes) {
            fresh->next = r->next;
            r->next = fresh;
        } else {
            fresh->next = r;
            c->region = fresh;
        }
        r = fresh;
    }
    void *p = r->base + r->used_bytes;
    r->used_bytes += n_bytes;
    return p;
}

/* Whether a weight of so many bytes leaves the machine some memory. It is asked where
 * a new region is needed, as the regions before have been filled. */
static int check_room(const struct cpu_backend *c, size_t n_bytes, const char *name, struct err *e)
{
    enum { LEFT_SHARE = 64 }; /* of all memory */
    const struct cpu_region *r = c->region;
    struct memory_size size;

    if ((r && r->n_bytes - r->used_bytes >= n_bytes) || !memory_size_read(&size) ||
        (int64_t)n_bytes <= size.available - size.total / LEFT_SHARE) {
        return 0;
    }
    return err_set(e, ERR_NOMEM,
                   "out of memory: %s takes %zu MiB more, but of %lld MiB only %lld are available",
                   name, n_bytes >> 20, (long long)(size.total >> 20),
                   (long long)(size.available >> 20));
}

void *cpu_alloc_weight(struct cpu_backend *c, size_t n_bytes, const char *name, struct err *e)
{
    if (check_room(c, n_bytes, name, e) < 0) {
        return NULL;
    }
    void *p = cpu_alloc(c, n_bytes);
    if (!p) {
        err_nomem(e, name);
    }
    return p;
}

void cpu_memory_release(struct cpu_backend *c)
{
    while (c->region) {
        struct cpu_region *next = c->region->next;
        munmap(c->region->base, c->region->n_bytes);
        free(c->region);
        c->region = next;
    }
}

int cpu_memory(struct backend *b, struct backend_memory *ret, struct err *e)
{
    struct memory_size size;

    if (!memory_size_read(&size)) {
        return err_set(e, ERR_IO, "cpu: the machine's memory size is not known");
    }
    int64_t taken = cpu_hugepages_pending_bytes(cpu_of(b));
    *ret = (struct backend_memory){.total_bytes = size.total,
                                   .free_bytes = MAX(size.available - taken, 0)};
    return 0;
}

/* ---- weights ---- */

enum { WEIGHT_TASK_ROWS = 64 };

/* A weight being made. */
struct fill {
    const struct weight_desc *desc;
    struct mat m;  /* the weight */
    uint64_t salt; /* of a dummy's values */
};

/* A number in +-1e-3, a function of the weight and the element alone. */
static float dummy_value(uint64_t salt, int64_t index)
{
    uint64_t x = (salt * 0x9E3779B97F4A7C15ull) ^ (uint64_t)index;

    x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCDull;
    x = (x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53ull;
    return ((float)(x >> 40) * 0x1p-23f - 1.0f) * 1e-3f;
}

/* Row r of the weight = row r - first of piece p. */
static void copy_row(struct mat m, int64_t r, const struct weight_piece *p, int64_t first)
{
    char *out = (char *)m.data + r * m.stride * dtype_bytes(m.dtype);
    int64_t row = r - first;

    if (!p->transposed && p->dtype == m.dtype) {
        memcpy(out, (const char *)p->data + row * p->stride * dtype_bytes(p->dtype),
               (size_t)(m.cols * dtype_bytes(m.dtype)));
        return;
    }
    for (int64_t i = 0; i < m.cols; i++) {
        int64_t at = p->transposed ? i * p->stride + row : row * p->stride + i;
        dtype_store(out, m.dtype, i, dtype_load(p->data, p->dtype, at));
    }
}

static void fill_rows(void *arg, int32_t task, int32_t thread)
{
    (void)thread;
    struct fill *f = arg;
    int32_t first = task * WEIGHT_TASK_ROWS;
    int32_t end = MIN(first + WEIGHT_TASK_ROWS, f->m.rows);
    int32_t piece = 0;
    int32_t piece_first = 0;
    for (int32_t r = first; r < end; r++) {
        if (f->desc->n_pieces == 0) {
            char *out = (char *)f->m.data + r * f->m.stride * dtype_bytes(f->m.dtype);
            for (int32_t i = 0; i < f->m.cols; i++) {
                dtype_store(out, f->m.dtype, i, dummy_value(f->salt, (int64_t)r * f->m.cols + i));
            }
            continue;
        }
        while (r >= piece_first + weight_piece_rows(&f->desc->piece[piece])) {
            piece_first += weight_piece_rows(&f->desc->piece[piece++]);
        }
        copy_row(f->m, r, &f->desc->piece[piece], piece_first);
    }
}

/* The pieces of a vector ([1, n] each, as the biases of a fused qkv) are joined side by
 * side. */
static void fill_vector(struct fill *f)
{
    int64_t at = 0;

    for (int32_t p = 0; p < f->desc->n_pieces; p++) {
        const struct weight_piece *piece = &f->desc->piece[p];
        int64_t n = (int64_t)piece->rows * piece->cols;
        for (int64_t i = 0; i < n; i++) {
            dtype_store(f->m.data, f->m.dtype, at++, dtype_load(piece->data, piece->dtype, i));
        }
    }
    for (int32_t i = 0; i < f->m.cols && f->desc->n_pieces == 0; i++) {
        dtype_store(f->m.data, f->m.dtype, i, dummy_value(f->salt, i));
    }
}

static int64_t weight_bytes(const struct mat *m)
{
    return (int64_t)m->rows * m->stride * dtype_bytes(m->dtype);
}

static int copy_weight(struct cpu_backend *c, struct fill *f, struct err *e)
{
    f->m.data = cpu_alloc_weight(c, (size_t)weight_bytes(&f->m), f->desc->name, e);
    if (!f->m.data) {
        return ERR_NOMEM;
    }
    if (f->desc->kind == WEIGHT_VECTOR) {
        fill_vector(f);
    } else {
        cpu_pool_run(c->pool, (int32_t)div_ceil(f->m.rows, WEIGHT_TASK_ROWS), fill_rows, f);
    }
    return 0;
}

static int map_weight(struct cpu_backend *c, struct fill *f, struct err *e)
{
    f->m.data = (void *)(uintptr_t)f->desc->piece[0].data; /* only read */
    return cpu_hugepages_add(c, f->m.data, weight_bytes(&f->m), e);
}

/* A table whose rows are written as steps reach them. */
static int late_table(struct cpu_backend *c, const struct weight_desc *d, struct mat *ret,
                      struct err *e)
{
    const struct weight_piece *p = d->piece;

    if (c->n_late == ARRAY_LEN(c->late_rows)) {
        return err_set(e, ERR_INVALID, "cpu: over %d tables of late rows", CPU_LATE_TABLES);
    }
    c->late_rows[c->n_late++] = d->late;
    *ret = (struct mat){.data = (void *)(uintptr_t)p->data, /* only read */
                        .stride = p->stride,
                        .rows = d->rows,
                        .cols = d->cols,
                        .dtype = p->dtype};
    return 0;
}

struct weight_support cpu_supports(const struct backend *b, const struct weight_format *f)
{
    const struct cpu_kernels *k = &CONTAINER_OF(b, struct cpu_backend, base)->k;
    struct weight_support s = {
        .as_stored = true, .act = DTYPE_F32, .kernel = "floats", .experts = 1, .experts_floats = 1};

    if (!weight_format_is_plain(f)) {
        const struct cpu_blocks *of = cpu_blocks_of(k, f->id, 1);
        s.kernel = weight_format_has_scales(f) ? of->codes_name : of->name;
    }
    return s;
}

int cpu_weight(struct backend *b, const struct weight_desc *d, struct mat *ret, struct err *e)
{
    struct cpu_backend *c = cpu_of(b);
    int rc = weight_pieces_check(d, INT64_MAX, e);

    if (rc < 0) {
        return rc;
    }
    if (d->late.reach) {
        return late_table(c, d, ret, e);
    }
    if (weight_has_blocks(d)) {
        return cpu_weight_blocks(c, d, ret, e);
    }
    /* Vectors are small and are read by float32 operations, so they are stored as
     * float32. */
    enum dtype t = d->kind == WEIGHT_VECTOR ? DTYPE_F32 : d->dtype;
    int64_t stride = d->kind == WEIGHT_LINEAR || d->kind == WEIGHT_EMBEDDING
                         ? (int64_t)round_up((size_t)d->cols, TILE_CHUNK)
                         : d->cols;
    struct fill f = {.desc = d,
                     .m = {.stride = stride, .rows = d->rows, .cols = d->cols, .dtype = t},
                     .salt = ++c->n_dummies};
    if (d->kind == WEIGHT_LINEAR) {
        cpu_panels_from(c, t);
    }
    rc = cpu_reads_in_place(d, stride) ? map_weight(c, &f, e) : copy_weight(c, &f, e);
    if (rc < 0) {
        return rc;
    }
    *ret = f.m;
    struct cpu_weight *priv = cpu_alloc(c, sizeof(*priv));
    if (!priv) {
        return err_nomem(e, d->name);
    }
    *priv = (struct cpu_weight){.m = f.m};
    ret->priv = priv;
    return 0;
}

/* ---- activations and cache ---- */

/* Activations without memory. An odd number of cache lines a row, because rows a power
 * of two apart would fall into the same cache sets. */
static struct mat activations(int32_t rows, int32_t cols, enum dtype t)
{
    int64_t stride = (int64_t)(round_up((size_t)cols, 16) | 16);

    return (struct mat){.stride = stride, .rows = rows, .cols = cols, .dtype = t};
}

static size_t activation_bytes(struct mat m)
{
    return round_up((size_t)m.rows * (size_t)m.stride * (size_t)dtype_bytes(m.dtype), 64);
}

int cpu_scratch(struct backend *b, int32_t rows, int32_t cols, enum dtype t, struct mat *ret,
                struct err *e)
{
    if (rows < 1 || cols < 1) {
        return err_set(e, ERR_INVALID, "scratch of [%d, %d] is not possible", rows, cols);
    }
    struct mat m = activations(rows, cols, t);
    m.data = cpu_alloc(cpu_of(b), activation_bytes(m));
    if (!m.data) {
        return err_nomem(e, "activations");
    }
    *ret = m;
    return 0;
}

int cpu_scratch_in_turns(struct backend *b, const struct turn_scratch *s, int32_t n, struct err *e)
{
    size_t used[SCRATCH_TURNS] = {0}, most = 0;

    for (int32_t i = 0; i < n; i++) {
        if (s[i].rows < 1 || s[i].cols < 1) {
            return err_set(e, ERR_INVALID, "scratch of [%d, %d] is not possible", s[i].rows,
                           s[i].cols);
        }
        used[s[i].turn] += activation_bytes(activations(s[i].rows, s[i].cols, s[i].dtype));
        most = MAX(most, used[s[i].turn]);
    }
    char *base = n > 0 ? cpu_alloc(cpu_of(b), most) : NULL;
    if (n > 0 && !base) {
        return err_nomem(e, "activations");
    }
    memset(used, 0, sizeof(used));
    for (int32_t i = 0; i < n; i++) {
        *s[i].ret = activations(s[i].rows, s[i].cols, s[i].dtype);
        s[i].ret->data = base + used[s[i].turn];
        used[s[i].turn] += activation_bytes(*s[i].ret);
    }
    return 0;
}

int cpu_kv_create(struct backend *b, const struct kv_layout *l, int32_t n_blocks,
                  int32_t n_host_blocks, struct err *e)
{
    struct cpu_backend *c = cpu_of(b);

    int32_t n_groups = backend_kv_groups(&c->config);

    if (!kv_layouts_agree(l, n_groups)) {
        return err_set(e, ERR_INVALID, "cpu: blocks of different sizes cannot share a pool");
    }
    if (c->kv_data || l->block_size < 1 || l->head_dim < 1 ||
        l->head_dim > (l->kind == KV_LATENT ? LIMIT_LATENT_DIM : LIMIT_HEAD_DIM) || n_blocks < 1 ||
        n_host_blocks < 0 || l->dtype == DTYPE_I32) {
        return err_set(e, ERR_INVALID,
                       "cpu: a cache of %d blocks of %d tokens, heads of %d, is not possible",
                       n_blocks, l->block_size, l->head_dim);
    }
    size_t block_bytes = (size_t)kv_layout_block_bytes(l);
    int64_t scores_cap = (int64_t)MAX(c->config.max_blocks_per_seq, 1) * l->block_size;
    char *data = cpu_alloc(c, block_bytes * (size_t)n_blocks);
    char *host = n_host_blocks > 0 ? cpu_alloc(c, block_bytes * (size_t)n_host_blocks) : NULL;
    c->scores =
        cpu_alloc(c, (size_t)scores_cap * (size_t)cpu_pool_threads(c->pool) * sizeof(float));
    c->slot_token = cpu_alloc(c, ((size_t)n_blocks + (size_t)n_host_blocks) *
                                     (size_t)l->block_size * sizeof(*c->slot_token));
    if (!data || (n_host_blocks > 0 && !host) || !c->scores || !c->slot_token) {
        return err_set(e, ERR_NOMEM, "out of memory: the key/value cache needs %lld MiB",
                       (long long)(block_bytes * (size_t)(n_blocks + n_host_blocks) >> 20));
    }
    memcpy(c->kv, l, (size_t)n_groups * sizeof(*l));
    c->n_blocks = n_blocks;
    c->n_host_blocks = n_host_blocks;
    c->kv_data = data;
    c->kv_host = host;
    c->scores_cap = scores_cap;
    /* By now the model is loaded, and its file stays mapped for the backend's life. */
    return cpu_hugepages_start(c, e);
}

int cpu_download(struct backend *b, struct mat m, float *out, struct err *e)
{
    (void)b;
    (void)e;
    for (int64_t r = 0; r < m.rows && m.format; r++) {
        cpu_decode_row(&m, (int32_t)r, out + r * m.cols);
    }
    for (int64_t r = 0; r < m.rows && !m.format; r++) {
        for (int64_t i = 0; i < m.cols; i++) {
            out[r * m.cols + i] = dtype_load(m.data, m.dtype, r * m.stride + i);
        }
    }
    return 0;
}

int cpu_upload(struct backend *b, struct mat m, const float *in, struct err *e)
{
    (void)b;
    (void)e;
    for (int64_t r = 0; r < m.rows; r++) {
        for (int64_t i = 0; i < m.cols; i++) {
            dtype_store(m.data, m.dtype, r * m.stride + i, in[r * m.cols + i]);
        }
    }
    return 0;
}
