// Collectives. Each rank writes to its slot, all meet, each reads from the slots of the others; what is larger than a
// slot goes in several rounds. Rounds use two sets of slots in turn, so that nobody writes where another still reads.
// Sums are added in the order of ranks, the same on each.
#include "hccl.h"

#include <string.h>

// for (offset, count) in rounds of as many of `total` elements as fit into a slot; one round where there are none
#define FOR_ROUNDS(c, offset, count, total, size)                                                          \
    for (uint64_t offset = 0, count;                                                                       \
         (offset == 0 || offset < (total)) &&                                                              \
         (count = (total) - offset < SLOT_BYTES / (size) ? (total) - offset : SLOT_BYTES / (size), 1);     \
         offset += count ? count : 1, take_turns(c))

static HcclResult check_reducible(HcclDataType type, HcclReduceOp op) {
    char one[16] = {0}, other[16] = {0};
    return reduce_into(one, other, 1, type, op);
}

// The sum, or another reduction, of what all slots have `place` elements from their start.
static HcclResult reduce_slots(Communicator *c, uint64_t place, char *target, uint64_t count, HcclDataType type,
                               HcclReduceOp op) {
    uint64_t start = place * size_of(type);
    memcpy(target, slot_of(c, 0) + start, count * size_of(type));
    for (int rank = 1; rank < c->size; rank++) {
        RETURN_IF_FAILED(reduce_into(target, slot_of(c, rank) + start, count, type, op));
    }
    return HCCL_SUCCESS;
}

// Reduce `total` elements; `keeps` says whether this rank gets the result.
static HcclResult reduce(Communicator *c, const char *from, char *to, uint64_t total, HcclDataType type,
                         HcclReduceOp op, int keeps) {
    uint64_t size = size_of(type);
    FOR_ROUNDS(c, offset, count, total, size) {
        memcpy(slot_of(c, c->rank), from + offset * size, count * size);
        RETURN_IF_FAILED(meet(c));
        if (keeps) {
            RETURN_IF_FAILED(reduce_slots(c, 0, to + offset * size, count, type, op));
        }
    }
    return HCCL_SUCCESS;
}

HcclResult HcclAllReduce(void *sendBuf, void *recvBuf, uint64_t count, HcclDataType dataType, HcclReduceOp op,
                         Communicator *comm, Stream stream) {
    RETURN_IF_FAILED(enter(comm, "HcclAllReduce", dataType, op, 0, count));
    RETURN_IF_FAILED(check_reducible(dataType, op));
    return reduce(comm, sendBuf, recvBuf, count, dataType, op, 1);
}

HcclResult HcclReduce(void *sendBuf, void *recvBuf, uint64_t count, HcclDataType dataType, HcclReduceOp op,
                      uint32_t root, Communicator *comm, Stream stream) {
    RETURN_IF_FAILED(enter(comm, "HcclReduce", dataType, op, (int)root, count));
    RETURN_IF_FAILED(check_reducible(dataType, op));
    return reduce(comm, sendBuf, recvBuf, count, dataType, op, (int)root == comm->rank);
}

HcclResult HcclReduceScatter(void *sendBuf, void *recvBuf, uint64_t recvCount, HcclDataType dataType, HcclReduceOp op,
                             Communicator *comm, Stream stream) {
    RETURN_IF_FAILED(enter(comm, "HcclReduceScatter", dataType, op, 0, recvCount));
    RETURN_IF_FAILED(check_reducible(dataType, op));
    uint64_t size = size_of(dataType);
    FOR_ROUNDS(comm, offset, count, recvCount, size * comm->size) {
        for (int rank = 0; rank < comm->size; rank++) {
            memcpy(slot_of(comm, comm->rank) + rank * count * size, (char *)sendBuf + (rank * recvCount + offset) * size,
                   count * size);
        }
        RETURN_IF_FAILED(meet(comm));
        char *to = (char *)recvBuf + offset * size;
        RETURN_IF_FAILED(reduce_slots(comm, comm->rank * count, to, count, dataType, op));
    }
    return HCCL_SUCCESS;
}

HcclResult HcclReduceScatterV(void *sendBuf, const uint64_t *sendCounts, const uint64_t *sendDispls, void *recvBuf,
                              uint64_t recvCount, HcclDataType dataType, HcclReduceOp op, Communicator *comm,
                              Stream stream) {
    RETURN_IF_FAILED(enter(comm, "HcclReduceScatterV", dataType, op, 0, 0));
    RETURN_IF_FAILED(check_reducible(dataType, op));
    for (int rank = 0; rank < comm->size; rank++) {
        char *part = (char *)sendBuf + sendDispls[rank] * size_of(dataType);
        RETURN_IF_FAILED(reduce(comm, part, recvBuf, sendCounts[rank], dataType, op, rank == comm->rank));
    }
    return HCCL_SUCCESS;
}

// Send `total` elements from rank `root`, which has them at `from`, to those with `takes`, at `to`.
static HcclResult send_to_all(Communicator *c, int root, const char *from, char *to, int takes, uint64_t total,
                              uint64_t size) {
    FOR_ROUNDS(c, offset, count, total, size) {
        if (c->rank == root) {
            memcpy(slot_of(c, root), from + offset * size, count * size);
        }
        RETURN_IF_FAILED(meet(c));
        if (takes) {
            memcpy(to + offset * size, slot_of(c, root), count * size);
        }
    }
    return HCCL_SUCCESS;
}

HcclResult HcclBroadcast(void *buf, uint64_t count, HcclDataType dataType, uint32_t root, Communicator *comm,
                         Stream stream) {
    RETURN_IF_FAILED(enter(comm, "HcclBroadcast", dataType, 0, (int)root, count));
    return send_to_all(comm, (int)root, buf, buf, comm->rank != (int)root, count, size_of(dataType));
}

HcclResult HcclScatter(void *sendBuf, void *recvBuf, uint64_t recvCount, HcclDataType dataType, uint32_t root,
                       Communicator *comm, Stream stream) {
    uint64_t size = size_of(dataType);
    RETURN_IF_FAILED(enter(comm, "HcclScatter", dataType, 0, (int)root, recvCount));
    for (int rank = 0; rank < comm->size; rank++) {
        const char *part = comm->rank == (int)root ? (char *)sendBuf + rank * recvCount * size : NULL;
        RETURN_IF_FAILED(send_to_all(comm, (int)root, part, recvBuf, rank == comm->rank, recvCount, size));
    }
    return HCCL_SUCCESS;
}

HcclResult HcclAllGather(void *sendBuf, void *recvBuf, uint64_t sendCount, HcclDataType dataType, Communicator *comm,
                         Stream stream) {
    uint64_t size = size_of(dataType);
    RETURN_IF_FAILED(enter(comm, "HcclAllGather", dataType, 0, 0, sendCount));
    FOR_ROUNDS(comm, offset, count, sendCount, size) {
        memcpy(slot_of(comm, comm->rank), (char *)sendBuf + offset * size, count * size);
        RETURN_IF_FAILED(meet(comm));
        for (int rank = 0; rank < comm->size; rank++) {
            memcpy((char *)recvBuf + (rank * sendCount + offset) * size, slot_of(comm, rank), count * size);
        }
    }
    return HCCL_SUCCESS;
}

HcclResult HcclAllGatherV(void *sendBuf, uint64_t sendCount, void *recvBuf, const uint64_t *recvCounts,
                          const uint64_t *recvDispls, HcclDataType dataType, Communicator *comm, Stream stream) {
    uint64_t size = size_of(dataType);
    RETURN_IF_FAILED(enter(comm, "HcclAllGatherV", dataType, 0, 0, 0));
    for (int rank = 0; rank < comm->size; rank++) {
        char *to = (char *)recvBuf + recvDispls[rank] * size;
        RETURN_IF_FAILED(send_to_all(comm, rank, sendBuf, to, 1, recvCounts[rank], size));
    }
    return HCCL_SUCCESS;
}

// Counts and places are in elements. Step k exchanges with the ranks k further on and k back, in rounds until the
// longest message of the step is through.
HcclResult HcclAlltoAllV(const void *sendBuf, const uint64_t *sendCounts, const uint64_t *sdispls,
                         HcclDataType sendType, void *recvBuf, const uint64_t *recvCounts, const uint64_t *rdispls,
                         HcclDataType recvType, Communicator *comm, Stream stream) {
    RETURN_IF_FAILED(enter(comm, "HcclAlltoAllV", sendType, 0, 0, 0));
    uint64_t size = size_of(sendType), fits = SLOT_BYTES / size;
    for (int step = 0; step < comm->size; step++) {
        int to = (comm->rank + step) % comm->size, from = (comm->rank - step + comm->size) % comm->size;
        uint64_t sent = 0, received = 0;
        for (int any = 1; any;) {
            uint64_t count = sendCounts[to] - sent < fits ? sendCounts[to] - sent : fits;
            memcpy(slot_of(comm, comm->rank), (const char *)sendBuf + (sdispls[to] + sent) * size, count * size);
            sent += count;
            atomic_store(&comm->states[comm->rank].has_more[comm->turn], sent < sendCounts[to]);
            RETURN_IF_FAILED(meet(comm));
            count = recvCounts[from] - received < fits ? recvCounts[from] - received : fits;
            memcpy((char *)recvBuf + (rdispls[from] + received) * size, slot_of(comm, from), count * size);
            received += count;
            any = 0;
            for (int rank = 0; rank < comm->size; rank++) {
                any |= atomic_load(&comm->states[rank].has_more[comm->turn]);
            }
            take_turns(comm);
        }
        if (received != recvCounts[from]) {
            complain("HcclAlltoAllV: rank %d sends less than the %lu elements that rank %d wants", from,
                     (unsigned long)recvCounts[from], comm->rank);
            return HCCL_E_PARA;
        }
    }
    return HCCL_SUCCESS;
}

HcclResult HcclAlltoAll(const void *sendBuf, uint64_t sendCount, HcclDataType sendType, void *recvBuf,
                        uint64_t recvCount, HcclDataType recvType, Communicator *comm, Stream stream) {
    uint64_t sent[MAX_RANKS], received[MAX_RANKS], places[MAX_RANKS];
    for (int rank = 0; rank < comm->size; rank++) {
        sent[rank] = sendCount;
        received[rank] = recvCount;
        places[rank] = rank * sendCount;
    }
    return HcclAlltoAllV(sendBuf, sent, places, sendType, recvBuf, received, places, recvType, comm, stream);
}

// counts[i * size + j]: how many elements rank i sends to rank j
HcclResult HcclAlltoAllVC(const void *sendBuf, const uint64_t *counts, HcclDataType sendType, void *recvBuf,
                          HcclDataType recvType, Communicator *comm, Stream stream) {
    uint64_t sent[MAX_RANKS], from[MAX_RANKS], received[MAX_RANKS], to[MAX_RANKS], out = 0, in = 0;
    for (int rank = 0; rank < comm->size; rank++) {
        sent[rank] = counts[comm->rank * comm->size + rank];
        received[rank] = counts[rank * comm->size + comm->rank];
        from[rank] = out;
        to[rank] = in;
        out += sent[rank];
        in += received[rank];
    }
    return HcclAlltoAllV(sendBuf, sent, from, sendType, recvBuf, received, to, recvType, comm, stream);
}

HcclResult HcclBarrier(Communicator *comm, Stream stream) {
    RETURN_IF_FAILED(enter(comm, "HcclBarrier", HCCL_INT8, 0, 0, 0));
    return meet(comm);
}
