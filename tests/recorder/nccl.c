/* The libnccl.so.2 of recorder.c: calls are told to the recorder. What rank 0 gets
 * from all others in a group is one meeting on each, whatever the number of calls. */
#include <nccl.h>

#include <stdlib.h>
#include <string.h>

/* Set by the plugin's recorder; NULL: nobody hears. */
void (*recorder_hears)(const char *what, long count);

static ncclResult_t told(const char *what, size_t count)
{
    if (recorder_hears) {
        recorder_hears(what, (long)count);
    }
    return ncclSuccess;
}

ncclResult_t ncclGetVersion(int *ret)
{
    *ret = NCCL_VERSION_CODE;
    return ncclSuccess;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId *ret)
{
    memset(ret, 0, sizeof(*ret));
    return ncclSuccess;
}
ncclResult_t ncclCommInitRank(ncclComm_t *ret, int n, ncclUniqueId id, int rank)
{
    *ret = malloc(1);
    return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t c)
{
    free((void *)c);
    return ncclSuccess;
}
ncclResult_t ncclAllReduce(const void *from, void *to, size_t n, ncclDataType_t t, ncclRedOp_t op,
                           ncclComm_t c, cudaStream_t s)
{
    return told("all-reduce", n);
}
ncclResult_t ncclBroadcast(const void *from, void *to, size_t n, ncclDataType_t t, int root,
                           ncclComm_t c, cudaStream_t s)
{
    return told("broadcast", n);
}
ncclResult_t ncclSend(const void *from, size_t n, ncclDataType_t t, int peer, ncclComm_t c,
                      cudaStream_t s)
{
    return told("gather", 0);
}
ncclResult_t ncclRecv(void *to, size_t n, ncclDataType_t t, int peer, ncclComm_t c, cudaStream_t s)
{
    return ncclSuccess;
}
ncclResult_t ncclGroupStart(void)
{
    return ncclSuccess;
}
ncclResult_t ncclGroupEnd(void)
{
    return told("gather", 0);
}
const char *ncclGetErrorString(ncclResult_t rc)
{
    return "the recorder's NCCL has no errors";
}
