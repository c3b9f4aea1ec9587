#include "config/base/cache_dir.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

bool cache_dir(char *ret, int64_t cap)
{
    const char *cache = getenv("CACHE_DIRECTORY");
    const char *xdg = getenv("XDG_CACHE_HOME");
    const char *home = getenv("HOME");
    int n = 0;

    if (cache && cache[0] == '/') { /* may be a list, separated by colons */
        n = snprintf(ret, (size_t)cap, "%.*s", (int)strcspn(cache, ":"), cache);
    } else if (xdg && xdg[0] == '/') {
        n = snprintf(ret, (size_t)cap, "%s/quire", xdg);
    } else if (home && home[0] == '/') {
        n = snprintf(ret, (size_t)cap, "%s/.cache/quire", home);
    }
    return n > 0 && n < cap;
}

void cache_make_dirs(char *path)
{
    for (char *p = strchr(path + 1, '/'); p != NULL; p = strchr(p + 1, '/')) {
        *p = '\0';
        mkdir(path, 0777);
        *p = '/';
    }
}
