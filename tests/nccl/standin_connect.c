/* Connections: how the ranks of a clique find each other, and how two of them connect on first use.
 *
 * Rank r listens at the abstract address "microddp-standin-<key>-<r>". Every transfer's sender dials its receiver, so
 * that there is one connection for each direction of a pair. Who dials says who it is (a greeting) and then waits for
 * one byte, the welcome, which the other end sends once it wants that connection: both block until both want it. */
#define _GNU_SOURCE
#include "standin.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { RETRY_MS = 2, PROBE_MS = 50, BACKLOG = 1024 };

/* Why somebody dials. */
enum purpose { TO_MEET, TO_SEND, TO_PROBE };

typedef struct {
    int32_t rank;
    int32_t purpose;
} greeting;

/* ---- time and environment -------------------------------------------------------------------------------------- */

int64_t now_ms(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000 + time.tv_nsec / 1000000;
}

/* When a wait that begins now must end; -1: never. */
int64_t wait_limit_ms(void) {
    const char *text = getenv("STANDIN_TIMEOUT_MS");
    int64_t timeout = text ? atoll(text) : 0;
    return timeout > 0 ? now_ms() + timeout : -1;
}

bool death_is_quiet(void) {
    const char *text = getenv("STANDIN_QUIET_DEATH");
    return text && strcmp(text, "1") == 0;
}

/* ---- addresses ------------------------------------------------------------------------------------------------- */

typedef struct {
    struct sockaddr_un name;
    socklen_t length;
} address;

static address address_of(const comm *self, int rank) {
    address result = {.name.sun_family = AF_UNIX};
    int length = snprintf(result.name.sun_path + 1, sizeof result.name.sun_path - 1, "microddp-standin-%s-%d",
                          self->key, rank);
    result.length = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
    return result;
}

ncclResult_t comm_listen(comm *self) {
    address here = address_of(self, self->rank);
    self->listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (self->listener < 0)
        return ncclSystemError;
    if (bind(self->listener, (struct sockaddr *)&here.name, here.length) != 0)
        return errno == EADDRINUSE ? ncclInvalidUsage : ncclSystemError; /* there is such a rank already */
    return listen(self->listener, BACKLOG) == 0 ? ncclSuccess : ncclSystemError;
}

/* A connection to the rank, which was greeted on it; NO_SOCKET if it cannot be had yet. `refused`: nobody listens. */
static int dial(const comm *self, int peer, enum purpose purpose, bool *refused) {
    address there = address_of(self, peer);
    greeting hello = {self->rank, purpose};
    int found = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    *refused = false;
    if (found < 0)
        return NO_SOCKET;
    if (connect(found, (struct sockaddr *)&there.name, there.length) != 0)
        *refused = errno == ECONNREFUSED;
    else if (send(found, &hello, sizeof hello, MSG_NOSIGNAL) == sizeof hello)
        return found;
    close(found);
    return NO_SOCKET;
}

/* Whether nobody listens at the rank's address any more: tries, and hangs up. */
static bool is_gone(const comm *self, int peer) {
    bool refused;
    int found = dial(self, peer, TO_PROBE, &refused);
    if (found != NO_SOCKET)
        close(found);
    return refused;
}

/* ---- meeting: every rank has come ------------------------------------------------------------------------------ */

static int accept_one(comm *self, int flags) {
    return accept4(self->listener, NULL, NULL, SOCK_CLOEXEC | flags);
}

/* Sleeps until `descriptor` is readable, `milliseconds` have passed, or the communicator has failed. */
static void pause_on(const comm *self, int descriptor, int milliseconds) {
    struct pollfd ready[] = {{.fd = self->wake, .events = POLLIN}, {.fd = descriptor, .events = POLLIN}};
    poll(ready, 2, milliseconds);
}

/* Rank 0: hears every other rank, then lets all of them go on. */
static ncclResult_t meet_as_host(comm *self, int64_t limit) {
    int *guests = allocate(sizeof *guests * (size_t)self->size);
    int count = 0;
    ncclResult_t result = ncclSuccess;
    while (result == ncclSuccess && count < self->size - 1) {
        int guest = accept_one(self, 0);
        if (guest >= 0)
            guests[count++] = guest;
        else if (limit >= 0 && now_ms() > limit)
            result = ncclSystemError;
        else
            pause_on(self, self->listener, PROBE_MS);
    }
    for (int i = 0; i < count; i++) {
        greeting hello; /* read, or closing would reset the connection */
        bool heard = recv(guests[i], &hello, sizeof hello, MSG_WAITALL) == sizeof hello;
        if (heard && result == ncclSuccess)
            send(guests[i], "", 1, MSG_NOSIGNAL);
        close(guests[i]);
    }
    free(guests);
    return result;
}

/* Any other rank: dials rank 0 until it is there, then waits until all are. */
static ncclResult_t meet_as_guest(comm *self, int64_t limit) {
    int host = NO_SOCKET;
    char welcome;
    bool refused;
    ssize_t heard = -1;
    while (heard < 0) {
        if (limit >= 0 && now_ms() > limit)
            break;
        if (host == NO_SOCKET)
            host = dial(self, 0, TO_MEET, &refused);
        pause_on(self, host, host == NO_SOCKET ? RETRY_MS : PROBE_MS); /* poll passes over a descriptor of -1 */
        if (host != NO_SOCKET)
            heard = recv(host, &welcome, 1, 0);
    }
    if (host != NO_SOCKET)
        close(host);
    return heard == 1 ? ncclSuccess : heard == 0 ? ncclRemoteError : ncclSystemError;
}

ncclResult_t comm_meet(comm *self) {
    if (self->size == 1)
        return ncclSuccess;
    int64_t limit = wait_limit_ms();
    return self->rank == 0 ? meet_as_host(self, limit) : meet_as_guest(self, limit);
}

/* ---- connecting: the first use of a peer ----------------------------------------------------------------------- */

/* What one call of comm_connect has under way. */
typedef struct {
    const bool *sends, *receives; /* by peer */
    int *dialled;                 /* by peer: greeted, not yet welcomed */
    int64_t next_probe;
} attempt;

/* Takes in everyone who has dialled. The greeting follows its connection at once: it is there, or the dialler died. */
static void accept_all(comm *self) {
    int found;
    while ((found = accept_one(self, 0)) >= 0) {
        greeting hello;
        bool heard = recv(found, &hello, sizeof hello, MSG_WAITALL) == sizeof hello;
        if (!heard || hello.purpose != TO_SEND || hello.rank < 0 || hello.rank >= self->size ||
            self->arrived[hello.rank] != NO_SOCKET) {
            close(found);
            continue;
        }
        self->arrived[hello.rank] = found;
    }
}

/* Tries to get further with the connection on which this rank sends to the peer. */
static ncclResult_t advance_outgoing(comm *self, attempt *work, int peer) {
    int *dialled = &work->dialled[peer];
    char welcome;
    bool refused = false; /* all ranks have met: who refuses has gone */
    if (*dialled == NO_SOCKET)
        *dialled = dial(self, peer, TO_SEND, &refused);
    ssize_t heard = *dialled == NO_SOCKET ? -1 : recv(*dialled, &welcome, 1, MSG_DONTWAIT);
    if (heard == 1) {
        self->outgoing[peer] = *dialled;
        *dialled = NO_SOCKET;
    } else if (!death_is_quiet() && (heard == 0 || refused)) {
        return comm_fail(self, ncclRemoteError, "rank %d: rank %d is gone (before it was connected)", self->rank, peer);
    } else if (heard == 0) {
        close(*dialled); /* or the poll would not sleep */
        *dialled = NO_SOCKET;
    }
    return ncclSuccess;
}

/* Tries to get further with the connection on which the peer sends to this rank. */
static ncclResult_t advance_incoming(comm *self, int peer, bool probing) {
    int found = self->arrived[peer];
    if (found != NO_SOCKET) {
        self->arrived[peer] = NO_SOCKET;
        self->incoming[peer] = found; /* if the peer died meanwhile, the first transfer will see it */
        send(found, "", 1, MSG_NOSIGNAL);
    } else if (probing && !death_is_quiet() && is_gone(self, peer)) {
        return comm_fail(self, ncclRemoteError, "rank %d: rank %d is gone (before it was connected)", self->rank, peer);
    }
    return ncclSuccess;
}

/* One round over all edges; says how many are still missing. */
static ncclResult_t advance_all(comm *self, attempt *work, int *missing) {
    bool probing = now_ms() >= work->next_probe;
    if (probing)
        work->next_probe = now_ms() + PROBE_MS;
    ncclResult_t result = comm_failure(self);
    *missing = 0;
    accept_all(self);
    for (int peer = 0; peer < self->size && result == ncclSuccess; peer++) {
        if (work->sends[peer] && self->outgoing[peer] == NO_SOCKET)
            result = advance_outgoing(self, work, peer);
        if (work->receives[peer] && self->incoming[peer] == NO_SOCKET && result == ncclSuccess)
            result = advance_incoming(self, peer, probing);
        *missing += work->sends[peer] && self->outgoing[peer] == NO_SOCKET;
        *missing += work->receives[peer] && self->incoming[peer] == NO_SOCKET;
    }
    return result;
}

/* Sleeps until somebody dials, a welcome comes, the communicator fails, or it is time to dial or probe again. */
static void wait_for_news(const comm *self, const attempt *work) {
    struct pollfd *ready = allocate(sizeof *ready * (size_t)(self->size + 2));
    int timeout = PROBE_MS;
    ready[0] = (struct pollfd){.fd = self->wake, .events = POLLIN};
    ready[1] = (struct pollfd){.fd = self->listener, .events = POLLIN};
    for (int peer = 0; peer < self->size; peer++) {
        bool waiting = work->sends[peer] && self->outgoing[peer] == NO_SOCKET;
        if (waiting && work->dialled[peer] == NO_SOCKET)
            timeout = RETRY_MS;
        ready[2 + peer] = (struct pollfd){.fd = work->dialled[peer], .events = POLLIN};
    }
    poll(ready, (nfds_t)(self->size + 2), timeout);
    free(ready);
}

/* Connects this rank with the peers it sends to and receives from, where it is not yet. Blocks until they want it too,
 * or the communicator fails (an abort is a failure). Called within comm_enter. */
ncclResult_t comm_connect(comm *self, const bool *sends, const bool *receives) {
    pthread_mutex_lock(&self->setup);
    int64_t limit = wait_limit_ms();
    attempt work = {sends, receives, allocate(sizeof(int) * (size_t)self->size), now_ms() + PROBE_MS};
    for (int peer = 0; peer < self->size; peer++)
        work.dialled[peer] = NO_SOCKET;
    int missing;
    ncclResult_t result = advance_all(self, &work, &missing);
    while (result == ncclSuccess && missing > 0) {
        wait_for_news(self, &work);
        result = advance_all(self, &work, &missing);
        if (result == ncclSuccess && missing > 0 && limit >= 0 && now_ms() > limit)
            result = comm_fail(self, ncclSystemError, "rank %d: timed out with %d connections missing",
                               self->rank, missing);
    }
    for (int peer = 0; peer < self->size; peer++)
        if (work.dialled[peer] != NO_SOCKET)
            close(work.dialled[peer]);
    free(work.dialled);
    pthread_mutex_unlock(&self->setup);
    return result;
}
