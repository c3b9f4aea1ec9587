/* What is freed elsewhere than where it was used last: see reaper.h. */
#ifndef QUIRE_ENGINE_OUTPUT_GARBAGE_H
#define QUIRE_ENGINE_OUTPUT_GARBAGE_H

/* Stands in what is to be freed, so that handing it over allocates nothing. */
struct garbage {
    struct garbage *next;
    void (*free)(struct garbage *g);
};

#endif
