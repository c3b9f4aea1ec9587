/* How much memory the machine has for this process: the machine's own, or that of the
 * control groups (v2) it runs in, whichever is less. Swap does not count. */
#ifndef QUIRE_CONFIG_BASE_MEMORY_H
#define QUIRE_CONFIG_BASE_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct memory_size {
    int64_t total;     /* bytes */
    int64_t available; /* bytes that can be had without swapping: free ones, and files' pages */
};

/* False, with *ret untouched: the machine does not tell. */
bool memory_size_read(struct memory_size *ret);

/* Parts of the above, for its test. The number behind `name` at the start of a line, as
 * in "MemFree:  12 kB" and "active_file 12"; -1: there is none. */
int64_t memory_field(const char *text, const char *name);
/* Lessen *size by a group: the texts of its memory.max, memory.current and
 * memory.stat, each "" if it cannot be read. */
void memory_size_limit(struct memory_size *size, const char *max, const char *current,
                       const char *stat);

#endif
