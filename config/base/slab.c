#include "config/base/slab.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "config/base/base.h"

enum { LINE_BYTES = 64 };

/* Sanitizers find objects that are used after they were given back, or never are, in
 * the general heap alone. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { IN_PAGES = 0 };
#else
enum { IN_PAGES = 1 };
#endif

void *huge_alloc(size_t n_bytes)
{
    if (n_bytes < HUGE_PAGE_BYTES) {
        return malloc(MAX(n_bytes, (size_t)1));
    }
    n_bytes = (n_bytes + HUGE_PAGE_BYTES - 1) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
    void *p = aligned_alloc(HUGE_PAGE_BYTES, n_bytes);
    if (p) {
        madvise(p, n_bytes, MADV_HUGEPAGE); /* a hint: else there are small pages */
    }
    return p;
}

/* Bytes from one object to the next: an odd number of lines, so that the same line of
 * all objects is in every set of a cache. */
static size_t stride_of(const struct slab *s)
{
    return ((s->size + LINE_BYTES - 1) / LINE_BYTES | 1) * LINE_BYTES;
}

static bool add_page(struct slab *s)
{
    void **page = huge_alloc(HUGE_PAGE_BYTES);

    if (!page) {
        return false;
    }
    *page = s->page;
    s->page = page;
    s->next = (char *)page + LINE_BYTES;
    s->end = (char *)page + HUGE_PAGE_BYTES;
    return true;
}

static void *take_locked(struct slab *s)
{
    size_t stride = stride_of(s);
    void *p = s->given;

    if (p) {
        s->given = *(void **)p;
        return p;
    }
    if ((size_t)(s->end - s->next) < stride && !add_page(s)) {
        return NULL;
    }
    p = s->next;
    s->next += stride;
    return p;
}

void *slab_take(struct slab *s)
{
    void *p;

    if (IN_PAGES) {
        pthread_mutex_lock(&s->lock);
        p = take_locked(s);
        pthread_mutex_unlock(&s->lock);
    } else {
        p = aligned_alloc(LINE_BYTES, stride_of(s));
    }
    return p ? memset(p, 0, s->size) : NULL;
}

void slab_give(struct slab *s, void *p)
{
    if (!IN_PAGES || !p) {
        free(p);
        return;
    }
    pthread_mutex_lock(&s->lock);
    *(void **)p = s->given;
    s->given = p;
    pthread_mutex_unlock(&s->lock);
}
