/* A fake of several ranks: n oracles, each given every step as the message that a rank
 * in another process gets. All must give the same results, which shows that their block
 * tables, blocks, copies and swaps agree. With several stages each oracle computes the
 * step in micro-batches, as the stages of a pipeline do. */
#ifndef QUIRE_TESTS_SIM_MANY_H
#define QUIRE_TESTS_SIM_MANY_H

#include "tests/sim/oracle.h"

enum { MANY_MAX = 8 };

int many_open(struct executor **ret, const struct oracle_config *c, int32_t n, int32_t n_stages,
              struct err *e);

#endif
