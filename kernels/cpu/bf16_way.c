/* See bf16_way.h. The file is one line: the way, and the machine that it was found
 * for. Anything else in it counts as nothing and is replaced. */
#include "kernels/cpu/bf16_way.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>
#include <xxhash.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "config/base/cache_dir.h"

enum {
    PATH_BYTES = 512,
    LINE_BYTES = 192,
    LOCK_TRIES = 500, /* a process that is stopped while it measures stops no other */
    LOCK_NAP_US = 2000
};

static const char *const way_names[] = {[CPU_BF16_PAIRS] = "pairs", [CPU_BF16_FLOATS] = "floats"};

const char *cpu_bf16_name(enum cpu_bf16 way)
{
    return way_names[way];
}

/* ---- the file ---- */

static void line_of(char line[LINE_BYTES], enum cpu_bf16 way, const char *machine)
{
    snprintf(line, LINE_BYTES, "%s %.160s\n", way_names[way], machine);
}

static bool read_way(int fd, const char *machine, enum cpu_bf16 *ret)
{
    char found[LINE_BYTES], line[LINE_BYTES];
    ssize_t n = pread(fd, found, sizeof(found), 0);

    for (enum cpu_bf16 way = CPU_BF16_PAIRS; n > 0 && way <= CPU_BF16_FLOATS; way++) {
        line_of(line, way, machine);
        if ((size_t)n == strlen(line) && memcmp(found, line, (size_t)n) == 0) {
            *ret = way;
            return true;
        }
    }
    return false;
}

/* A file that was written in part is one of the bad ones that the next process
 * replaces. */
static void write_way(int fd, const char *machine, enum cpu_bf16 way)
{
    char line[LINE_BYTES];

    line_of(line, way, machine);
    size_t n = strlen(line);
    if (ftruncate(fd, 0) == 0 && pwrite(fd, line, n, 0) != (ssize_t)n) {
        fd = ftruncate(fd, 0); /* the disk is full */
    }
}

static bool lock(int fd)
{
    for (int i = 0; i < LOCK_TRIES; i++) {
        if (flock(fd, LOCK_EX | LOCK_NB) == 0) {
            return true;
        }
        usleep(LOCK_NAP_US);
    }
    return false;
}

/* Opens the file, to be written if possible; -1: there is none. */
static int open_file(const char *dir, const char *machine)
{
    char path[PATH_BYTES];
    int n = snprintf(path, sizeof(path), "%s/cpu-bf16-%016llx", dir,
                     (unsigned long long)XXH64(machine, strlen(machine), 0));

    if (n >= (int)sizeof(path)) {
        return -1;
    }
    cache_make_dirs(path);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    return fd >= 0 ? fd : open(path, O_RDONLY | O_CLOEXEC);
}

enum cpu_bf16 cpu_bf16_kept(const char *dir, const char *machine,
                            bool (*measure)(enum cpu_bf16 *ret))
{
    enum cpu_bf16 way = CPU_BF16_PAIRS;
    int fd = dir ? open_file(dir, machine) : -1;

    if (fd < 0) {
        return measure(&way) ? way : CPU_BF16_PAIRS;
    }
    /* what is there is never changed, so it needs no lock */
    if (!read_way(fd, machine, &way)) {
        bool locked = lock(fd);
        if (!read_way(fd, machine, &way) && measure(&way) && locked) {
            write_way(fd, machine, way);
        }
    }
    close(fd); /* and with it the lock */
    return way;
}

/* ---- the choice ---- */

enum cpu_bf16 cpu_bf16_faster(double pairs_us, double floats_us)
{
    const double margin = 1.05; /* a gain within noise is no reason to leave the instruction */

    return floats_us * margin < pairs_us ? CPU_BF16_FLOATS : CPU_BF16_PAIRS;
}

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

static enum cpu_bf16 chosen;

static void choose(void)
{
    char dir[PATH_BYTES], machine[128];

    name_machine(machine, sizeof(machine));
    chosen = cpu_bf16_kept(cache_dir(dir, sizeof(dir)) ? dir : NULL, machine, cpu_bf16_time);
}

int cpu_bf16_detect(enum cpu_bf16 *ret, enum cpu_isa isa, struct err *e)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    const char *asked = getenv("QUIRE_CPU_BF16");
    enum cpu_bf16 way = CPU_BF16_PAIRS;

    if (asked && asked[0] != '\0') {
        way = strcmp(asked, way_names[CPU_BF16_FLOATS]) == 0 ? CPU_BF16_FLOATS : CPU_BF16_PAIRS;
        if (strcmp(asked, way_names[way]) != 0) {
            return err_set(e, ERR_INVALID,
                           "QUIRE_CPU_BF16: \"%.32s\" is neither \"pairs\" nor \"floats\"", asked);
        }
    } else if (isa == CPU_AVX512_BF16) {
        pthread_once(&once, choose);
        way = chosen;
    }
    *ret = isa == CPU_AVX512_BF16 ? way : CPU_BF16_PAIRS;
    return 0;
}
