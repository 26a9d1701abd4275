/* Lanes: the transfers of a batch in one direction of one pair, which go one after another.
 *
 * A message, on the connection from its sender to its receiver: both ends write the byte count that they expect (8
 * bytes each) and compare; the sender writes the bytes; the receiver writes one byte when it has all of them. So no
 * byte of a tensor leaves before its reader is there, and a send is not complete before its reader is done. */
#define _GNU_SOURCE
#include "standin_batch.h"

#include <errno.h>
#include <sys/socket.h>

static const transfer *lane_transfer(const lane *self) { return &self->batch->transfers[self->next]; }

/* Moves on to the lane's first transfer at or after `from`; false if there is none. */
bool lane_seek(lane *self, int from) {
    for (self->next = from; self->next < self->batch->num_transfers; self->next++)
        if (lane_transfer(self)->is_send == self->is_send && lane_transfer(self)->peer == self->peer) {
            self->stage = WRITE_COUNT;
            self->done = 0;
            self->expected = lane_transfer(self)->nbytes;
            return true;
        }
    return false;
}

bool lane_writes(const lane *self) {
    switch (self->stage) {
    case WRITE_COUNT: return true;
    case READ_COUNT: return false;
    case MOVE: return self->is_send;
    default: return !self->is_send;
    }
}

/* What the stage moves. */
static char *stage_memory(lane *self, size_t *nbytes) {
    switch (self->stage) {
    case WRITE_COUNT: *nbytes = sizeof self->expected; return (char *)&self->expected;
    case READ_COUNT: *nbytes = sizeof self->announced; return (char *)&self->announced;
    case MOVE: *nbytes = self->expected; return lane_transfer(self)->memory;
    default: *nbytes = 1; return &self->acknowledgement;
    }
}

/* Moves what can be moved of the stage without blocking: 1 all of it, 0 not yet, -1 the peer is gone. */
static int stage_advance(lane *self) {
    size_t nbytes;
    char *memory = stage_memory(self, &nbytes);
    while (self->done < nbytes) {
        ssize_t moved = lane_writes(self)
                            ? send(self->socket, memory + self->done, nbytes - self->done, MSG_DONTWAIT | MSG_NOSIGNAL)
                            : recv(self->socket, memory + self->done, nbytes - self->done, MSG_DONTWAIT);
        if (moved > 0)
            self->done += (size_t)moved;
        else if (moved < 0 && errno == EINTR)
            continue;
        else
            return moved < 0 && (errno == EAGAIN || errno == EWOULDBLOCK) ? 0 : -1;
    }
    return 1;
}

static void count(comm *comm, const lane *lane) {
    pthread_mutex_lock(&comm->lock);
    comm->counters[lane->is_send ? BYTES_SENT : BYTES_RECEIVED] += lane->expected;
    comm->counters[lane->is_send ? MESSAGES_SENT : MESSAGES_RECEIVED]++;
    pthread_mutex_unlock(&comm->lock);
}

/* Takes the lane as far as it goes without blocking; a lane at its end has `next` behind the last transfer. */
ncclResult_t lane_advance(comm *comm, lane *self) {
    while (self->next < self->batch->num_transfers && self->socket != NO_SOCKET) {
        int state = stage_advance(self);
        if (state == 0)
            return ncclSuccess;
        if (state < 0 && death_is_quiet()) {
            self->socket = NO_SOCKET; /* as a kernel that spins on memory nobody writes any more */
            return ncclSuccess;
        }
        if (state < 0)
            return comm_fail(comm, ncclRemoteError, "rank %d: rank %d closed its end during a %s of %llu bytes",
                             comm->rank, self->peer, self->is_send ? "send" : "receive",
                             (unsigned long long)self->expected);
        if (self->stage == READ_COUNT && self->announced != self->expected)
            return comm_fail(comm, ncclInvalidUsage,
                             "rank %d: a %s of %llu bytes meets %llu bytes on rank %d (only the stand-in sees this)",
                             comm->rank, self->is_send ? "send" : "receive", (unsigned long long)self->expected,
                             (unsigned long long)self->announced, self->peer);
        self->done = 0;
        if (++self->stage == NUM_STAGES) {
            count(comm, self);
            lane_seek(self, self->next + 1);
        }
    }
    return ncclSuccess;
}
