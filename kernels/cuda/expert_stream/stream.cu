/* Experts of a few rows in one launch, from the residual stream's norm to the sum of
 * the chosen experts (experts.h): one persistent block a multiprocessor, all
 * co-resident.
 *
 *     norm and router   each block norms all rows; as many as there are tiles of the
 *                       router multiply one each
 *     choice            each block waits for all scores and chooses for itself, a warp
 *                       a row
 *     up                tiles of 8 columns of a chosen expert: their rows of gate and
 *                       of up, times all rows
 *     down              tiles of 16 columns of the result; a block takes all chosen
 *                       experts of a tile, in the order of their indices
 *
 * Blocks wait for scores and for what up makes, which are their own flags: a word that
 * is not there yet has all bits set, which no result has. Two sets of them take turns
 * (struct expert_exchange), and a launch clears what the one before left, so that no
 * block waits for all others. Load warps walk the weights of all phases and keep a ring
 * of stages full by bulk copies: they wait for the choice, since it says which weights
 * these are, but not for what up makes.
 *
 * Products are those of the fused launch (fused_decode.h): 16 rows of weights are the A
 * operand, up to 8 rows of activations the B operand. A stage has 24 groups of 32
 * columns; teams of warps take stages in turn, so that several are multiplied at a time
 * and the instructions of one wait less for one another. A lane has 8 neighbouring
 * columns of a group. What rows have that an expert was not chosen for is multiplied
 * and forgotten. Which team has a stage depends on the experts of all rows, and so does
 * the order in which a row's sums are added.
 *
 * Weights of up and down may be e4m3 codes, which become fp16 in registers, as
 * activations do (scale_rows, give_halves); the scale of a row or of a group of columns
 * multiplies its sums. Those of panels (panels.h) are
 * widened with their groups' scales, of int4 without; up and down may be panels of two
 * kinds (stream_panels.cu), in a ring whose stages have room for either. The router's
 * weights have 16 bits always.
 *
 * A shared expert whose width is that of some experts is so many more chosen ones.
 */
#include "kernels/cuda/expert_stream/stream_kernel.cuh"

namespace
{

using namespace expert_stream;

/* Whether the weights are e4m3 codes, whose results of up have two planes. */
bool by_halves(const expert_few *a)
{
    return a->up.w_scale && !a->up.panels;
}

/* STATEMENT with L = the stream_launch for the operands of `a`, which are no groups. */
#define DISPATCH_STREAM(a, STATEMENT)                                     \
    do {                                                                  \
        if ((a)->up.panels == PANELS_INT4) {                              \
            using L = stream_launch<__nv_bfloat16, B_INT4, B_INT4, true>; \
            STATEMENT;                                                    \
        } else if ((a)->up.w_scale && (a)->up.n_groups > 1) {             \
            using L = stream_launch<__nv_bfloat16, 8, 8, true>;           \
            STATEMENT;                                                    \
        } else if ((a)->up.w_scale) {                                     \
            using L = stream_launch<__nv_bfloat16, 8, 8, false>;          \
            STATEMENT;                                                    \
        } else if ((a)->up.type == T_F16) {                               \
            using L = stream_launch<__half, 16, 16, false>;               \
            STATEMENT;                                                    \
        } else {                                                          \
            using L = stream_launch<__nv_bfloat16, 16, 16, false>;        \
            STATEMENT;                                                    \
        }                                                                 \
    } while (0)

/* Whether stream_panels.cu has the kernel. */
bool by_panels(const expert_few *a)
{
    return a->up.panels && a->up.panels != PANELS_INT4;
}

bool aligned16(const void *p, int64_t stride)
{
    return (uintptr_t)p % 16 == 0 && stride % 8 == 0;
}

/* A row begins at a multiple of 16 bytes; a group of columns has one scale. */
bool codes_fit(const expert_product *p)
{
    if (p->panels) {
        return p->type == T_BF16 && p->w_scale && p->k % (2 * PANEL_GROUP) == 0 &&
               p->width % TILE == 0;
    }
    if (p->w_scale) {
        return p->type == T_BF16 && (p->n_groups == 1 || p->group_shift >= 5) && p->k % 16 == 0 &&
               aligned16(p->w, p->w_stride / 2) && p->w_stride % 16 == 0;
    }
    return aligned16(p->w, p->w_stride);
}

/* Both products have weights of one kind, or of two kinds of panels, which
 * stream_panels.cu checks. */
bool alike(const expert_product *p, const expert_product *o)
{
    if (p->panels && p->panels != PANELS_INT4) {
        return o->panels;
    }
    return p->panels == o->panels && !p->w_scale == !o->w_scale &&
           (p->n_groups > 1) == (o->n_groups > 1);
}

/* The shared expert's weights have 16 bits, as the experts' have, and it is some
 * experts wide. */
bool shared_fits(const expert_few *a)
{
    return a->shared_parts == 0 ||
           (!a->up.w_scale && aligned16(a->shared_up, a->shared_up_stride) &&
            aligned16(a->shared_down, a->shared_down_stride) &&
            a->route.rows * a->route.top + a->shared_parts <= MOST_PAIRS);
}

} // namespace

extern "C" bool expert_stream_fits(const struct expert_few *a, int32_t n_blocks)
{
    const struct expert_product *up = &a->up, *down = &a->down;
    bool norm = !a->normed || (!a->norm.layer_norm && !a->norm.bias && a->norm.weight &&
                               a->norm.weight_type == up->type && aligned16(a->norm.weight, 0));
    int64_t middle = (int64_t)a->route.rows * (a->route.top + a->shared_parts) * up->width *
                     (by_halves(a) ? 2 : 1);
    bool fits = a->exchange && middle <= EXPERT_STREAM_MIDDLE &&
                a->route.rows <= EXPERT_STREAM_ROWS && up->type != T_F32 && norm &&
                a->route.rows * a->route.top <= MOST_PAIRS && a->route.n <= MOST_EXPERTS &&
                (a->route.n + ROUTER_TILE - 1) / ROUTER_TILE <= n_blocks && up->k % GROUP == 0 &&
                up->k <= MOST_DEPTH * STAGE_COLS && up->width % GROUP == 0 && codes_fit(up) &&
                codes_fit(down) && alike(up, down) && shared_fits(a) &&
                aligned16(up->x, up->x_stride) && aligned16(a->router, a->router_stride) &&
                aligned16(a->h, a->h_stride);

    if (fits && by_panels(a)) {
        fits = expert_stream_panels_fit(a);
    } else if (fits) {
        DISPATCH_STREAM(a, fits = L::fits());
    }
    return fits;
}

extern "C" void launch_expert_stream(const struct expert_few *a, const struct expert_ranks *ranks,
                                     int32_t n_blocks, cudaStream_t stream)
{
    if (by_panels(a)) {
        launch_expert_stream_panels(a, ranks, n_blocks, stream);
        return;
    }
    DISPATCH_STREAM(a, L::run(*a, *ranks, n_blocks, stream));
}
