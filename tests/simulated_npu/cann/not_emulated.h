// For not_emulated.c, which build.py writes: one line for each function that torch_npu links against and that no other
// file here defines. Without them torch_npu could not be loaded; calling one ends the process with its name.
#include <stdio.h>
#include <stdlib.h>

#define NOT_EMULATED(name)                                                                                \
    void name(void) {                                                                                     \
        fputs("[simulated NPU] torch_npu called CANN's " #name ", which is not emulated: add it to a file " \
              "in tests/simulated_npu/cann/\n", stderr);                                                  \
        abort();                                                                                          \
    }
