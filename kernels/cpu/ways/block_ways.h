/* Which instruction set multiplies weights in blocks. All of them take the same sums,
 * so that a result has the same bits by any, and of each format the fastest is taken:
 * for one row of activations, for a few, and for many, which panels multiply.
 *
 * They are timed when the first weight of a format is loaded, each a millisecond or
 * less, and the choice is kept in a file (kept_ways.h). The environment variable
 * QUIRE_CPU_WAYS takes the place of both, here and in gemm/panels_from.c: `own` is the
 * instruction set that the backend has chosen and thresholds as they are built, a name
 * of QUIRE_CPU_ISA that set, or the best one below it that the functions exist for, and
 * `avx512vnni-256` that set with rows in vectors of 32 bytes.
 * With QUIRE_CPU_ISA set it is `own` unless it says `timed`. */
#ifndef QUIRE_KERNELS_CPU_WAYS_BLOCK_WAYS_H
#define QUIRE_KERNELS_CPU_WAYS_BLOCK_WAYS_H

#include "kernels/cpu/simd/kernels.h"
#include "kernels/weight_format.h"

/* What is timed. */
enum cpu_block_class { BLOCKS_ONE_ROW, BLOCKS_FEW_ROWS, BLOCKS_PANELS, BLOCK_CLASSES };

struct cpu_block_ways {
    enum cpu_isa isa;  /* that the table of functions was made for */
    enum cpu_isa most; /* the newest whose functions are taken */
    bool timed;        /* else those of `most` */
    bool halved;       /* of rows, those in vectors of 32 bytes */
    bool known[WEIGHT_FORMATS];
};

/* How functions are chosen for a table of `isa`. ERR_INVALID: QUIRE_CPU_WAYS names no
 * instruction set that has such functions, or a newer one. */
int cpu_block_ways_init(struct cpu_block_ways *w, enum cpu_isa isa, struct err *e);
/* Puts the functions for weights of format f into k, the first time that it is asked
 * for them. */
void cpu_block_ways(struct cpu_block_ways *w, struct cpu_kernels *k, enum weight_format_id f);
/* The choice among the times of n sets, of which ret[0] is taken unless another one is
 * faster by more than noise. Returns an index. */
int32_t cpu_block_fastest(const double *us, int32_t n);
/* The least time of `class` for format f by k's functions, in microseconds; each call
 * takes it again, and p keeps what is multiplied. */
struct block_product;
struct block_product *block_product_new(enum weight_format_id f); /* NULL: no memory */
void block_product_free(struct block_product *p);
double block_product_us(struct block_product *p, enum cpu_block_class class,
                        const struct cpu_blocks *b, const struct cpu_code_panels *panels);

#endif
