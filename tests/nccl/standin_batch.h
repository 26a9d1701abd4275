/* Batches: the transfers of one communicator in one group; and their lanes. */
#ifndef MICRODDP_STANDIN_BATCH_H
#define MICRODDP_STANDIN_BATCH_H

#include "standin.h"

/* A transfer between a rank and itself is a copy. */
typedef struct {
    void *to;
    const void *from;
    size_t nbytes;
} self_copy;

struct batch {
    comm *comm;
    bool captured;
    int num_transfers, num_copies;
    transfer *transfers; /* with other ranks, in the order of the calls */
    self_copy *copies;
};

enum stage { WRITE_COUNT, READ_COUNT, MOVE, ACKNOWLEDGE, NUM_STAGES };

typedef struct {
    const batch *batch;
    bool is_send;
    int peer;
    int next;   /* index of the transfer under way, or where to look for it */
    int socket; /* NO_SOCKET: nothing more will come of it */
    enum stage stage;
    size_t done; /* bytes of the stage */
    uint64_t expected, announced;
    char acknowledgement;
} lane;

/* standin_lane.c */
bool lane_seek(lane *self, int from);
bool lane_writes(const lane *self);
ncclResult_t lane_advance(comm *comm, lane *self);

#endif
