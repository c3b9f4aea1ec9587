/* The memory of the machine and of its control groups (see memory.h). */
#include "config/base/memory.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config/base/base.h"

#define GROUPS "/sys/fs/cgroup"

enum { TEXT_BYTES = 8 * 1024 };

/* The beginning of a file; "": it cannot be read. */
static const char *read_text(const char *path, char text[TEXT_BYTES])
{
    FILE *f = fopen(path, "re");
    size_t n = f ? fread(text, 1, TEXT_BYTES - 1, f) : 0;

    if (f) {
        fclose(f);
    }
    text[n] = '\0';
    return text;
}

int64_t memory_field(const char *text, const char *name)
{
    size_t len = strlen(name);

    for (const char *line = text; line; line = strchr(line, '\n')) {
        line += *line == '\n';
        if (strncmp(line, name, len) == 0 && line[len] && strchr(": ", line[len])) {
            return strtoll(line + len + 1, NULL, 10);
        }
    }
    return -1;
}

void memory_size_limit(struct memory_size *size, const char *max, const char *current,
                       const char *stat)
{
    int64_t limit = strtoll(max, NULL, 10); /* 0 of "max", which is none */

    if (limit <= 0) {
        return;
    }
    int64_t used = strtoll(current, NULL, 10);
    const char *const dropped[] = {"active_file", "inactive_file", "slab_reclaimable"};
    for (size_t i = 0; i < ARRAY_LEN(dropped); i++) {
        used -= MAX(memory_field(stat, dropped[i]), 0);
    }
    size->total = MIN(size->total, limit);
    size->available = MIN(size->available, MAX(limit - MAX(used, 0), 0));
}

static void limit_by_group(struct memory_size *size, const char *group)
{
    char max[TEXT_BYTES], current[TEXT_BYTES], stat[TEXT_BYTES], path[PATH_MAX];

    snprintf(path, sizeof(path), GROUPS "%s/memory.max", group);
    read_text(path, max);
    snprintf(path, sizeof(path), GROUPS "%s/memory.current", group);
    read_text(path, current);
    snprintf(path, sizeof(path), GROUPS "%s/memory.stat", group);
    memory_size_limit(size, max, current, read_text(path, stat));
}

/* The process's group and those around it. In a container its path is "/", and the
 * limit stands at the root of what the container sees. */
static void limit_by_groups(struct memory_size *size)
{
    char text[TEXT_BYTES], group[PATH_MAX] = "";
    const char *line = strstr(read_text("/proc/self/cgroup", text), "0::/");

    if (line && (line == text || line[-1] == '\n')) {
        snprintf(group, sizeof(group), "%.*s", (int)MIN(strcspn(line + 3, "\n"), PATH_MAX / 2),
                 line + 3);
    }
    for (char *end = strstr(group, "/..") ? NULL : strrchr(group, '/'); end;
         end = strrchr(group, '/')) {
        if (end[1]) {
            limit_by_group(size, group);
        }
        *end = '\0';
    }
    limit_by_group(size, "");
}

bool memory_size_read(struct memory_size *ret)
{
    char text[TEXT_BYTES];

    read_text("/proc/meminfo", text);
    int64_t total = memory_field(text, "MemTotal"), available = memory_field(text, "MemAvailable");
    if (total <= 0 || available < 0) {
        return false;
    }
    struct memory_size size = {.total = total * 1024, .available = available * 1024};
    limit_by_groups(&size);
    *ret = size;
    return true;
}
