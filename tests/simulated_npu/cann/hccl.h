// HCCL over POSIX shared memory: what the files hccl_*.c share.
//
// The declarations of HCCL's own interface are repeated here, because its header is C++ only. Every call is done when
// it returns, so torch_npu must call from one thread, in order (TASK_QUEUE_ENABLE=0).
#ifndef SIMULATED_NPU_HCCL_H
#define SIMULATED_NPU_HCCL_H

#include "simulator.h"

#include <stdatomic.h>
#include <stddef.h>

typedef enum {
    HCCL_SUCCESS = 0,
    HCCL_E_PARA = 1,
    HCCL_E_NOT_SUPPORT = 5,
    HCCL_E_SYSCALL = 8,
    HCCL_E_TIMEOUT = 9,
} HcclResult;

typedef enum { HCCL_REDUCE_SUM, HCCL_REDUCE_PROD, HCCL_REDUCE_MAX, HCCL_REDUCE_MIN } HcclReduceOp;

typedef enum {
    HCCL_INT8, HCCL_INT16, HCCL_INT32, HCCL_FP16, HCCL_FP32, HCCL_INT64, HCCL_UINT64, HCCL_UINT8, HCCL_UINT16,
    HCCL_UINT32, HCCL_FP64, HCCL_BFP16, HCCL_INT128, HCCL_HIF8 = 14, HCCL_FP8E4M3, HCCL_FP8E5M2, HCCL_FP8E8M0,
} HcclDataType;

typedef enum { HCCL_SEND = 0, HCCL_RECV = 1 } HcclSendRecvType;

typedef struct {
    HcclSendRecvType sendRecvType;
    void *buf;
    uint64_t count;
    HcclDataType dataType;
    uint32_t remoteRank;
} HcclSendRecvItem;

#define ROOT_INFO_BYTES 4108
#define NAME_LENGTH 128

typedef void *Stream;

// ------------------------------------------------------------------------------------------------ inside the stand-in
#define MAX_RANKS 16
#define SLOT_BYTES ((uint64_t)1 << 19)  // larger collectives go in several rounds
#define PIPE_BYTES ((uint64_t)1 << 16)

// Which collective a rank is in: all ranks must be in the same one.
typedef struct {
    char name[24];
    int type, reduction, root;
    uint64_t count;
} Call;

// What the others see of a rank.
typedef struct {
    _Atomic uint32_t barriers;  // passed or waiting at; those who wait for it sleep on its address
    _Atomic int has_more[2];    // whether its all-to-all needs another round, by turn
    Call calls[2];              // the current and the one before: nobody is further behind
} RankState;

// Bytes on their way from one rank to another.
typedef struct {
    _Atomic uint64_t written, read;
    char bytes[PIPE_BYTES];
} Pipe;

typedef struct {
    char name[NAME_LENGTH];
    int size, rank;
    uint32_t barriers, calls;
    int turn;       // which slots are in use, 0 or 1
    int unchecked;  // whether the others have not been asked yet which collective they are in
    void *memory;
    size_t length;
    RankState *states;  // of each rank
    char *slots;        // SLOT_BYTES of each rank, twice
    Pipe *pipes;        // of each pair of ranks
} Communicator;

#define RETURN_IF_FAILED(call)       \
    do {                             \
        HcclResult result_ = (call); \
        if (result_) {               \
            return result_;          \
        }                            \
    } while (0)

// Begin a collective: an error if its type is unknown.
HcclResult enter(Communicator *c, const char *name, HcclDataType type, int reduction, int root, uint64_t count);

// Wait until every rank of `c` has come here: an error if another rank is in another collective.
HcclResult meet(Communicator *c);

// The slots that have been read are the others' to read until the next time all meet; then they may be written again.
static inline void take_turns(Communicator *c) { c->turn ^= 1; }

double seconds_now(void);
double timeout_seconds(void);

// Bytes of an element, 0 for a type that is not known.
uint64_t size_of(HcclDataType type);

static inline char *slot_of(Communicator *c, int rank) {
    return c->slots + (uint64_t)(c->turn * c->size + rank) * SLOT_BYTES;
}

// target[i] = target[i] (op) source[i]; HCCL_E_NOT_SUPPORT for what the real HCCL does not reduce.
HcclResult reduce_into(void *target, const void *source, uint64_t count, HcclDataType type, HcclReduceOp op);

#endif
