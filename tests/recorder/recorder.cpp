/* A CUDA runtime and a cuBLASLt that run nothing: linked into the plugin in their place,
 * they write down what each rank would run, for scripts/check-ranks to compare.
 *
 * A line is a launch: its kernel, its grid, and where ranks meet in it. Ranks meet in
 * sums, in exchanges of tokens and logits, and in NCCL's calls; of each the line has all
 * that must be the same on every rank, or one waits for ever. A graph's lines are
 * written when it is launched. The file is rank<N> in the directory RECORDER_DIR.
 *
 * Device memory is memory that is never touched, so weights are dummies, tokens are 0,
 * and a model of any size starts at once. What ranks need not agree on differs by
 * purpose: times are drawn by rank, and each has a folder of its own for what is timed.
 * Of the last rank memory is slower by the factor RECORDER_SLOW, and none is free
 * during steps where RECORDER_FULL is set.
 */
#include <cuda_runtime_api.h>
#include <cxxabi.h>
#include <dlfcn.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "kernels/cuda/experts/experts.h"
#include "kernels/cuda/fused_decode/fused_decode.h"
#include "tests/recorder/recorder.h"

namespace
{

/* What is recorded between the beginning and the end of a capture. */
struct recorded_graph {
    std::vector<std::string> lines;
};

recorded_graph *graph;  /* being captured, or NULL */
FILE *out;              /* NULL: no line has been written */
std::mutex one_at_once; /* NCCL's initialisation has a thread of its own */

std::map<const void *, std::string> &kernel_names(void)
{
    static auto *names = new std::map<const void *, std::string>;

    return *names;
}

void write_line(const std::string &line)
{
    std::lock_guard<std::mutex> lock(one_at_once);

    if (graph) {
        graph->lines.push_back(line);
        return;
    }
    if (!out) {
        const char *dir = getenv("RECORDER_DIR");
        std::string path = std::string(dir ? dir : ".") + "/rank" + std::to_string(recorder.device);
        out = fopen(path.c_str(), "w");
    }
    if (out) {
        fprintf(out, "%s\n", line.c_str());
        fflush(out);
    }
}

__attribute__((format(printf, 1, 2))) std::string format(const char *f, ...)
{
    char text[1024];
    va_list args;

    va_start(args, f);
    vsnprintf(text, sizeof(text), f, args);
    va_end(args);
    return text;
}

/* A kernel's name as it is declared, without the parameters. */
std::string plain_name(const char *mangled)
{
    int status;
    char *text = abi::__cxa_demangle(mangled, NULL, NULL, &status);
    std::string s = text ? text : mangled;

    free(text);
    for (size_t at; (at = s.find("(anonymous namespace)::")) != std::string::npos;) {
        s.erase(at, strlen("(anonymous namespace)::"));
    }
    for (size_t at; (at = s.find("_GLOBAL__N__")) != std::string::npos;) {
        s.erase(at, s.find("::", at) + 2 - at);
    }
    s.erase(0, s.compare(0, 5, "void ") == 0 ? 5 : 0);
    int depth = 0;
    for (size_t i = 0; i < s.size(); i++) {
        depth += s[i] == '<' ? 1 : s[i] == '>' ? -1 : 0;
        if (s[i] == '(' && depth == 0) {
            return s.substr(0, i);
        }
    }
    return s;
}

/* ---- where ranks meet ---- */

bool begins(const std::string &s, const char *with)
{
    return s.compare(0, strlen(with), with) == 0;
}

template <typename T> const T &argument(void **args, int i)
{
    return *(const T *)args[i];
}

/* A sum by way of the inboxes of fused launches, which may be another launch on another
 * rank. */
std::string fused_sum(int n_ranks, int rows, int columns)
{
    return n_ranks > 0 ? format(" meets: fused %d x %d;", rows, columns) : "";
}

std::string fused_launch(const fused_args &a)
{
    std::string s;

    for (int i = 0; i < a.n_ops; i++) {
        s += fused_sum(a.op[i].partial ? a.p2p.n_ranks : 0, a.rows, a.op[i].n);
    }
    return s;
}

/* A sum in the epilogue of a product of few rows, whose tiles must be the same. */
std::string small_sum(const std::string &name, int n_ranks, dim3 grid, int rows)
{
    return n_ranks > 0 ? format(" meets: small %s, %u blocks, %d;", name.c_str(), grid.x, rows)
                       : "";
}

/* All kernels that wait for other ranks. */
std::string meetings(const std::string &name, dim3 grid, void **args)
{
    if (begins(name, "p2p_sum_kernel")) {
        return format(" meets: row %d x %d;", argument<int32_t>(args, 8),
                      argument<int32_t>(args, 9));
    }
    if (begins(name, "p2p_rows_kernel") || begins(name, "topk_merge_kernel")) {
        return format(" meets: %s, %u x %u blocks;", name.c_str(), grid.x, grid.y);
    }
    if (begins(name, "p2p_tokens_kernel") || begins(name, "p2p_share_tokens_kernel")) {
        return format(" meets: %s;", name.c_str());
    }
    if (begins(name, "fused_decode_kernel")) {
        return fused_launch(argument<fused_args>(args, 0));
    }
    if (name.find("stream_kernel<") != std::string::npos) {
        const expert_few &a = argument<expert_few>(args, 0);
        return fused_sum(argument<expert_ranks>(args, 1).n_ranks, a.route.rows, a.down.width);
    }
    if (begins(name, "linear_kernel<")) {
        const expert_linear &a = argument<expert_linear>(args, 0);
        return fused_sum(argument<expert_ranks>(args, 1).n_ranks, a.rows, a.product.width);
    }
    bool few = begins(name, "few_mixed_kernel<");
    if (few || begins(name, "small_kernel<") || begins(name, "mixed_kernel<")) {
        int32_t rows;
        int n_ranks = recorder_small_args(args[few ? 0 : 2], &rows);
        return small_sum(name, n_ranks, grid, rows);
    }
    /* of small_codes.cu, a sum: ranks that do not sum still have the same tiles */
    bool codes = begins(name, "codes_kernel<") && name.find(", 2>") != std::string::npos;
    return small_sum(name, codes && getenv("RECORDER_RANKS") ? 1 : 0, grid, 0);
}

void launched(const void *kernel, dim3 grid, void **args)
{
    auto found = kernel_names().find(kernel);
    std::string name = found == kernel_names().end() ? "a kernel" : found->second;

    recorder.in_steps |= begins(name, "prologue_kernel");
    write_line(format("%s [%u, %u, %u]", name.c_str(), grid.x, grid.y, grid.z) +
               meetings(name, grid, args));
}

/* What the plugin's NCCL calls (nccl.c). */
void nccl_called(const char *what, long count)
{
    write_line(format("NCCL meets: %s %ld;", what, count));
}

__attribute__((constructor)) void hear_nccl(void)
{
    void *library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    void *hook = library ? dlsym(library, "recorder_hears") : NULL;

    if (hook) {
        *(void (**)(const char *, long))hook = nccl_called;
    }
}

} // namespace

extern "C" {

/* ---- what nvcc calls ---- */

void **__cudaRegisterFatBinary(void *)
{
    static void *handle;

    return &handle;
}
char __cudaInitModule(void **)
{
    return 1;
}
void __cudaRegisterFatBinaryEnd(void **) {}
void __cudaUnregisterFatBinary(void **) {}
void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}
void __cudaRegisterFunction(void **, const char *kernel, char *, const char *name, int, uint3 *,
                            uint3 *, dim3 *, dim3 *, int *)
{
    kernel_names()[kernel] = plain_name(name);
}
cudaError_t __cudaGetKernel(cudaKernel_t *ret, const void *kernel)
{
    *ret = (cudaKernel_t)kernel;
    return cudaSuccess;
}
static dim3 pushed_grid;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3, size_t, CUstream_st *)
{
    pushed_grid = grid;
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *bytes, void *)
{
    *grid = pushed_grid;
    *block = dim3(1);
    *bytes = 0;
    return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3, void **args, size_t,
                               cudaStream_t)
{
    launched((const void *)kernel, grid, args);
    return cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *kernel, void **args)
{
    launched(kernel, c->gridDim, args);
    return cudaSuccess;
}

/* ---- graphs ---- */

cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode)
{
    graph = new recorded_graph;
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t *ret)
{
    *ret = (cudaGraph_t)graph;
    graph = NULL;
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *ret, cudaGraph_t g, unsigned long long)
{
    *ret = (cudaGraphExec_t)g;
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t g, cudaStream_t)
{
    for (const std::string &line : ((recorded_graph *)g)->lines) {
        write_line(line);
    }
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t)
{
    return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t)
{
    return cudaSuccess; /* its lines are the launched one's */
}

} // extern "C"
