/* A stand-in for libnccl.so.2 on machines without a GPU: what its parts share.
 *
 * It moves host memory over Unix sockets, between processes and between threads of one process, and exports the NCCL
 * functions that CuPy's extension imports, so that the real CuPy bindings run without a device. It is a test double:
 *
 * STRICTER THAN NCCL. Nobody may conclude from it that NCCL does the following; real NCCL does not.
 *   - Two ends that name different byte counts are told so (ncclInvalidUsage). NCCL hangs or corrupts memory.
 *   - A send is complete only when its reader has all of it. NCCL may complete small sends earlier.
 *   - The death of a peer on the same host is reported (ncclRemoteError). On NCCL the kernel spins for ever:
 *     STANDIN_QUIET_DEATH=1 gives that, blocking until the communicator is aborted. Fault tests use it.
 *   - A communicator that was destroyed or aborted is recognised (ncclInvalidArgument) instead of crashing.
 *   - All operations of one communicator in one group name the same stream. NCCL joins several.
 *   - What a group does not do here: create communicators; hold two ranks of the same clique.
 *
 * As NCCL does it: groups are thread-local; an error inside a group is returned at once and again by the outermost
 * ncclGroupEnd, which drops the group; ncclCommInitRank and the first use of a peer block the host until the other end
 * comes; batches of one communicator run in the order in which they were issued, whatever streams they name; an abort
 * from any thread ends what is blocked, and the stream goes on.
 *
 * Environment, read at each use: STANDIN_QUIET_DEATH=1 (above); STANDIN_TIMEOUT_MS fails a communicator whose wait
 * lasts longer (ncclSystemError; 0 or unset: waits have no end, as in NCCL).
 *
 * Sockets are not inherited by an exec, but they are by a fork: a forked child must not outlive a rank whose death
 * is to be noticed.
 */
#ifndef MICRODDP_STANDIN_H
#define MICRODDP_STANDIN_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

/* A number that no NCCL will have: the tests know by it whom they talk to. */
enum { STANDIN_VERSION = 29999 };

typedef enum {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
} ncclResult_t;

typedef struct {
    char internal[128];
} ncclUniqueId;

enum { NO_SOCKET = -1, MAX_RANKS = 1024, TEXT_SIZE = 256, KEY_SIZE = 33 };

enum counter { BYTES_SENT, BYTES_RECEIVED, MESSAGES_SENT, MESSAGES_RECEIVED, NUM_COUNTERS };

/* One rank's end of a communicator. NCCL's opaque pointer is `handle`, a number that is never given twice.
 *
 * `lock` guards what follows it. The sockets are changed by the one thread that holds `setup`, and closed only once the
 * communicator has failed and nobody is busy with them. */
typedef struct comm {
    struct comm *next; /* in the registry of open ones */
    uintptr_t handle;
    int rank, size;
    char key[KEY_SIZE]; /* names the clique */
    int wake;           /* an eventfd: readable for ever once the communicator has failed */
    pthread_mutex_t setup;

    int listener;
    int *outgoing; /* by peer: carries this rank's sends to it */
    int *incoming; /* by peer: carries its sends to this rank */
    int *arrived;  /* by peer: it wants to send, but this rank did not ask for it yet */

    pthread_mutex_t lock;
    pthread_cond_t changed;
    int references; /* the registry's, one for each batch, one for each call that is using it */
    int busy;       /* threads that use the sockets */
    int num_captured;
    uint64_t issued, served, finished; /* batches: told to run, turn of, ended */
    uint64_t counters[NUM_COUNTERS];
    ncclResult_t failure; /* the first one: what the asynchronous error is */
    char text[TEXT_SIZE];
} comm;

/* One ncclSend or ncclRecv. */
typedef struct {
    bool is_send;
    int peer;
    char *memory;
    size_t nbytes;
    comm *comm;
    void *stream;
} transfer;

typedef struct batch batch;

/* standin_comm.c */
void *allocate(size_t nbytes); /* zeroed; without memory the process ends */
comm *comm_acquire(uintptr_t handle);
void comm_hold(comm *self);
void comm_release(comm *self);
ncclResult_t comm_fail(comm *self, ncclResult_t result, const char *format, ...) __attribute__((format(printf, 3, 4)));
ncclResult_t comm_failure(comm *self);
ncclResult_t comm_enter(comm *self);
void comm_leave(comm *self);

/* standin_connect.c */
int64_t now_ms(void);
int64_t wait_limit_ms(void);
bool death_is_quiet(void);
ncclResult_t comm_listen(comm *self);
ncclResult_t comm_meet(comm *self);
ncclResult_t comm_connect(comm *self, const bool *sends, const bool *receives);

/* standin_batch.c */
ncclResult_t batch_new(const transfer *transfers, int count, batch **result);
ncclResult_t batch_start(batch *self);

/* What the tests' device runtime calls. */

/* Sets who takes batches: `enqueue(stream, batch)` returns 0 if it took the batch for that stream. Otherwise, and
 * without a hook, the batch runs within ncclGroupEnd. Whoever took it issues, runs and frees it. */
EXPORT void standin_set_enqueue(int (*enqueue)(void *stream, void *batch));

/* Takes a place in the communicator's order: call it on the host, when the batch is really enqueued (not while it is
 * captured), once for each run. Every place must be followed by a run, or the communicator's later batches wait. */
EXPORT uint64_t standin_issue(void *batch);

/* Says that the batch is part of a captured graph, until it is freed. */
EXPORT void standin_captured(void *batch);

/* Runs the batch in its place, on the thread that stands for the stream; blocks until it has ended, well or not. */
EXPORT int standin_run(void *batch, uint64_t place);

/* Frees a batch that will not run again. */
EXPORT void standin_free(void *batch);

/* The communicator's totals of complete transfers, in the order of `enum counter`. */
EXPORT int standin_counters(void *handle, uint64_t *totals);

/* How many communicators of this process were closed while captured batches still named them: NCCL would hang. */
EXPORT int standin_misuses(void);

#endif
