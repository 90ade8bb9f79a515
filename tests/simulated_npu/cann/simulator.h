// What the files of the stand-in share.
//
// Settings are environment variables, read when they are needed:
//   SIMULATED_NPU_DEVICES  number of devices, 4 by default, at most 16
//   SIMULATED_NPU_MEMORY   bytes on each device, 4 GiB by default; more is "out of memory"
//   SIMULATED_NPU_SOC      name of the chip, Ascend910B3 by default
//   SIMULATED_NPU_POISON   when set, fresh device memory is filled with 0xff (NaN) instead of being left as it is
//   SIMULATED_NPU_TIMEOUT  seconds that a rank waits for another one in a collective, 120 by default
//   SIMULATED_NPU_TRACE    when set, the more telling calls are written to stderr
#ifndef SIMULATED_NPU_SIMULATOR_H
#define SIMULATED_NPU_SIMULATOR_H

#include <stdint.h>
#include <stdlib.h>

#define MAX_DEVICES 16

// Value of an integer setting, or `otherwise` when it is not set.
static inline int64_t setting(const char *name, int64_t otherwise) {
    const char *text = getenv(name);
    return text ? strtoll(text, NULL, 10) : otherwise;
}

// Write a line to stderr when SIMULATED_NPU_TRACE is set.
void trace(const char *format, ...) __attribute__((format(printf, 1, 2)));

// Write a line to stderr, in any case.
void complain(const char *format, ...) __attribute__((format(printf, 1, 2)));

// Device that is current in this thread; 0 before any was set.
int current_device(void);

int device_count(void);

#endif
