/* Sums of products for references: in float64, and in float32 as a plain implementation
 * adds them.
 *
 * A sum whose terms follow one another waits for itself at each of them. So eight sums
 * are made beside each other: those of eight rows of a matrix, each in the order of its
 * columns, or the eight parts of one sum. */
#ifndef QUIRE_TESTS_UNIT_FLOAT64_H
#define QUIRE_TESTS_UNIT_FLOAT64_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* ThreadSanitizer does not watch references, which one thread computes from data of its
 * own. */
#ifdef __SANITIZE_THREAD__
#define RIG_UNWATCHED __attribute__((no_sanitize_thread))
#else
#define RIG_UNWATCHED
#endif

enum { BESIDE = 8 };

/* What every processor has registers for. */
typedef double two __attribute__((vector_size(16), aligned(8), may_alias));
typedef float four __attribute__((vector_size(16), aligned(4), may_alias));
typedef float half_four __attribute__((vector_size(8), aligned(4), may_alias));

/* Eight numbers. */
struct doubles {
    two a, b, c, d;
};
struct floats {
    four a, b;
};

RIG_UNWATCHED static inline two widened(const float *x)
{
    return __builtin_convertvector(*(const half_four *)x, two);
}

/* ---- one sum ---- */

RIG_UNWATCHED static inline double sum_of(const struct doubles *s)
{
    two sum = s->a + s->b + s->c + s->d;

    return sum[0] + sum[1];
}

/* Of a[i] * b[i], in eight parts. */
RIG_UNWATCHED static inline double dot_of(const double *a, const float *b, int32_t n)
{
    struct doubles s = {0};
    double rest = 0;
    int32_t i = 0;

    for (; i + BESIDE <= n; i += BESIDE) {
        s.a += *(const two *)(a + i) * widened(b + i);
        s.b += *(const two *)(a + i + 2) * widened(b + i + 2);
        s.c += *(const two *)(a + i + 4) * widened(b + i + 4);
        s.d += *(const two *)(a + i + 6) * widened(b + i + 6);
    }
    for (; i < n; i++) {
        rest += a[i] * b[i];
    }
    return sum_of(&s) + rest;
}

RIG_UNWATCHED static inline double dot(const float *a, const float *b, int32_t n)
{
    struct doubles s = {0};
    double rest = 0;
    int32_t i = 0;

    for (; i + BESIDE <= n; i += BESIDE) {
        s.a += widened(a + i) * widened(b + i);
        s.b += widened(a + i + 2) * widened(b + i + 2);
        s.c += widened(a + i + 4) * widened(b + i + 4);
        s.d += widened(a + i + 6) * widened(b + i + 6);
    }
    for (; i < n; i++) {
        rest += (double)a[i] * b[i];
    }
    return sum_of(&s) + rest;
}

/* ---- sums of eight rows ---- */

/* The rows of a matrix, eight at a time, column by column; zeros in place of those that
 * the last eight lack. */
struct panels {
    int32_t cols;
    float *w; /* [rows / 8, cols, 8] */
};

/* Of rows that are `stride` elements apart. */
RIG_UNWATCHED static inline struct panels panels_of(const float *w, int64_t stride, int32_t rows,
                                                    int32_t cols)
{
    struct panels p = {.cols = cols};
    int64_t padded = ((int64_t)rows + BESIDE - 1) / BESIDE * BESIDE;

    p.w = malloc((size_t)(padded > 0 ? padded : 1) * (size_t)cols * sizeof(*p.w));
    assert_non_null(p.w);
    for (int64_t row = 0; row < padded; row++) {
        float *to = p.w + (row / BESIDE * cols * BESIDE) + row % BESIDE;
        for (int32_t c = 0; c < cols; c++) {
            to[(int64_t)c * BESIDE] = row < rows ? w[row * stride + c] : 0;
        }
    }
    return p;
}

static inline void panels_free(struct panels *p)
{
    free(p->w);
    p->w = NULL;
}

/* The products of x with eight rows from `first` on, a multiple of eight. */
RIG_UNWATCHED static inline void panels_dots(const struct panels *p, int64_t first, const double *x,
                                             double *ret)
{
    struct doubles s = {0};
    const float *w = p->w + first * p->cols;

    for (int32_t c = 0; c < p->cols; c++, w += BESIDE) {
        two f = {x[c], x[c]};
        s.a += f * widened(w);
        s.b += f * widened(w + 2);
        s.c += f * widened(w + 4);
        s.d += f * widened(w + 6);
    }
    memcpy(ret, &s, sizeof(s));
}

/* The same in float32. */
RIG_UNWATCHED static inline void panels_dots32(const struct panels *p, int64_t first,
                                               const float *x, float *ret)
{
    struct floats s = {0};
    const float *w = p->w + first * p->cols;

    for (int32_t c = 0; c < p->cols; c++, w += BESIDE) {
        four f = {x[c], x[c], x[c], x[c]};
        s.a += f * *(const four *)w;
        s.b += f * *(const four *)(w + 4);
    }
    memcpy(ret, &s, sizeof(s));
}

/* x w^T for x [rows, cols] and w [n, cols] in both precisions, each with a matrix of
 * its own; x32 NULL: in float64 alone. */
RIG_UNWATCHED static inline void panels_products(const double *x, const float *x32, const float *w,
                                                 int32_t rows, int32_t n, int32_t cols, double *ret,
                                                 float *ret32)
{
    double some[BESIDE];
    float some32[BESIDE];

    for (int32_t j = 0; j < n; j += BESIDE) {
        int32_t here = n - j < BESIDE ? n - j : BESIDE;
        struct panels p = panels_of(w + (int64_t)j * cols, cols, here, cols);
        for (int64_t i = 0; i < rows; i++) {
            panels_dots(&p, 0, x + i * cols, some);
            memcpy(ret + i * n + j, some, (size_t)here * sizeof(*some));
            if (x32) {
                panels_dots32(&p, 0, x32 + i * cols, some32);
                memcpy(ret32 + i * n + j, some32, (size_t)here * sizeof(*some32));
            }
        }
        panels_free(&p);
    }
}

/* y[i] += factor * x[i]. */
RIG_UNWATCHED static inline void add_scaled(double *y, double factor, const float *x, int32_t n)
{
    two f = {factor, factor};
    int32_t i = 0;

    for (; i + 2 <= n; i += 2) {
        *(two *)(y + i) += f * widened(x + i);
    }
    for (; i < n; i++) {
        y[i] += factor * x[i];
    }
}

RIG_UNWATCHED static inline void add_scaled32(float *y, float factor, const float *x, int32_t n)
{
    four f = {factor, factor, factor, factor};
    int32_t i = 0;

    for (; i + 4 <= n; i += 4) {
        *(four *)(y + i) += f * *(const four *)(x + i);
    }
    for (; i < n; i++) {
        y[i] += factor * x[i];
    }
}

#endif
