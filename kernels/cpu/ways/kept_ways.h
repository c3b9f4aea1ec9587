/* Ways that timing chooses among on this machine, kept for its processes. */
#ifndef QUIRE_KERNELS_CPU_WAYS_KEPT_WAYS_H
#define QUIRE_KERNELS_CPU_WAYS_KEPT_WAYS_H

#include "config/base/kept.h"

/* kept_choose in the file of this program's version and processor, in cache_dir. */
int32_t cpu_way_kept(const struct kept_choice *c);

#endif
