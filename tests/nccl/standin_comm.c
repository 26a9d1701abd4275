/* Communicators: the registry, their failure, and the NCCL functions that make, ask and end them. */
#define _GNU_SOURCE
#include "standin.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

static pthread_mutex_t registry_lock = PTHREAD_MUTEX_INITIALIZER;
static comm *registry;
static uintptr_t last_handle;
static int misuses;

void *allocate(size_t nbytes) {
    void *memory = calloc(1, nbytes ? nbytes : 1);
    if (!memory)
        abort();
    return memory;
}

/* ---- references ------------------------------------------------------------------------------------------------ */

/* The open communicator with this handle, referenced; NULL if there is none (any more). */
comm *comm_acquire(uintptr_t handle) {
    pthread_mutex_lock(&registry_lock);
    comm *found = registry;
    while (found && found->handle != handle)
        found = found->next;
    if (found)
        comm_hold(found);
    pthread_mutex_unlock(&registry_lock);
    return found;
}

void comm_hold(comm *self) {
    pthread_mutex_lock(&self->lock);
    self->references++;
    pthread_mutex_unlock(&self->lock);
}

static void close_socket(int *descriptor) {
    if (*descriptor != NO_SOCKET)
        close(*descriptor);
    *descriptor = NO_SOCKET;
}

static void close_sockets(comm *self) {
    close_socket(&self->listener);
    for (int peer = 0; peer < self->size; peer++) {
        close_socket(&self->outgoing[peer]);
        close_socket(&self->incoming[peer]);
        close_socket(&self->arrived[peer]);
    }
}

void comm_release(comm *self) {
    pthread_mutex_lock(&self->lock);
    bool last = --self->references == 0;
    pthread_mutex_unlock(&self->lock);
    if (!last)
        return;
    close_sockets(self);
    close(self->wake);
    free(self->outgoing);
    free(self->incoming);
    free(self->arrived);
    pthread_cond_destroy(&self->changed);
    pthread_mutex_destroy(&self->lock);
    pthread_mutex_destroy(&self->setup);
    free(self);
}

/* ---- failure --------------------------------------------------------------------------------------------------- */

/* Makes `result` what ends everything on this communicator, now and later; a first failure stays. Returns that one.
 * Whoever is blocked in a poll sees `wake`; the peers see their sockets close. */
ncclResult_t comm_fail(comm *self, ncclResult_t result, const char *format, ...) {
    pthread_mutex_lock(&self->lock);
    if (self->failure == ncclSuccess) {
        self->failure = result;
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(self->text, sizeof self->text, format, arguments);
        va_end(arguments);
        eventfd_write(self->wake, 1);
        if (self->busy == 0)
            close_sockets(self);
    }
    result = self->failure;
    pthread_cond_broadcast(&self->changed);
    pthread_mutex_unlock(&self->lock);
    return result;
}

ncclResult_t comm_failure(comm *self) {
    pthread_mutex_lock(&self->lock);
    ncclResult_t result = self->failure;
    pthread_mutex_unlock(&self->lock);
    return result;
}

/* Between comm_enter and comm_leave the sockets stay open. Does not enter a communicator that has failed. */
ncclResult_t comm_enter(comm *self) {
    pthread_mutex_lock(&self->lock);
    ncclResult_t result = self->failure;
    if (result == ncclSuccess)
        self->busy++;
    pthread_mutex_unlock(&self->lock);
    return result;
}

void comm_leave(comm *self) {
    pthread_mutex_lock(&self->lock);
    self->busy--;
    if (self->failure != ncclSuccess && self->busy == 0)
        close_sockets(self);
    pthread_cond_broadcast(&self->changed);
    pthread_mutex_unlock(&self->lock);
}

/* ---- making them ----------------------------------------------------------------------------------------------- */

static int *no_sockets(int size) {
    int *sockets = allocate(sizeof *sockets * (size_t)size);
    for (int peer = 0; peer < size; peer++)
        sockets[peer] = NO_SOCKET;
    return sockets;
}

static comm *comm_new(int size, const ncclUniqueId *id, int rank) {
    comm *self = allocate(sizeof *self);
    self->rank = rank;
    self->size = size;
    self->references = 1;
    self->listener = NO_SOCKET;
    for (int i = 0; i < (KEY_SIZE - 1) / 2; i++)
        snprintf(self->key + 2 * i, 3, "%02x", (unsigned char)id->internal[i]);
    self->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    self->outgoing = no_sockets(size);
    self->incoming = no_sockets(size);
    self->arrived = no_sockets(size);
    pthread_mutex_init(&self->lock, NULL);
    pthread_mutex_init(&self->setup, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&self->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    return self;
}

EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    ssize_t filled = getrandom(id->internal, sizeof id->internal, 0);
    return filled == (ssize_t)sizeof id->internal ? ncclSuccess : ncclSystemError;
}

/* Blocks until all ranks have called it, as NCCL does. The configuration is not looked at. */
EXPORT ncclResult_t ncclCommInitRankConfig(void **handle, int size, ncclUniqueId id, int rank, void *config) {
    (void)config;
    if (!handle || size < 1 || size > MAX_RANKS || rank < 0 || rank >= size)
        return ncclInvalidArgument;
    comm *self = comm_new(size, &id, rank);
    ncclResult_t result = self->wake < 0 ? ncclSystemError : comm_listen(self);
    if (result == ncclSuccess)
        result = comm_meet(self);
    if (result != ncclSuccess) {
        comm_release(self);
        return result;
    }
    pthread_mutex_lock(&registry_lock);
    self->handle = ++last_handle;
    self->next = registry;
    registry = self;
    pthread_mutex_unlock(&registry_lock);
    *handle = (void *)self->handle;
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommInitRank(void **handle, int size, ncclUniqueId id, int rank) {
    return ncclCommInitRankConfig(handle, size, id, rank, NULL);
}

/* ---- ending them ----------------------------------------------------------------------------------------------- */

/* Takes it out of the registry, so that nobody can name it any more; the registry's reference becomes the caller's. */
static comm *comm_unregister(void *handle) {
    pthread_mutex_lock(&registry_lock);
    comm **link = &registry;
    while (*link && (*link)->handle != (uintptr_t)handle)
        link = &(*link)->next;
    comm *found = *link;
    if (found) {
        *link = found->next;
        pthread_mutex_lock(&found->lock);
        misuses += found->num_captured > 0;
        pthread_mutex_unlock(&found->lock);
    }
    pthread_mutex_unlock(&registry_lock);
    return found;
}

static void comm_end(comm *self, const char *why) {
    comm_fail(self, ncclInvalidUsage, "rank %d: the communicator was %s", self->rank, why);
    pthread_mutex_lock(&self->lock);
    while (self->busy > 0)
        pthread_cond_wait(&self->changed, &self->lock);
    pthread_mutex_unlock(&self->lock);
    comm_release(self);
}

/* Waits, as NCCL does, for everything that was issued: for ever if a peer does not come. */
EXPORT ncclResult_t ncclCommDestroy(void *handle) {
    comm *self = comm_unregister(handle);
    if (!self)
        return ncclInvalidArgument;
    pthread_mutex_lock(&self->lock);
    while (self->finished < self->issued)
        pthread_cond_wait(&self->changed, &self->lock);
    pthread_mutex_unlock(&self->lock);
    comm_end(self, "destroyed");
    return ncclSuccess;
}

/* From any thread. When it returns, nothing reads or writes the callers' memory any more. */
EXPORT ncclResult_t ncclCommAbort(void *handle) {
    comm *self = comm_unregister(handle);
    if (!self)
        return ncclInvalidArgument;
    comm_end(self, "aborted");
    return ncclSuccess;
}

/* ---- asking them ----------------------------------------------------------------------------------------------- */

EXPORT ncclResult_t ncclCommGetAsyncError(void *handle, ncclResult_t *error) {
    comm *self = comm_acquire((uintptr_t)handle);
    if (!self)
        return ncclInvalidArgument;
    *error = comm_failure(self);
    comm_release(self);
    return ncclSuccess;
}

/* What ended the communicator, in words. CuPy does not ask for it; the tests do, by ctypes. */
EXPORT const char *ncclGetLastError(void *handle) {
    static _Thread_local char text[TEXT_SIZE];
    comm *self = comm_acquire((uintptr_t)handle);
    text[0] = '\0';
    if (self) {
        pthread_mutex_lock(&self->lock);
        memcpy(text, self->text, sizeof text);
        pthread_mutex_unlock(&self->lock);
        comm_release(self);
    }
    return text;
}

static ncclResult_t answer(void *handle, int *result, size_t field) {
    comm *self = comm_acquire((uintptr_t)handle);
    if (!self || !result)
        return ncclInvalidArgument;
    *result = *(const int *)((const char *)self + field);
    comm_release(self);
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommUserRank(void *handle, int *rank) { return answer(handle, rank, offsetof(comm, rank)); }

EXPORT ncclResult_t ncclCommCount(void *handle, int *size) { return answer(handle, size, offsetof(comm, size)); }

EXPORT ncclResult_t ncclCommCuDevice(void *handle, int *device) {
    ncclResult_t result = answer(handle, device, offsetof(comm, rank));
    if (result == ncclSuccess)
        *device = 0; /* the only one there is */
    return result;
}

EXPORT int standin_counters(void *handle, uint64_t *totals) {
    comm *self = comm_acquire((uintptr_t)handle);
    if (!self)
        return ncclInvalidArgument;
    pthread_mutex_lock(&self->lock);
    memcpy(totals, self->counters, sizeof self->counters);
    pthread_mutex_unlock(&self->lock);
    comm_release(self);
    return ncclSuccess;
}

EXPORT int standin_misuses(void) {
    pthread_mutex_lock(&registry_lock);
    int result = misuses;
    pthread_mutex_unlock(&registry_lock);
    return result;
}
