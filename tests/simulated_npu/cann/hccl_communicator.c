// Communicators: one piece of shared memory each, which its ranks map when they join and meet in.
#include "hccl.h"

#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

double seconds_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

double timeout_seconds(void) { return (double)setting("SIMULATED_NPU_TIMEOUT", 120); }

static const char *current_call(Communicator *c, int rank) { return c->states[rank].calls[c->calls & 1].name; }

// Sleep until the word is another than `seen`, for a second at most.
static void sleep_on(_Atomic uint32_t *word, uint32_t seen) {
    struct timespec second = {.tv_sec = 1};
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &second, NULL, 0);
}

static void wake_all(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); }

static HcclResult wait_for(Communicator *c, int rank) {
    _Atomic uint32_t *theirs = &c->states[rank].barriers;
    double started = 0;
    for (uint32_t seen; (int32_t)((seen = atomic_load(theirs)) - c->barriers) < 0;) {
        started = started ? started : seconds_now();
        if (seconds_now() - started > timeout_seconds()) {
            complain("rank %d of %s waited %.0f s in %s for rank %d", c->rank, c->name, timeout_seconds(),
                     current_call(c, c->rank), rank);
            return HCCL_E_TIMEOUT;
        }
        sleep_on(theirs, seen);
    }
    return HCCL_SUCCESS;
}

static HcclResult barrier(Communicator *c) {
    atomic_store(&c->states[c->rank].barriers, ++c->barriers);
    wake_all(&c->states[c->rank].barriers);
    for (int rank = 0; rank < c->size; rank++) {
        RETURN_IF_FAILED(wait_for(c, rank));
    }
    return HCCL_SUCCESS;
}

static int same_call(const Call *a, const Call *b) {
    return !strcmp(a->name, b->name) && a->type == b->type && a->reduction == b->reduction && a->root == b->root &&
           a->count == b->count;
}

static void complain_of_mismatch(Communicator *c, const Call *mine, int rank, const Call *other) {
    complain("ranks of %s are in different collectives: rank %d in %s (%lu elements of type %d, reduction %d, root %d), "
             "rank %d in %s (%lu elements of type %d, reduction %d, root %d)",
             c->name, c->rank, mine->name, (unsigned long)mine->count, mine->type, mine->reduction, mine->root, rank,
             other->name, (unsigned long)other->count, other->type, other->reduction, other->root);
}

HcclResult enter(Communicator *c, const char *name, HcclDataType type, int reduction, int root, uint64_t count) {
    if (!size_of(type)) {
        complain("%s: HCCL has no data type %d", name, (int)type);
        return HCCL_E_NOT_SUPPORT;
    }
    Call *mine = &c->states[c->rank].calls[++c->calls & 1];
    *mine = (Call){.type = (int)type, .reduction = reduction, .root = root, .count = count};
    snprintf(mine->name, sizeof mine->name, "%s", name);
    trace("rank %d of %s: %s of %lu elements of type %d", c->rank, c->name, name, (unsigned long)count, (int)type);
    c->unchecked = 1;
    return HCCL_SUCCESS;
}

HcclResult meet(Communicator *c) {
    RETURN_IF_FAILED(barrier(c));
    int place = c->calls & 1;
    const Call *mine = &c->states[c->rank].calls[place];
    for (int rank = 0; c->unchecked && rank < c->size; rank++) {
        const Call *other = &c->states[rank].calls[place];
        if (!same_call(mine, other)) {
            complain_of_mismatch(c, mine, rank, other);
            return HCCL_E_PARA;
        }
    }
    c->unchecked = 0;
    return HCCL_SUCCESS;
}

// ------------------------------------------------------------------------------------------------ making and asking
static HcclResult join(const char *name, uint32_t size, uint32_t rank, void **communicator) {
    if (size > MAX_RANKS || rank >= size) {
        complain("rank %u of %u: there may be %d ranks", rank, size, MAX_RANKS);
        return HCCL_E_PARA;
    }
    Communicator *c = calloc(1, sizeof *c);
    c->size = (int)size;
    c->rank = (int)rank;
    snprintf(c->name, sizeof c->name, "%s", name);
    size_t head = (sizeof(RankState) * size + 4095) & ~(size_t)4095;
    c->length = head + 2 * size * SLOT_BYTES + sizeof(Pipe) * size * size;
    int file = shm_open(name, O_CREAT | O_RDWR, 0600);
    if (file < 0 || ftruncate(file, (off_t)c->length)) {
        perror("[simulated NPU] shared memory of a communicator");
        return HCCL_E_SYSCALL;
    }
    c->memory = mmap(NULL, c->length, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (c->memory == MAP_FAILED) {
        perror("[simulated NPU] shared memory of a communicator");
        return HCCL_E_SYSCALL;
    }
    c->states = c->memory;
    c->slots = (char *)c->memory + head;
    c->pipes = (Pipe *)(c->slots + 2 * size * SLOT_BYTES);
    RETURN_IF_FAILED(barrier(c));
    shm_unlink(name);  // all have it mapped: it goes with the last of them
    *communicator = c;
    return HCCL_SUCCESS;
}

// What rank 0 sends to the others so that they find the communicator: here the name of its shared memory.
HcclResult HcclGetRootInfo(char *rootInfo) {
    static int made;
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    memset(rootInfo, 0, ROOT_INFO_BYTES);
    snprintf(rootInfo, NAME_LENGTH, "/simulated-hccl-%d-%d-%lx", getpid(), made++, (unsigned long)t.tv_nsec);
    return HCCL_SUCCESS;
}

HcclResult HcclCommInitRootInfo(uint32_t nRanks, const char *rootInfo, uint32_t rank, void **comm) {
    return join(rootInfo, nRanks, rank, comm);
}

HcclResult HcclCommInitRootInfoConfig(uint32_t nRanks, const char *rootInfo, uint32_t rank, const void *config,
                                      void **comm) {
    return join(rootInfo, nRanks, rank, comm);
}

HcclResult HcclCreateSubCommConfig(Communicator **comm, uint32_t rankNum, const uint32_t *rankIds, uint64_t subCommId,
                                   uint32_t subCommRankId, const void *config, void **subComm) {
    if (!rankIds) {  // this rank is not in it
        *subComm = NULL;
        return HCCL_SUCCESS;
    }
    uint64_t members = 0;  // disjoint groups may have the same id
    for (uint32_t i = 0; i < rankNum; i++) {
        members |= (uint64_t)1 << rankIds[i];
    }
    char name[NAME_LENGTH + 48];
    snprintf(name, sizeof name, "%.80s-%lx-%lx", (*comm)->name, (unsigned long)subCommId, (unsigned long)members);
    return join(name, rankNum, subCommRankId, subComm);
}

HcclResult HcclCommDestroy(Communicator *comm) {
    munmap(comm->memory, comm->length);
    free(comm);
    return HCCL_SUCCESS;
}

HcclResult HcclGetCommAsyncError(Communicator *comm, HcclResult *asyncError) {
    *asyncError = HCCL_SUCCESS;
    return HCCL_SUCCESS;
}

HcclResult HcclGetCommName(Communicator *comm, char *commName) {
    snprintf(commName, NAME_LENGTH, "%s", comm->name);
    return HCCL_SUCCESS;
}

HcclResult HcclGetRankId(Communicator *comm, uint32_t *rank) {
    *rank = (uint32_t)comm->rank;
    return HCCL_SUCCESS;
}

HcclResult HcclGetRankSize(Communicator *comm, uint32_t *rankSize) {
    *rankSize = (uint32_t)comm->size;
    return HCCL_SUCCESS;
}

HcclResult HcclSetConfig(int config, int value) { return HCCL_SUCCESS; }

// The number of features of HcclCommConfig that are understood: the first three (buffer size, determinism, name).
uint32_t HcclGetCommConfigCapability(void) { return 3; }

const char *HcclGetErrorString(HcclResult code) {
    switch (code) {
        case HCCL_E_PARA: return "wrong or different arguments";
        case HCCL_E_NOT_SUPPORT: return "not supported";
        case HCCL_E_SYSCALL: return "no shared memory";
        case HCCL_E_TIMEOUT: return "another rank did not come";
        default: return "no error";
    }
}
