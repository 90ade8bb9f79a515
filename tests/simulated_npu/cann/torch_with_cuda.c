// Not CANN: what lets torch_npu be loaded beside a torch that was built for CUDA.
//
// torch_npu is built against a torch without CUDA. From 2.14 on it tells torch which settings of its allocator it parses,
// and so does CUDA's allocator, which is loaded first in a torch that has it; a setting that two of them name ends the
// process, while torch_npu is being loaded. So torch_npu gets a set of names of its own in place of libc10's: what a library
// that was loaded for all defines is taken before what others define. Nothing reads that set, unless PYTORCH_NPU_ALLOC_CONF
// is set.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// std::unordered_set<std::string> of libstdc++, empty.
static struct {
    void **buckets;
    size_t bucket_count;
    void *first;
    size_t size;
    float largest_load;
    size_t next_resize;
    void *only_bucket;
} names = {&names.only_bucket, 1, NULL, 0, 1.0f, 0, NULL};

#define GET_MUTABLE_KEYS _ZN3c1016CachingAllocator26AcceleratorAllocatorConfig14getMutableKeysB5cxx11Ev
#define QUOTED(name) #name
#define NAME_OF(macro) QUOTED(macro)

// c10::CachingAllocator::AcceleratorAllocatorConfig::getMutableKeys()
void *GET_MUTABLE_KEYS(void);

void *GET_MUTABLE_KEYS(void) {
    Dl_info caller;
    if (dladdr(__builtin_return_address(0), &caller) && strstr(caller.dli_fname, "libtorch_npu")) return &names;
    // CUDA's, where torch_npu is imported before torch.
    void *library = dlopen("libc10.so", RTLD_LAZY | RTLD_NOLOAD);
    void *(*original)(void) = library ? (void *(*)(void))dlsym(library, NAME_OF(GET_MUTABLE_KEYS)) : NULL;
    if (!original) {
        fprintf(stderr, "[simulated NPU] libc10 has no " NAME_OF(GET_MUTABLE_KEYS) "\n");
        abort();
    }
    return original();
}
