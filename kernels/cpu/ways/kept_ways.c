/* See kept_ways.h. */
#include "kernels/cpu/ways/kept_ways.h"

#include <stdio.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "config/base/base.h"
#include "config/base/cache_dir.h"

enum { PATH_BYTES = 512, MACHINE_BYTES = 160 };

/* The program's version, and the processor's name and signature: hypervisors give
 * different processors one name. */
static void name_machine(char *ret, size_t cap)
{
    unsigned r[12] = {0}, signature = 0;

#if defined(__x86_64__)
    unsigned b = 0, c = 0, d = 0;
    __get_cpuid(1, &signature, &b, &c, &d);
    for (unsigned i = 0; i < 3; i++) {
        __get_cpuid(0x80000002u + i, &r[4 * i], &r[4 * i + 1], &r[4 * i + 2], &r[4 * i + 3]);
    }
#endif
    snprintf(ret, cap, "%s %08x %.*s", QUIRE_VERSION, signature, (int)sizeof(r), (const char *)r);
}

int32_t cpu_way_kept(const struct kept_choice *c)
{
    char dir[PATH_BYTES], machine[MACHINE_BYTES];

    name_machine(machine, sizeof(machine));
    return kept_choose(cache_dir(dir, sizeof(dir)) ? dir : NULL, "cpu-ways", machine, c);
}
