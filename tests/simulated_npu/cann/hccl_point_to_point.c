// Sending and receiving: a pipe for each pair of ranks. The items of a batch make progress together, so that ranks
// which all send before they receive do not wait for each other.
#include "hccl.h"

#include <sched.h>
#include <string.h>
#include <unistd.h>

#define MAX_QUEUED 256

static uint64_t bytes_of(const HcclSendRecvItem *item) { return item->count * size_of(item->dataType); }

static int is_send(const HcclSendRecvItem *item) { return item->sendRecvType == HCCL_SEND; }

// Whether an earlier item uses the same end of the same pipe and is not done: messages keep their order.
static int must_wait(const HcclSendRecvItem *items, const uint64_t *done, uint32_t index) {
    for (uint32_t i = 0; i < index; i++) {
        if (items[i].sendRecvType == items[index].sendRecvType && items[i].remoteRank == items[index].remoteRank &&
            done[i] < bytes_of(&items[i])) {
            return 1;
        }
    }
    return 0;
}

static void copy_to_pipe(Pipe *pipe, uint64_t position, const char *from, uint64_t count) {
    uint64_t start = position % PIPE_BYTES, first = count < PIPE_BYTES - start ? count : PIPE_BYTES - start;
    memcpy(pipe->bytes + start, from, first);
    memcpy(pipe->bytes, from + first, count - first);
}

static void copy_from_pipe(const Pipe *pipe, uint64_t position, char *to, uint64_t count) {
    uint64_t start = position % PIPE_BYTES, first = count < PIPE_BYTES - start ? count : PIPE_BYTES - start;
    memcpy(to, pipe->bytes + start, first);
    memcpy(to + first, pipe->bytes, count - first);
}

// Move as much as goes without waiting; returns the number of bytes.
static uint64_t advance(Communicator *c, const HcclSendRecvItem *item, uint64_t done) {
    int other = (int)item->remoteRank;
    Pipe *pipe = &c->pipes[is_send(item) ? c->rank * c->size + other : other * c->size + c->rank];
    uint64_t written = atomic_load(&pipe->written), read = atomic_load(&pipe->read);
    uint64_t room = is_send(item) ? PIPE_BYTES - (written - read) : written - read;
    uint64_t count = bytes_of(item) - done < room ? bytes_of(item) - done : room;
    if (is_send(item)) {
        copy_to_pipe(pipe, written, (char *)item->buf + done, count);
        atomic_store(&pipe->written, written + count);
    } else {
        copy_from_pipe(pipe, read, (char *)item->buf + done, count);
        atomic_store(&pipe->read, read + count);
    }
    return count;
}

// Let others run; `tries` counts how often this wait has been here.
static void relax(int *tries) {
    if (++*tries < 200) {
        sched_yield();
    } else {
        usleep(50);
    }
}

static HcclResult run(Communicator *c, const HcclSendRecvItem *items, uint32_t number, uint64_t *done) {
    double last_progress = seconds_now();
    for (int tries = 0;;) {
        int waiting = -1, moved = 0;
        for (uint32_t i = 0; i < number; i++) {
            if (done[i] < bytes_of(&items[i]) && !must_wait(items, done, i)) {
                uint64_t count = advance(c, &items[i], done[i]);
                done[i] += count;
                moved |= count > 0;
            }
            waiting = done[i] < bytes_of(&items[i]) ? (int)i : waiting;
        }
        if (waiting < 0) {
            return HCCL_SUCCESS;
        }
        if (moved) {
            tries = 0;
            last_progress = seconds_now();
            continue;
        }
        relax(&tries);
        if (seconds_now() - last_progress > timeout_seconds()) {
            complain("rank %d of %s waited %.0f s to %s rank %u", c->rank, c->name, timeout_seconds(),
                     is_send(&items[waiting]) ? "send to" : "receive from", items[waiting].remoteRank);
            return HCCL_E_TIMEOUT;
        }
    }
}

HcclResult HcclBatchSendRecv(HcclSendRecvItem *items, uint32_t number, Communicator *comm, Stream stream) {
    uint64_t *done = calloc(number, sizeof *done);
    HcclResult result = run(comm, items, number, done);
    free(done);
    return result;
}

// Between HcclGroupStart and HcclGroupEnd calls are queued, and then run as a batch.
static _Thread_local int depth;
static _Thread_local uint32_t queued;
static _Thread_local HcclSendRecvItem queue[MAX_QUEUED];
static _Thread_local Communicator *communicator_of_queue;

static HcclResult run_or_queue(HcclSendRecvItem item, Communicator *comm, Stream stream) {
    if (!depth) {
        return HcclBatchSendRecv(&item, 1, comm, stream);
    }
    if (queued == MAX_QUEUED || (queued && communicator_of_queue != comm)) {
        complain("a group of sends and receives has more than %d items, or more than one communicator", MAX_QUEUED);
        return HCCL_E_NOT_SUPPORT;
    }
    communicator_of_queue = comm;
    queue[queued++] = item;
    return HCCL_SUCCESS;
}

HcclResult HcclGroupStart(void) {
    depth++;
    return HCCL_SUCCESS;
}

HcclResult HcclGroupEnd(void) {
    if (--depth || !queued) {
        return HCCL_SUCCESS;
    }
    uint32_t number = queued;
    queued = 0;
    return HcclBatchSendRecv(queue, number, communicator_of_queue, NULL);
}

HcclResult HcclSend(void *sendBuf, uint64_t count, HcclDataType dataType, uint32_t destRank, Communicator *comm,
                    Stream stream) {
    return run_or_queue((HcclSendRecvItem){HCCL_SEND, sendBuf, count, dataType, destRank}, comm, stream);
}

HcclResult HcclRecv(void *recvBuf, uint64_t count, HcclDataType dataType, uint32_t srcRank, Communicator *comm,
                    Stream stream) {
    return run_or_queue((HcclSendRecvItem){HCCL_RECV, recvBuf, count, dataType, srcRank}, comm, stream);
}
