/* Large weights are read in their mapped file, so that a server is ready without
 * copying them; a background thread then moves them into 2 MiB pages while steps run.
 *
 * A mapped file has pages of 4 KiB, and a decode step that streams through them loses
 * much time in TLB misses. The thread copies the weights, a multiple of 2 MiB at a
 * time, into huge pages and puts the copy in the place of the file's pages (mremap).
 * Addresses do not change: a step that reads meanwhile finds the same values before and
 * after, or waits in the page fault for the exchange. Small gaps between two weights of
 * one file are moved with them, so that only the ends of the file are left in small
 * pages. While steps run, the thread rests for most of the time: a copy takes a core
 * and memory bandwidth from them.
 *
 * Weights of less than LARGE_BYTES are copied at load (memory.c). On machines with
 * several NUMA nodes nothing is read in place: there the threads that will read a row
 * copy it at load, each into memory near itself.
 */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "config/base/log.h"
#include "kernels/cpu/cpu.h"

#define CHUNK_BYTES ((size_t)32 << 20)   /* moved at a time */
#define LARGE_BYTES ((int64_t)512 << 10) /* the smallest weight that is read in place */
#define GAP_BYTES ((int64_t)1 << 20)     /* the largest gap that is moved with its neighbours */

enum {
    NICE = 10,            /* below the threads of a step, which spin */
    REST = 8,             /* times as long as a copy took, if steps ran meanwhile */
    REST_MAX_US = 100000, /* so that the thread can be ended soon */
};

/* A range of weights in one mapping, with the gaps between them. */
struct span {
    char *at;
    size_t n_bytes;
};

struct cpu_hugepages {
    struct span *span; /* [n] */
    int32_t n, cap;
    const struct cpu_pool *pool;   /* borrowed; tells whether steps run */
    _Atomic int64_t pending_bytes; /* still to be moved */
    pthread_t thread;              /* valid when started */
    bool started;
    _Atomic bool stop; /* set to end the thread early */
};

static bool one_memory_node(void)
{
    return access("/sys/devices/system/node/node1", F_OK) != 0;
}

static bool huge_pages(void)
{
    char text[64] = "";
    FILE *f = fopen("/sys/kernel/mm/transparent_hugepage/enabled", "re");
    bool ok = f && fgets(text, sizeof(text), f) && !strstr(text, "[never]");

    if (f) {
        fclose(f);
    }
    return ok;
}

/* ---- which weights ---- */

bool cpu_reads_in_place(const struct weight_desc *d, int64_t stride)
{
    const struct weight_piece *p = d->piece;
    bool large = (int64_t)d->rows * stride * dtype_bytes(d->dtype) >= LARGE_BYTES;

    if (!d->mapped || !large || d->n_pieces == 0 ||
        (d->kind != WEIGHT_LINEAR && d->kind != WEIGHT_EMBEDDING)) {
        return false;
    }
    const char *end = p->data;
    for (int32_t i = 0; i < d->n_pieces; i++) {
        if (p[i].data != end || p[i].transposed || p[i].dtype != d->dtype ||
            p[i].stride != stride || p[i].cols != stride) {
            return false;
        }
        end += (int64_t)p[i].rows * stride * dtype_bytes(d->dtype);
    }
    return one_memory_node();
}

int cpu_hugepages_add(struct cpu_backend *c, const void *data, int64_t n_bytes, struct err *e)
{
    struct cpu_hugepages *s = c->hugepages;

    if (!s) {
        s = c->hugepages = calloc(1, sizeof(*s));
        if (s) {
            s->pool = c->pool;
        }
    }
    if (s && s->n == s->cap) {
        int32_t cap = MAX(2 * s->cap, 64);
        struct span *span = realloc(s->span, (size_t)cap * sizeof(*span));
        if (!span) {
            return err_nomem(e, "list of weights");
        }
        s->span = span;
        s->cap = cap;
    }
    if (!s) {
        return err_nomem(e, "list of weights");
    }
    s->span[s->n++] = (struct span){.at = (char *)(uintptr_t)data, .n_bytes = (size_t)n_bytes};
    s->pending_bytes += n_bytes;
    return 0;
}

int64_t cpu_hugepages_pending_bytes(const struct cpu_backend *c)
{
    return c->hugepages ? c->hugepages->pending_bytes : 0;
}

/* ---- the move ---- */

static int by_address(const void *a, const void *b)
{
    const struct span *x = a;
    const struct span *y = b;

    return x->at < y->at ? -1 : x->at > y->at;
}

/* Whether [from, to) lies in one private read-only mapping of a file: only such bytes
 * may be exchanged for a copy. */
static bool in_one_file(const char *from, const char *to)
{
    FILE *f = fopen("/proc/self/maps", "re");
    char line[512], mode[5];
    unsigned long begin, end, inode;
    bool found = false;

    while (f && !found && fgets(line, sizeof(line), f)) {
        found = sscanf(line, "%lx-%lx %4s %*x %*s %lu", &begin, &end, mode, &inode) == 4 &&
                inode != 0 && strcmp(mode, "r--p") == 0 && begin <= (uintptr_t)from &&
                (uintptr_t)to <= end;
    }
    if (f) {
        fclose(f);
    }
    return found;
}

/* Sort the spans and join neighbours, because one weight may end in the 2 MiB in which
 * the next begins. */
static void join_spans(struct cpu_hugepages *s)
{
    int32_t n = 0;

    qsort(s->span, (size_t)s->n, sizeof(*s->span), by_address);
    for (int32_t i = 0; i < s->n; i++) {
        struct span *last = n > 0 ? &s->span[n - 1] : NULL;
        char *end = last ? last->at + last->n_bytes : NULL;
        int64_t gap = s->span[i].at - end;
        if (last && (gap == 0 || (gap <= GAP_BYTES && in_one_file(end, s->span[i].at)))) {
            last->n_bytes += (size_t)gap + s->span[i].n_bytes;
            s->pending_bytes += gap;
        } else {
            s->span[n++] = s->span[i];
        }
    }
    s->n = n;
}

/* Copy the contents of one huge page; then rest if the pool worked at the same time. */
static void copy_page(const struct cpu_hugepages *s, char *to, const char *from)
{
    unsigned jobs = cpu_pool_jobs(s->pool);
    int64_t began = clock_us();

    memcpy(to, from, CPU_HUGE_BYTES);
    if (cpu_pool_jobs(s->pool) != jobs) {
        usleep((useconds_t)MIN((clock_us() - began) * REST, REST_MAX_US));
    }
}

/* Put huge pages of the same contents in the place of [at, at + n_bytes), both
 * multiples of CPU_HUGE_BYTES. */
static bool move_chunk(struct cpu_hugepages *s, char *at, size_t n_bytes)
{
    char *copy = cpu_map_huge(n_bytes);

    if (!copy) {
        return false;
    }
    for (size_t i = 0; i < n_bytes && !s->stop; i += CPU_HUGE_BYTES) {
        copy_page(s, copy + i, at + i);
    }
    bool ok = !s->stop && mprotect(copy, n_bytes, PROT_READ) == 0 &&
              mremap(copy, n_bytes, n_bytes, MREMAP_MAYMOVE | MREMAP_FIXED, at) != MAP_FAILED;
    if (!ok) {
        munmap(copy, n_bytes);
    }
    return ok;
}

static bool move_span(struct cpu_hugepages *s, const struct span *span)
{
    char *end = span->at + span->n_bytes;

    end -= (uintptr_t)end % CPU_HUGE_BYTES;
    for (char *at =
             span->at + (CPU_HUGE_BYTES - (uintptr_t)span->at % CPU_HUGE_BYTES) % CPU_HUGE_BYTES;
         at < end;) {
        size_t n = MIN((size_t)(end - at), CHUNK_BYTES);
        if (!move_chunk(s, at, n)) {
            return false;
        }
        s->pending_bytes -= (int64_t)n;
        at += n;
    }
    return true;
}

static void *hugepages_main(void *arg)
{
    struct cpu_hugepages *s = arg;
    bool ok = true;

    pthread_setname_np(pthread_self(), "quire-hugepages");
    setpriority(PRIO_PROCESS, (id_t)gettid(), NICE);
    join_spans(s);
    for (int32_t i = 0; i < s->n && ok; i++) {
        ok = move_span(s, &s->span[i]);
    }
    s->pending_bytes = 0;
    if (ok) {
        log_event(LOG_DEBUG, "weights moved into large pages");
    } else if (!s->stop) {
        log_event(LOG_WARN, "weights stay in the small pages of their file",
                  LOG_STR("because", strerror(errno)));
    }
    return NULL;
}

int cpu_hugepages_start(struct cpu_backend *c, struct err *e)
{
    struct cpu_hugepages *s = c->hugepages;

    if (!s || s->started) {
        return 0;
    }
    if (!huge_pages()) {
        s->pending_bytes = 0;
        return 0;
    }
    if (pthread_create(&s->thread, NULL, hugepages_main, s) != 0) {
        return err_set(e, ERR_IO, "cpu: the thread that moves weights could not be started");
    }
    s->started = true;
    return 0;
}

void cpu_hugepages_free(struct cpu_hugepages *s)
{
    if (!s) {
        return;
    }
    s->stop = true;
    if (s->started) {
        pthread_join(s->thread, NULL);
    }
    free(s->span);
    free(s);
}
