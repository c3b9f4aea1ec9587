/* Renderers: threads that write the JSON of outputs that are too long for the engine's
 * output thread: echoed prompts, many log-probabilities, long texts.
 *
 * A stream queues such outputs. While its queue is not empty, all its outputs go
 * through it, so that their order is kept, and one renderer at a time works on the
 * stream: it renders one portion, then the next stream gets its turn. A stream whose
 * client does not read rests (RENDER_BLOCKED) until it does. Short outputs of streams
 * without a queue never come here, so no stream delays another one's events.
 *
 * While much of a stream waits to be rendered, its requests are parked (engine_park):
 * they generate nothing meanwhile.
 */
#ifndef QUIRE_SERVER_STREAM_RENDER_H
#define QUIRE_SERVER_STREAM_RENDER_H

#include <pthread.h>

#include "config/base/buf.h"
#include "engine/engine.h"

enum { RENDERERS_MAX = 8 };

struct stream;

struct renderers {
    pthread_mutex_t lock;        /* innermost: may be taken under a stream's lock */
    pthread_cond_t wake;         /* a stream was queued, or `stopping` was set */
    struct stream *first, *last; /* streams to render, linked by next_rendered */
    bool stopping;               /* under lock, as are first and last */
    pthread_t thread[RENDERERS_MAX];
    int n; /* threads started */
};

/* Start the threads, as many as suit the number of cores. */
int renderers_open(struct renderers *r, struct err *e);
/* No stream may be queued. */
void renderers_close(struct renderers *r);
/* Append `s` to the list of streams to render; the renderers take a reference. */
void renderers_push(struct renderers *r, struct stream *s);

/* Queue `o`, an output of choice `index`, for the renderers. `first`: it makes the
 * choice's first event. 0 or ERR_NOMEM. Under s->lock. */
int stream_defer(struct stream *s, int32_t index, const struct output *o, bool first);
/* The client has read something: queue a stream that is RENDER_BLOCKED again. Under
 * s->lock. */
void stream_wake_renderer(struct stream *s);
/* Free the queue, while no renderer works on the stream. Under s->lock. */
void stream_drop_queue(struct stream *s);

#endif
