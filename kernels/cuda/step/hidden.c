/* The operations of draft heads. The hidden states of another backend are memory of the
 * same device; that backend's steps were waited for, so its stream needs no event. */
#include "kernels/cuda/step/hidden.h"

#include "kernels/cuda/cuda.h"

void cuda_hidden_store(struct backend *b, struct mat x, int32_t first)
{
    struct cuda_backend *c = cuda_of(b);

    if (c->kv.hidden_dtype != x.dtype || first + x.cols > c->kv.hidden) {
        err_set(&c->failed, ERR_INVALID, "cuda: the cache has no room for hidden states");
        return;
    }
    cuda_start(c);
    struct hidden_args a = {.row = x.data,
                            .row_stride = x.stride,
                            .block = c->kv_data + c->kv.hidden_offset,
                            .block_bytes = kv_layout_block_bytes(&c->kv),
                            .block_size = c->kv.block_size,
                            .width = c->kv.hidden,
                            .first = first,
                            .cols = x.cols,
                            .rows = cuda_rows(c, x),
                            .slot = c->arrays.slot};
    launch_hidden_store(&a, (int)x.dtype, c->stream);
}

struct hidden_pool cuda_hidden_pool(struct backend *b)
{
    const struct cuda_backend *c = cuda_of(b);

    if (!c->kv_data || c->kv.hidden == 0) {
        return (struct hidden_pool){0};
    }
    return (struct hidden_pool){.data = c->kv_data + c->kv.hidden_offset,
                                .block_bytes = kv_layout_block_bytes(&c->kv),
                                .block_size = c->kv.block_size,
                                .width = c->kv.hidden,
                                .dtype = c->kv.hidden_dtype};
}

void cuda_hidden_load(struct backend *b, struct mat out, const struct hidden_pool *p)
{
    struct cuda_backend *c = cuda_of(b);

    cuda_start(c);
    c->is_head = true;
    struct hidden_args a = {.row = out.data,
                            .row_stride = out.stride,
                            .block = (char *)(uintptr_t)p->data,
                            .block_bytes = p->block_bytes,
                            .block_size = p->block_size,
                            .width = p->width,
                            .cols = out.cols,
                            .rows = cuda_rows(c, out),
                            .slot = c->arrays.slot};
    launch_hidden_load(&a, (int)out.dtype, c->stream);
}

void cuda_hidden_own(struct backend *b, struct mat out, struct mat own)
{
    struct cuda_backend *c = cuda_of(b);

    cuda_start(c);
    c->is_head = true;
    launch_hidden_own(out.data, out.stride, own.data, own.stride, own.rows, c->arrays.header,
                      cuda_rows(c, out), out.cols, (int)out.dtype, c->stream);
}

void cuda_hidden_masked(struct backend *b, struct mat out, struct mat row)
{
    struct cuda_backend *c = cuda_of(b);

    cuda_start(c);
    c->is_head = true;
    launch_hidden_masked(out.data, out.stride, row.data, c->arrays.header, cuda_rows(c, out),
                         out.cols, (int)out.dtype, c->stream);
}

void cuda_spread(struct backend *b, struct mat out, struct mat x, struct mat id)
{
    struct cuda_backend *c = cuda_of(b);

    cuda_start(c);
    launch_spread(out.data, out.stride, x.data, x.stride, id.data, cuda_rows(c, out), out.cols,
                  x.cols, c->stream);
}
