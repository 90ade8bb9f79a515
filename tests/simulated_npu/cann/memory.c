// Device memory is host memory: a header in front of each block says how large it is and whose.
#include "acl/acl.h"
#include "simulator.h"

#include <pthread.h>
#include <string.h>

#define ALIGNMENT 512

struct block {
    size_t size;
    int device;
} __attribute__((aligned(ALIGNMENT)));

static size_t used[MAX_DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static size_t memory_of_device(void) { return (size_t)setting("SIMULATED_NPU_MEMORY", (int64_t)4 << 30); }

aclError aclrtMalloc(void **devPtr, size_t size, aclrtMemMallocPolicy policy) {
    int device = current_device();
    pthread_mutex_lock(&lock);
    int fits = used[device] + size <= memory_of_device();
    used[device] += fits ? size : 0;
    pthread_mutex_unlock(&lock);
    struct block *block;
    if (!fits || posix_memalign((void **)&block, ALIGNMENT, sizeof *block + size)) {
        return ACL_ERROR_RT_MEMORY_ALLOCATION;
    }
    block->size = size;
    block->device = device;
    *devPtr = block + 1;
    if (getenv("SIMULATED_NPU_POISON")) {
        memset(*devPtr, 0xff, size);
    }
    trace("aclrtMalloc(%zu bytes on device %d) = %p", size, device, *devPtr);
    return ACL_SUCCESS;
}

aclError aclrtMallocAlign32(void **devPtr, size_t size, aclrtMemMallocPolicy policy) {
    return aclrtMalloc(devPtr, size, policy);
}

aclError aclrtFree(void *devPtr) {
    if (devPtr) {
        struct block *block = (struct block *)devPtr - 1;
        pthread_mutex_lock(&lock);
        used[block->device] -= block->size;
        pthread_mutex_unlock(&lock);
        free(block);
    }
    return ACL_SUCCESS;
}

aclError aclrtGetMemInfo(aclrtMemAttr attr, size_t *free, size_t *total) {
    *total = memory_of_device();
    *free = *total - used[current_device()];
    return ACL_SUCCESS;
}

aclError aclrtMallocHost(void **hostPtr, size_t size) {
    return posix_memalign(hostPtr, ALIGNMENT, size ? size : 1) ? ACL_ERROR_RT_MEMORY_ALLOCATION : ACL_SUCCESS;
}

aclError aclrtMallocHostWithCfg(void **ptr, uint64_t size, aclrtMallocConfig *cfg) { return aclrtMallocHost(ptr, size); }

aclError aclrtFreeHost(void *hostPtr) {
    free(hostPtr);
    return ACL_SUCCESS;
}

aclError aclrtHostRegister(void *ptr, uint64_t size, aclrtHostRegisterType type, void **devPtr) {
    *devPtr = ptr;
    return ACL_SUCCESS;
}

aclError aclrtMemcpy(void *dst, size_t destMax, const void *src, size_t count, aclrtMemcpyKind kind) {
    if (count > destMax) {
        return ACL_ERROR_INVALID_PARAM;
    }
    memmove(dst, src, count);
    return ACL_SUCCESS;
}

aclError aclrtMemcpyAsync(void *dst, size_t destMax, const void *src, size_t count, aclrtMemcpyKind kind,
                          aclrtStream stream) {
    trace("aclrtMemcpyAsync(%zu bytes, kind %d)", count, (int)kind);
    return aclrtMemcpy(dst, destMax, src, count, kind);
}

aclError aclrtMemcpyAsyncWithCondition(void *dst, size_t destMax, const void *src, size_t count, aclrtMemcpyKind kind,
                                       aclrtStream stream) {
    return aclrtMemcpyAsync(dst, destMax, src, count, kind, stream);
}

aclError aclrtMemset(void *devPtr, size_t maxCount, int32_t value, size_t count) {
    if (count > maxCount) {
        return ACL_ERROR_INVALID_PARAM;
    }
    memset(devPtr, value, count);
    return ACL_SUCCESS;
}

aclError aclrtMemsetAsync(void *devPtr, size_t maxCount, int32_t value, size_t count, aclrtStream stream) {
    return aclrtMemset(devPtr, maxCount, value, count);
}
