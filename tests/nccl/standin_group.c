/* Groups, and the NCCL functions that fill them: what CuPy calls to send and receive. */
#define _GNU_SOURCE
#include "standin.h"

#include <stdlib.h>
#include <string.h>

static int (*take_batch)(void *stream, void *batch);

/* The calling thread's group. */
static _Thread_local struct {
    int depth;
    ncclResult_t error;
    transfer *transfers; /* each holds a reference to its communicator */
    int count, capacity;
} group;

EXPORT void standin_set_enqueue(int (*enqueue)(void *stream, void *batch)) {
    __atomic_store_n(&take_batch, enqueue, __ATOMIC_SEQ_CST);
}

/* ---- launching ------------------------------------------------------------------------------------------------- */

/* Gives the batch to its stream, or runs it here. */
static ncclResult_t hand_over(batch *batch, void *stream) {
    int (*enqueue)(void *, void *) = __atomic_load_n(&take_batch, __ATOMIC_SEQ_CST);
    if (enqueue && enqueue(stream, batch) == 0)
        return ncclSuccess;
    ncclResult_t result = (ncclResult_t)standin_run(batch, standin_issue(batch));
    standin_free(batch);
    return result;
}

static ncclResult_t launch(const transfer *transfers, int count) {
    batch *batch;
    ncclResult_t result = batch_new(transfers, count, &batch);
    if (result == ncclSuccess)
        result = batch_start(batch);
    if (result == ncclSuccess)
        return hand_over(batch, transfers[0].stream);
    standin_free(batch);
    return result;
}

/* What the stand-in does not do is refused rather than done wrong: see the header. */
static ncclResult_t check_group(void) {
    for (int i = 0; i < group.count; i++)
        for (int j = 0; j < i; j++) {
            const transfer *one = &group.transfers[i], *other = &group.transfers[j];
            if (one->comm == other->comm && one->stream != other->stream)
                return ncclInvalidUsage;
            if (one->comm != other->comm && strcmp(one->comm->key, other->comm->key) == 0)
                return ncclInvalidUsage;
        }
    return ncclSuccess;
}

/* One batch for each communicator of the group, in the order of its first use. */
static ncclResult_t launch_group(void) {
    ncclResult_t result = check_group();
    transfer *ours = allocate(sizeof *ours * (size_t)group.count);
    bool *taken = allocate((size_t)group.count);
    for (int i = 0; i < group.count && result == ncclSuccess; i++) {
        int count = 0;
        for (int j = i; j < group.count && !taken[i]; j++)
            if (group.transfers[j].comm == group.transfers[i].comm)
                ours[count++] = group.transfers[j];
        for (int j = group.count - 1; j >= i; j--)
            taken[j] = taken[j] || group.transfers[j].comm == group.transfers[i].comm;
        if (count > 0)
            result = launch(ours, count);
    }
    free(ours);
    free(taken);
    return result;
}

static void empty_group(void) {
    for (int i = 0; i < group.count; i++)
        comm_release(group.transfers[i].comm);
    free(group.transfers);
    group.transfers = NULL;
    group.count = group.capacity = 0;
    group.error = ncclSuccess;
}

EXPORT ncclResult_t ncclGroupStart(void) {
    group.depth++;
    return ncclSuccess;
}

EXPORT ncclResult_t ncclGroupEnd(void) {
    if (group.depth == 0)
        return ncclInvalidUsage;
    if (--group.depth > 0)
        return ncclSuccess;
    ncclResult_t result = group.error != ncclSuccess ? group.error : launch_group();
    empty_group();
    return result;
}

/* ---- calls ----------------------------------------------------------------------------------------------------- */

/* Bytes of an element by ncclDataType_t: int8, uint8, int32, uint32, int64, uint64, float16, float32, float64,
 * bfloat16, float8_e4m3, float8_e5m2. */
static const size_t element_nbytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
enum { NUM_TYPES = sizeof element_nbytes / sizeof *element_nbytes };

static ncclResult_t refuse(ncclResult_t error) {
    if (group.depth > 0)
        group.error = error;
    return error;
}

static void append(transfer new) {
    if (group.count == group.capacity) {
        group.capacity = group.capacity ? 2 * group.capacity : 8;
        transfer *larger = allocate(sizeof *larger * (size_t)group.capacity);
        if (group.count)
            memcpy(larger, group.transfers, sizeof *larger * (size_t)group.count);
        free(group.transfers);
        group.transfers = larger;
    }
    group.transfers[group.count++] = new;
}

static ncclResult_t add(bool is_send, void *memory, size_t count, int type, int peer, void *handle, void *stream) {
    comm *comm = comm_acquire((uintptr_t)handle);
    if (!comm)
        return refuse(ncclInvalidArgument);
    ncclResult_t error = comm_failure(comm);
    if (type < 0 || type >= NUM_TYPES || peer < 0 || peer >= comm->size || (!memory && count > 0))
        error = ncclInvalidArgument;
    if (error != ncclSuccess) {
        comm_release(comm);
        return refuse(error);
    }
    ncclGroupStart(); /* a call outside a group is a group of its own */
    append((transfer){is_send, peer, memory, count * element_nbytes[type], comm, stream});
    return ncclGroupEnd();
}

EXPORT ncclResult_t ncclSend(const void *memory, size_t count, int type, int peer, void *handle, void *stream) {
    return add(true, (void *)memory, count, type, peer, handle, stream);
}

EXPORT ncclResult_t ncclRecv(void *memory, size_t count, int type, int peer, void *handle, void *stream) {
    return add(false, memory, count, type, peer, handle, stream);
}

/* ---- the rest -------------------------------------------------------------------------------------------------- */

EXPORT ncclResult_t ncclGetVersion(int *version) {
    *version = STANDIN_VERSION;
    return ncclSuccess;
}

EXPORT const char *ncclGetErrorString(ncclResult_t result) {
    switch (result) {
    case ncclSuccess: return "no error (stand-in)";
    case ncclUnhandledCudaError: return "unhandled cuda error (stand-in)";
    case ncclSystemError: return "unhandled system error (stand-in)";
    case ncclInternalError: return "internal error (stand-in)";
    case ncclInvalidArgument: return "invalid argument (stand-in)";
    case ncclInvalidUsage: return "invalid usage (stand-in)";
    case ncclRemoteError: return "remote process exited or there was a network error (stand-in)";
    default: return "unknown result code (stand-in)";
    }
}

/* NCCL's own collectives, which this library never calls: imported by CuPy, refused here whatever their arguments. */
#define REFUSED(name)                                                                                                  \
    EXPORT ncclResult_t name(void) { return refuse(ncclInvalidUsage); }

REFUSED(ncclAllGather)
REFUSED(ncclAllReduce)
REFUSED(ncclBcast)
REFUSED(ncclBroadcast)
REFUSED(ncclCommInitAll)
REFUSED(ncclCommSplit)
REFUSED(ncclReduce)
REFUSED(ncclReduceScatter)
