/* Detection and choice of the instruction set at run time. */
#include "kernels/cpu/isa.h"

#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#ifdef __aarch64__
enum { HAS_NEON = true }; /* part of the architecture */
#else
enum { HAS_NEON = false };
#endif

static const char *const isa_names[] = {[CPU_PLAIN] = "plain",
                                        [CPU_AVX2] = "avx2",
                                        [CPU_AVX512] = "avx512",
                                        [CPU_AVX512_VNNI] = "avx512vnni",
                                        [CPU_AVX512_BF16] = "avx512bf16",
                                        [CPU_AMX] = "amx",
                                        [CPU_NEON] = "neon"};

const char *cpu_isa_name(enum cpu_isa isa)
{
    return isa_names[isa];
}

bool cpu_isa_named(enum cpu_isa *ret, const char *name)
{
    for (size_t i = 0; i < ARRAY_LEN(isa_names); i++) {
        if (strcmp(name, isa_names[i]) == 0) {
            *ret = (enum cpu_isa)i;
            return true;
        }
    }
    return false;
}

#if defined(__x86_64__)
/* Whether the processor has tiles of both kinds and the system lets this process use
 * their registers, which it asks for here (Linux: arch_prctl(2)). Asked by number, not
 * by name: clang 14 knows no names for them. */
static bool has_amx(void)
{
    enum {
        LEAF_7_EDX = (1 << 22) | (1 << 24) | (1 << 25),
        REQUEST_PERMISSION = 0x1023,
        TILES = 18
    };
    unsigned a = 0, b = 0, c = 0, d = 0;

    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & LEAF_7_EDX) == LEAF_7_EDX &&
           syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILES) == 0;
}
#endif

static bool has(enum cpu_isa isa)
{
    if (isa == CPU_PLAIN) {
        return true;
    }
#if defined(__x86_64__)
    __builtin_cpu_init();
    /* Not asked: F16C, which every CPU with AVX2 has, and which clang 14 does not
     * accept as a name here. */
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    switch (isa) {
    case CPU_AVX2:
        return avx2;
    case CPU_AVX512:
        return avx512;
    case CPU_AVX512_VNNI:
        return avx512 && __builtin_cpu_supports("avx512vnni");
    case CPU_AVX512_BF16:
        return avx512 && __builtin_cpu_supports("avx512vnni") &&
               __builtin_cpu_supports("avx512bf16");
    case CPU_AMX:
        return has(CPU_AVX512_BF16) && has_amx();
    default:
        return false;
    }
#else
    return isa == CPU_NEON && HAS_NEON;
#endif
}

int cpu_isa_detect(enum cpu_isa *ret, struct err *e)
{
    const char *asked = getenv("QUIRE_CPU_ISA");

    if (asked && asked[0] != '\0') {
        enum cpu_isa isa;
        if (cpu_isa_named(&isa, asked) && has(isa)) {
            *ret = isa;
            return 0;
        }
        return err_set(e, ERR_UNSUPPORTED, "QUIRE_CPU_ISA: this machine cannot run \"%.32s\"",
                       asked);
    }
    static const enum cpu_isa best_first[] = {CPU_AMX,    CPU_AVX512_BF16, CPU_AVX512_VNNI,
                                              CPU_AVX512, CPU_AVX2,        CPU_NEON};
    for (size_t i = 0; i < ARRAY_LEN(best_first); i++) {
        if (has(best_first[i])) {
            *ret = best_first[i];
            return 0;
        }
    }
    *ret = CPU_PLAIN;
    return 0;
}
