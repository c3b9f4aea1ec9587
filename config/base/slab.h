/* Objects of one size that many threads take and give back, and that one thread walks
 * over again and again: next to each other and in huge pages, where the system has
 * them, so that a walk needs few entries of the TLB. In the general heap they are as
 * far apart as what is allocated along with them. */
#ifndef QUIRE_CONFIG_BASE_SLAB_H
#define QUIRE_CONFIG_BASE_SLAB_H

#include <pthread.h>
#include <stddef.h>

#define HUGE_PAGE_BYTES ((size_t)2 << 20)

/* n_bytes of undefined contents, freed by free(); in huge pages if there is at least
 * one's worth and the system has them. For what is touched as a whole: a page that is
 * touched anywhere is resident. NULL: out of memory. */
void *huge_alloc(size_t n_bytes);

/* Keeps the memory of as many objects as were taken at a time. */
struct slab {
    pthread_mutex_t lock; /* guards the rest */
    size_t size;          /* bytes of an object */
    void *given;          /* objects given back, each holding the next one; NULL: none */
    char *next, *end;     /* what is left of the newest page */
    void *page;           /* the newest page, which begins with the one before it */
};
/* The initial value of a static one. */
#define SLAB_OF(type) {.lock = PTHREAD_MUTEX_INITIALIZER, .size = sizeof(type)}

/* Zeroed memory at the beginning of a cache line; NULL: out of memory. */
void *slab_take(struct slab *s);
/* `p` may be NULL. */
void slab_give(struct slab *s, void *p);

#endif
