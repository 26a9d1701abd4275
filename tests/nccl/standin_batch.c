/* Batches: how the transfers of one communicator in one group run. All lanes advance together in one poll loop. */
#define _GNU_SOURCE
#include "standin_batch.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ---- running --------------------------------------------------------------------------------------------------- */

static int lanes_of(const batch *self, lane *lanes) {
    int num_lanes = 0;
    for (int i = 0; i < self->num_transfers; i++) {
        const transfer *each = &self->transfers[i];
        int known = 0;
        while (known < num_lanes && (lanes[known].peer != each->peer || lanes[known].is_send != each->is_send))
            known++;
        if (known < num_lanes)
            continue;
        lane *new = &lanes[num_lanes++];
        *new = (lane){.batch = self, .is_send = each->is_send, .peer = each->peer};
        new->socket = each->is_send ? self->comm->outgoing[each->peer] : self->comm->incoming[each->peer];
        lane_seek(new, i);
    }
    return num_lanes;
}

/* Waits until a lane can go on; false once the limit has passed. */
static bool wait_for_lanes(comm *comm, const lane *lanes, int num_lanes, struct pollfd *ready, int64_t limit) {
    ready[0] = (struct pollfd){.fd = comm->wake, .events = POLLIN};
    for (int i = 0; i < num_lanes; i++) {
        bool over = lanes[i].next == lanes[i].batch->num_transfers;
        ready[1 + i].fd = over ? NO_SOCKET : lanes[i].socket;
        ready[1 + i].events = lane_writes(&lanes[i]) ? POLLOUT : POLLIN;
    }
    int64_t left = limit < 0 ? -1 : limit - now_ms();
    if (limit >= 0 && left <= 0)
        return false;
    poll(ready, (nfds_t)num_lanes + 1, (int)left);
    return true;
}

static ncclResult_t move_all(batch *self, lane *lanes, struct pollfd *ready) {
    int num_lanes = lanes_of(self, lanes);
    int64_t limit = wait_limit_ms();
    for (;;) {
        ncclResult_t result = comm_failure(self->comm);
        bool over = true;
        for (int i = 0; i < num_lanes && result == ncclSuccess; i++) {
            result = lane_advance(self->comm, &lanes[i]);
            over = over && lanes[i].next == self->num_transfers;
        }
        if (result != ncclSuccess || over)
            return result;
        if (!wait_for_lanes(self->comm, lanes, num_lanes, ready, limit))
            return comm_fail(self->comm, ncclSystemError, "rank %d: timed out in a group", self->comm->rank);
    }
}

/* Waits for the batch's turn. Called with the communicator's lock. */
static ncclResult_t wait_for_turn(comm *comm, uint64_t place) {
    int64_t limit = wait_limit_ms();
    struct timespec end = {.tv_sec = limit / 1000, .tv_nsec = limit % 1000 * 1000000};
    while (comm->failure == ncclSuccess && comm->served != place) {
        if (limit < 0)
            pthread_cond_wait(&comm->changed, &comm->lock);
        else if (pthread_cond_timedwait(&comm->changed, &comm->lock, &end) == ETIMEDOUT)
            return ncclSystemError;
    }
    return comm->failure;
}

EXPORT uint64_t standin_issue(void *handle) {
    comm *comm = ((batch *)handle)->comm;
    pthread_mutex_lock(&comm->lock);
    uint64_t place = comm->issued++;
    pthread_mutex_unlock(&comm->lock);
    return place;
}

EXPORT int standin_run(void *handle, uint64_t place) {
    batch *self = handle;
    comm *comm = self->comm;
    pthread_mutex_lock(&comm->lock);
    ncclResult_t result = wait_for_turn(comm, place);
    comm->busy += result == ncclSuccess;
    pthread_mutex_unlock(&comm->lock);
    if (result == ncclSuccess) {
        for (int i = 0; i < self->num_copies; i++)
            memmove(self->copies[i].to, self->copies[i].from, self->copies[i].nbytes);
        lane *lanes = allocate(sizeof *lanes * (size_t)self->num_transfers);
        struct pollfd *ready = allocate(sizeof *ready * (size_t)(self->num_transfers + 1));
        result = move_all(self, lanes, ready);
        free(ready);
        free(lanes);
        pthread_mutex_lock(&comm->lock);
        comm->served++;
        pthread_mutex_unlock(&comm->lock);
        comm_leave(comm);
    } else {
        result = comm_fail(comm, result, "rank %d: timed out before a group's turn", comm->rank);
    }
    pthread_mutex_lock(&comm->lock);
    comm->finished++;
    pthread_cond_broadcast(&comm->changed);
    pthread_mutex_unlock(&comm->lock);
    return (int)result;
}

/* ---- making and freeing ---------------------------------------------------------------------------------------- */

EXPORT void standin_captured(void *handle) {
    batch *self = handle;
    pthread_mutex_lock(&self->comm->lock);
    self->comm->num_captured += !self->captured;
    self->captured = true;
    pthread_mutex_unlock(&self->comm->lock);
}

EXPORT void standin_free(void *handle) {
    batch *self = handle;
    pthread_mutex_lock(&self->comm->lock);
    self->comm->num_captured -= self->captured;
    pthread_mutex_unlock(&self->comm->lock);
    comm_release(self->comm);
    free(self->transfers);
    free(self->copies);
    free(self);
}

/* The k-th send to oneself fills the k-th receive from oneself; none may be left over. */
static ncclResult_t match_copies(batch *self, const transfer *transfers, int count) {
    int num_sends = 0, num_receives = 0;
    self->copies = allocate(sizeof *self->copies * (size_t)count);
    for (int i = 0; i < count; i++) {
        const transfer *each = &transfers[i];
        if (each->peer == self->comm->rank && each->is_send) {
            self->copies[num_sends].from = each->memory;
            self->copies[num_sends++].nbytes = each->nbytes;
        }
    }
    for (int i = 0; i < count; i++) {
        const transfer *each = &transfers[i];
        if (each->peer != self->comm->rank || each->is_send)
            continue;
        if (num_receives == num_sends || self->copies[num_receives].nbytes != each->nbytes)
            return ncclInvalidUsage;
        self->copies[num_receives++].to = each->memory;
    }
    self->num_copies = num_sends;
    return num_receives == num_sends ? ncclSuccess : ncclInvalidUsage;
}

/* The batch of these transfers, which are all of one communicator. */
ncclResult_t batch_new(const transfer *transfers, int count, batch **result) {
    batch *self = allocate(sizeof *self);
    self->comm = transfers[0].comm;
    comm_hold(self->comm);
    self->transfers = allocate(sizeof *transfers * (size_t)count);
    for (int i = 0; i < count; i++)
        if (transfers[i].peer != self->comm->rank)
            self->transfers[self->num_transfers++] = transfers[i];
    *result = self;
    return match_copies(self, transfers, count);
}

/* Connects what the batch needs, while the host waits. */
ncclResult_t batch_start(batch *self) {
    comm *comm = self->comm;
    bool *sends = allocate((size_t)comm->size), *receives = allocate((size_t)comm->size);
    for (int i = 0; i < self->num_transfers; i++)
        (self->transfers[i].is_send ? sends : receives)[self->transfers[i].peer] = true;
    ncclResult_t result = comm_enter(comm);
    if (result == ncclSuccess) {
        result = comm_connect(comm, sends, receives);
        comm_leave(comm);
    }
    free(sends);
    free(receives);
    return result;
}
