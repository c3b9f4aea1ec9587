/* See kept.h. */
#include "config/base/kept.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>
#include <xxhash.h>

#include "config/base/cache_dir.h"

enum {
    PATH_BYTES = 512,
    NAME_BYTES = 64,
    TEXT_BYTES = 8192, /* of a file; there is nothing longer */
    LOCK_TRIES = 500,  /* a process that is stopped while it measures stops no other */
    LOCK_NAP_US = 2000
};

static const char END[] = "end\n";

bool kept_lock(int fd)
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
static int open_file(const char *dir, const char *prefix, const char *machine)
{
    char path[PATH_BYTES];
    int n = snprintf(path, sizeof(path), "%s/%s-%016llx", dir, prefix,
                     (unsigned long long)XXH64(machine, strlen(machine), 0));

    if (n >= (int)sizeof(path)) {
        return -1;
    }
    cache_make_dirs(path);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    return fd >= 0 ? fd : open(path, O_RDONLY | O_CLOEXEC);
}

/* The lines of name and value of a whole file, as text; "" for any other. */
static void read_lines(int fd, const char *machine, char text[TEXT_BYTES])
{
    ssize_t n = pread(fd, text, TEXT_BYTES - 1, 0);
    size_t head = strlen(machine), end = sizeof(END) - 1, all = n > 0 ? (size_t)n : 0;

    text[all] = '\0';
    bool whole = strlen(text) == all && all > head + end && strncmp(text, machine, head) == 0 &&
                 text[head] == '\n' && text[all - end - 1] == '\n' &&
                 strcmp(text + all - end, END) == 0;
    if (!whole) {
        text[0] = '\0';
        return;
    }
    text[all - end] = '\0';
    memmove(text, text + head + 1, all - end - head);
}

/* The line of a choice, and its value; NULL: there is none. */
static char *find_line(char *text, const struct kept_choice *c, int32_t *ret)
{
    size_t name = strlen(c->name);

    *ret = -1;
    for (char *line = text; *line != '\0';) {
        char *end = strchr(line, '\n');
        if (!end) {
            return NULL;
        }
        if (strncmp(line, c->name, name) == 0 && line[name] == ' ') {
            const char *word = line + name + 1;
            size_t n = (size_t)(end - word);
            for (int32_t i = 0; i < c->n; i++) {
                *ret = strlen(c->value[i]) == n && memcmp(word, c->value[i], n) == 0 ? i : *ret;
            }
            return line;
        }
        line = end + 1;
    }
    return NULL;
}

/* Puts the choice into the file. One that was written in part is a bad one, which the
 * next process replaces. */
static void write_choice(int fd, const char *machine, char text[TEXT_BYTES],
                         const struct kept_choice *c, int32_t value)
{
    char whole[TEXT_BYTES];
    int32_t old;
    char *line = find_line(text, c, &old);

    if (line) { /* of a value that there is no more */
        char *next = strchr(line, '\n') + 1;
        memmove(line, next, strlen(next) + 1);
    }
    int n = snprintf(whole, sizeof(whole), "%s\n%s%.*s %s\n%s", machine, text, NAME_BYTES, c->name,
                     c->value[value], END);
    if (n >= (int)sizeof(whole)) { /* begun anew */
        n = snprintf(whole, sizeof(whole), "%s\n%.*s %s\n%s", machine, NAME_BYTES, c->name,
                     c->value[value], END);
    }
    if (n < (int)sizeof(whole) && ftruncate(fd, 0) == 0 && pwrite(fd, whole, (size_t)n, 0) != n) {
        fd = ftruncate(fd, 0); /* the disk is full */
    }
}

int32_t kept_choose(const char *dir, const char *prefix, const char *machine,
                    const struct kept_choice *c)
{
    char text[TEXT_BYTES];
    int32_t value = -1;
    int fd = dir ? open_file(dir, prefix, machine) : -1;

    if (fd < 0) {
        return c->measure(c->arg);
    }
    read_lines(fd, machine, text);
    find_line(text, c, &value);
    if (value < 0) { /* or it is being written: seen under the lock */
        bool locked = kept_lock(fd);
        read_lines(fd, machine, text);
        find_line(text, c, &value);
        if (value < 0) {
            value = c->measure(c->arg);
            if (value >= 0 && locked) {
                write_choice(fd, machine, text, c, value);
            }
        }
    }
    close(fd); /* and with it the lock */
    return value;
}
