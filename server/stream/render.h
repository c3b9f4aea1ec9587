/* Renderers: threads that make the JSON of what is too long for the engine's output
 * thread to make on its way: prompts that go out, log-probabilities beyond a few, long
 * texts.
 *
 * A stream with such pieces holds them in a queue. While the queue is not empty,
 * everything of the stream goes through it, so the order stays, and one renderer at a
 * time works on it: a portion, then the next stream has its turn. A stream whose client
 * does not read is left alone until it does. What one stream asks for delays no other
 * stream's events: those that are short, and have no queue, never come here.
 *
 * While much of a stream waits for a renderer, its requests are parked (engine_park):
 * they make nothing more meanwhile.
 */
#ifndef QUIRE_SERVER_STREAM_RENDER_H
#define QUIRE_SERVER_STREAM_RENDER_H

#include <pthread.h>

#include "config/base/buf.h"
#include "engine/engine.h"

enum { RENDERERS_MAX = 8 };

struct stream;

struct renderers {
    pthread_mutex_t lock;
    pthread_cond_t wake;
    struct stream *first, *last; /* that have something to be made, linked by next_rendered */
    bool stopping;
    pthread_t thread[RENDERERS_MAX];
    int n;
};

/* Starts the threads: by cores. */
int renderers_open(struct renderers *r, struct err *e);
/* No stream may be queued. */
void renderers_close(struct renderers *r);
/* To the end of the line; the renderers take a reference. */
void renderers_push(struct renderers *r, struct stream *s);

/* Under s->lock: keep `o` for the renderers, as a piece of choice `index`. `first`: the
 * choice's first event. 0 or ERR_NOMEM. */
int stream_defer(struct stream *s, int32_t index, const struct output *o, bool first);
/* Under s->lock: a renderer that left the stream alone looks at it again. */
void stream_rouse(struct stream *s);
/* Under s->lock: free the queue; none of the renderers has the stream. */
void stream_drop_queue(struct stream *s);

#endif
