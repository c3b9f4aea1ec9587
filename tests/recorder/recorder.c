/* A CUDA runtime and a cuBLASLt that run nothing: linked into the plugin in place of
 * theirs, they write down what each rank would run, for scripts/gpu-ranks to compare.
 *
 * A line is a launch: its kernel, its grid, and where ranks meet in it. Ranks meet in
 * sums, in exchanges of tokens and logits, and in NCCL's calls; of each the line has
 * all that must be the same on every rank, or one waits for ever. A graph's lines are
 * written when it is launched. The file is rank<N> in the directory RECORDER_DIR.
 *
 * Device memory is memory that is never touched, so weights are dummies, tokens are 0,
 * and a model of any size starts at once. What ranks need not agree on differs by
 * purpose: times are drawn by rank, and each has a folder of its own for what is timed.
 * Of the last rank memory is slower by the factor RECORDER_SLOW, and none is free
 * during steps where RECORDER_FULL is set.
 */
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/experts/experts.h"
#include "kernels/cuda/fused_decode/fused_decode.h"
#include "tests/recorder/recorder.h"

/* What is recorded between the beginning and the end of a capture. */
struct recorded_graph {
    FILE *lines; /* writes `text` */
    char *text;
    size_t n_bytes;
};

struct kernel {
    const void *function;
    char *name;
};

/* NCCL's initialisation has a thread of its own: this guards where lines go. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct recorded_graph *graph; /* being captured, or NULL */
static FILE *out;                    /* NULL: no line has been written */
static struct kernel *kernels;       /* [n_kernels] */
static int n_kernels;

static void *checked(void *p)
{
    if (!p) {
        abort();
    }
    return p;
}

/* Where the next line goes. */
static FILE *lines(void)
{
    const char *dir = getenv("RECORDER_DIR");
    char path[4096];

    if (graph) {
        return graph->lines;
    }
    if (!out) {
        snprintf(path, sizeof(path), "%s/rank%d", dir ? dir : ".", recorder.device);
        out = checked(fopen(path, "w"));
        setvbuf(out, NULL, _IOLBF, 0);
    }
    return out;
}

/* ---- names of kernels ---- */

/* The C++ runtime's, which the plugin has: a name as it is declared; free() it. */
char *__cxa_demangle(const char *mangled, char *buffer, size_t *n_bytes, int *status);

/* Take away every `what`, and what follows up to `end` if that is not NULL. */
static void cut(char *s, const char *what, const char *end)
{
    for (char *at; (at = strstr(s, what));) {
        const char *from = end ? strstr(at, end) : at + strlen(what);
        from = !end ? from : from ? from + strlen(end) : at + strlen(at);
        memmove(at, from, strlen(from) + 1);
    }
}

/* A kernel's name as it is declared, without namespaces and parameters. */
static char *plain_name(const char *mangled)
{
    int status, depth = 0;
    char *s = __cxa_demangle(mangled, NULL, NULL, &status);

    s = checked(s ? s : strdup(mangled));
    cut(s, "(anonymous namespace)::", NULL);
    cut(s, "_GLOBAL__N__", "::");
    if (strncmp(s, "void ", 5) == 0) {
        memmove(s, s + 5, strlen(s + 5) + 1);
    }
    for (char *at = s; *at; at++) {
        depth += *at == '<' ? 1 : *at == '>' ? -1 : 0;
        if (*at == '(' && depth == 0) {
            *at = '\0';
            break;
        }
    }
    return s;
}

static const char *name_of(const void *function)
{
    for (int i = 0; i < n_kernels; i++) {
        if (kernels[i].function == function) {
            return kernels[i].name;
        }
    }
    return "a kernel";
}

static bool begins(const char *s, const char *with)
{
    return strncmp(s, with, strlen(with)) == 0;
}

/* ---- where ranks meet ---- */

/* A sum by way of the inboxes of fused launches, which may be another launch on another
 * rank. */
static void fused_sum(FILE *to, int n_ranks, int rows, int columns)
{
    if (n_ranks > 0) {
        fprintf(to, " meets: fused %d x %d;", rows, columns);
    }
}

static void fused_launch(FILE *to, const struct fused_args *a)
{
    for (int i = 0; i < a->n_ops; i++) {
        fused_sum(to, a->op[i].partial ? a->p2p.n_ranks : 0, a->rows, a->op[i].n);
    }
}

/* A sum in the epilogue of a product of few rows, whose tiles must be the same. */
static void small_sum(FILE *to, const char *name, int n_ranks, dim3 grid, int rows)
{
    if (n_ranks > 0) {
        fprintf(to, " meets: small %s, %u blocks, %d;", name, grid.x, rows);
    }
}

/* All kernels that wait for other ranks. */
static void meetings(FILE *to, const char *name, dim3 grid, void **args)
{
    if (begins(name, "p2p_sum_kernel")) {
        fprintf(to, " meets: row %d x %d;", *(const int32_t *)args[8], *(const int32_t *)args[9]);
    } else if (begins(name, "p2p_rows_kernel") || begins(name, "topk_merge_kernel")) {
        fprintf(to, " meets: %s, %u x %u blocks;", name, grid.x, grid.y);
    } else if (begins(name, "p2p_tokens_kernel") || begins(name, "p2p_share_tokens_kernel")) {
        fprintf(to, " meets: %s;", name);
    } else if (begins(name, "fused_decode_kernel")) {
        fused_launch(to, args[0]);
    } else if (strstr(name, "stream_kernel<")) {
        const struct expert_few *a = args[0];
        const struct expert_ranks *ranks = args[1];
        fused_sum(to, ranks->n_ranks, a->route.rows, a->down.width);
    } else if (begins(name, "linear_kernel<")) {
        const struct expert_linear *a = args[0];
        const struct expert_ranks *ranks = args[1];
        fused_sum(to, ranks->n_ranks, a->rows, a->product.width);
    } else if (begins(name, "few_mixed_kernel<") || begins(name, "small_kernel<") ||
               begins(name, "mixed_kernel<")) {
        int32_t rows, at = begins(name, "few_mixed_kernel<") ? 0 : 2;
        int n_ranks = recorder_small_args(args[at], &rows);
        small_sum(to, name, n_ranks, grid, rows);
    } else if (begins(name, "codes_kernel<") && strstr(name, ", 2>")) {
        /* of small_codes.cu, a sum: ranks that do not sum still have the same tiles */
        small_sum(to, name, getenv("RECORDER_RANKS") ? 1 : 0, grid, 0);
    }
}

static void launched(const void *function, dim3 grid, void **args)
{
    const char *name = name_of(function);

    pthread_mutex_lock(&lock);
    FILE *to = lines();
    recorder.in_steps |= begins(name, "prologue_kernel");
    fprintf(to, "%s [%u, %u, %u]", name, grid.x, grid.y, grid.z);
    meetings(to, name, grid, args);
    fputc('\n', to);
    pthread_mutex_unlock(&lock);
}

/* What the plugin's NCCL calls (nccl.c). */
static void nccl_called(const char *what, long count)
{
    pthread_mutex_lock(&lock);
    fprintf(lines(), "NCCL meets: %s %ld;\n", what, count);
    pthread_mutex_unlock(&lock);
}

__attribute__((constructor)) static void hear_nccl(void)
{
    void *library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    void *hook = library ? dlsym(library, "recorder_hears") : NULL;

    if (hook) {
        *(void (**)(const char *, long))hook = nccl_called;
    }
}

/* ---- what nvcc calls ---- */

void **__cudaRegisterFatBinary(void *image)
{
    static void *handle;

    return &handle;
}
char __cudaInitModule(void **handle)
{
    return 1;
}
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external,
                       size_t n_bytes, int constant, int global)
{
}
void __cudaRegisterFunction(void **handle, const char *function, char *device, const char *name,
                            int thread_limit, uint3 *thread, uint3 *block, dim3 *block_dim,
                            dim3 *grid_dim, int *warp_size)
{
    if ((n_kernels & (n_kernels - 1)) == 0) {
        size_t room = n_kernels > 0 ? 2 * (size_t)n_kernels : 1;
        kernels = checked(realloc(kernels, room * sizeof(*kernels)));
    }
    kernels[n_kernels++] = (struct kernel){function, plain_name(name)};
}
cudaError_t __cudaGetKernel(cudaKernel_t *ret, const void *function)
{
    *ret = (cudaKernel_t)function;
    return cudaSuccess;
}
static dim3 pushed_grid;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t n_bytes, void *stream)
{
    pushed_grid = grid;
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *n_bytes, void *stream)
{
    *grid = pushed_grid;
    *block = (dim3){1, 1, 1};
    *n_bytes = 0;
    return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **args,
                               size_t n_bytes, cudaStream_t stream)
{
    launched(kernel, grid, args);
    return cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *function, void **args)
{
    launched(function, c->gridDim, args);
    return cudaSuccess;
}

/* ---- graphs ---- */

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
    graph = checked(calloc(1, sizeof(*graph)));
    graph->lines = checked(open_memstream(&graph->text, &graph->n_bytes));
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *ret)
{
    fclose(graph->lines);
    *ret = (cudaGraph_t)graph;
    graph = NULL;
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *ret, cudaGraph_t g, unsigned long long flags)
{
    *ret = (cudaGraphExec_t)g;
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t g, cudaStream_t stream)
{
    pthread_mutex_lock(&lock);
    fputs(((const struct recorded_graph *)g)->text, lines());
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t g)
{
    return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t g)
{
    return cudaSuccess; /* its lines are the launched one's */
}
