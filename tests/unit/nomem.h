/* Allocations made to fail in turn. malloc and its kin are replaced in the program that
 * includes this (one file of it), also for the libraries; under a sanitizer, which
 * replaces them itself, tests are skipped. */
#ifndef QUIRE_TESTS_UNIT_NOMEM_H
#define QUIRE_TESTS_UNIT_NOMEM_H

#include <limits.h>
#include <malloc.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "config/base/base.h"

#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define REPLACED_MALLOC 1
#else
#define REPLACED_MALLOC 0
#endif

static long countdown = -1; /* allocations until one fails; -1: none does */
static long live;           /* allocations not freed, while counting */
static long live_bytes;     /* bytes of them, as the allocator rounds them */
static long peak_bytes;     /* the most that live_bytes was */
/* Of a thread: what others allocate meanwhile neither counts nor fails. */
static _Thread_local bool counting;

#if REPLACED_MALLOC
static inline bool fails(void)
{
    return counting && countdown >= 0 && countdown-- == 0;
}

void *__libc_malloc(size_t n);
void *__libc_calloc(size_t n, size_t size);
void *__libc_realloc(void *p, size_t n);
void *__libc_memalign(size_t alignment, size_t n);
void __libc_free(void *p);

static inline void *counted(void *p)
{
    live += counting;
    live_bytes += counting ? (long)malloc_usable_size(p) : 0;
    peak_bytes = MAX(peak_bytes, live_bytes);
    return p;
}

void *malloc(size_t n)
{
    if (fails()) {
        return NULL;
    }
    return counted(__libc_malloc(n));
}

void *calloc(size_t n, size_t size)
{
    if (fails()) {
        return NULL;
    }
    return counted(__libc_calloc(n, size));
}

void *realloc(void *p, size_t n)
{
    if (fails()) {
        return NULL;
    }
    live -= counting && p != NULL;
    live_bytes -= counting ? (long)malloc_usable_size(p) : 0;
    return counted(__libc_realloc(p, n));
}

void *aligned_alloc(size_t alignment, size_t n)
{
    if (fails()) {
        return NULL;
    }
    return counted(__libc_memalign(alignment, n));
}

void free(void *p)
{
    live -= counting && p != NULL;
    live_bytes -= counting ? (long)malloc_usable_size(p) : 0;
    __libc_free(p);
}
#endif

/* Takes something apart again when it could be made. 0, or the error. */
typedef int nomem_step(void);

/* `step` with allocation `i` failing, counted from 0: no leak. Returns how many
 * allocations there were; *ret_noticed: it was refused. */
static inline long nomem_try(nomem_step *step, long i, bool *ret_noticed)
{
    countdown = i;
    live = 0;
    counting = true;
    int rc = step();
    counting = false;
    long made = i - countdown;
    bool failed = countdown < 0;
    countdown = -1;
    if (live != 0) {
        fail_msg("%ld allocations leaked when number %ld failed", live, i);
    }
    if (!failed) {
        assert_int_equal(rc, 0);
    }
    *ret_noticed = rc < 0;
    return made;
}

/* The first, second, third ... allocation fails, to the last; where there are more than
 * `dense`, of those beyond only some do, ever rarer, so that the time stays bounded.
 * There must be `at_least` so many. `spared` may fail without a refusal: those that are
 * done without, such as the buffer of a FILE or the machine code of a pattern. */
static inline void nomem_each(nomem_step *step, long dense, long at_least, int spared)
{
    if (!REPLACED_MALLOC) {
        skip();
    }
    bool noticed;
    long n = nomem_try(step, LONG_MAX, &noticed);
    assert_true(n >= at_least);
    for (long i = 0; i < n; i += i < dense ? 1 : 1 + (i - dense) / 16) {
        nomem_try(step, i, &noticed);
        if (!noticed && spared-- == 0) {
            fail_msg("allocation %ld failed and nobody noticed", i);
        }
    }
}

#endif
