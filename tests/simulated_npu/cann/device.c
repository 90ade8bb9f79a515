// Start, devices, contexts, options and errors. A device is a number; a context stands for its device.
#include "acl/acl.h"
#include "acl/acl_op_compiler.h"
#include "simulator.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define NO_DEVICE (-1)

static __thread int device_of_thread = NO_DEVICE;
static char contexts[MAX_DEVICES];  // only their addresses matter

static void write_line(const char *format, va_list arguments) {
    fputs("[simulated NPU] ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
}

void complain(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    write_line(format, arguments);
    va_end(arguments);
}

void trace(const char *format, ...) {
    if (!getenv("SIMULATED_NPU_TRACE")) {
        return;
    }
    va_list arguments;
    va_start(arguments, format);
    write_line(format, arguments);
    va_end(arguments);
}

int device_count(void) {
    int64_t count = setting("SIMULATED_NPU_DEVICES", 4);
    return count < 0 ? 0 : count > MAX_DEVICES ? MAX_DEVICES : (int)count;
}

int current_device(void) { return device_of_thread == NO_DEVICE ? 0 : device_of_thread; }

aclError aclInit(const char *configPath) {
    trace("aclInit(%s)", configPath ? configPath : "no configuration");
    return ACL_SUCCESS;
}

aclError aclFinalize() { return ACL_SUCCESS; }

const char *aclGetRecentErrMsg() { return "the simulated NPU has no further words on it; see stderr"; }

void aclAppLog(aclLogLevel logLevel, const char *func, const char *file, uint32_t line, const char *fmt, ...) {}

// ---------------------------------------------------------------------------------------------------------- devices
aclError aclrtGetDeviceCount(uint32_t *count) {
    *count = (uint32_t)device_count();
    return ACL_SUCCESS;
}

aclError aclrtSetDevice(int32_t deviceId) {
    if (deviceId < 0 || deviceId >= device_count()) {
        complain("there is no device %d: SIMULATED_NPU_DEVICES is %d", deviceId, device_count());
        return ACL_ERROR_RT_INVALID_DEVICEID;
    }
    device_of_thread = deviceId;
    return ACL_SUCCESS;
}

aclError aclrtGetDevice(int32_t *deviceId) {
    if (device_of_thread == NO_DEVICE) {
        return ACL_ERROR_RT_CONTEXT_NULL;
    }
    *deviceId = device_of_thread;
    return ACL_SUCCESS;
}

const char *aclrtGetSocName() {
    const char *name = getenv("SIMULATED_NPU_SOC");
    return name ? name : "Ascend910B3";
}

aclError aclrtGetLogicDevIdByUserDevId(const int32_t userDevid, int32_t *const logicDevId) {
    *logicDevId = userDevid;
    return ACL_SUCCESS;
}

aclError aclrtDeviceGetBareTgid(int32_t *pid) {
    *pid = getpid();
    return ACL_SUCCESS;
}

aclError aclrtDeviceCanAccessPeer(int32_t *canAccessPeer, int32_t deviceId, int32_t peerDeviceId) {
    *canAccessPeer = 1;
    return ACL_SUCCESS;
}

// The number of cores is what is asked for; an Ascend 910B has 24.
aclError aclGetDeviceCapability(uint32_t deviceId, aclDeviceInfo deviceInfo, int64_t *value) {
    *value = 24;
    return ACL_SUCCESS;
}

aclError aclrtGetDeviceInfo(uint32_t deviceId, aclrtDevAttr attr, int64_t *value) {
    *value = 24;
    return ACL_SUCCESS;
}

// --------------------------------------------------------------------------------------------------------- contexts
aclError aclrtGetCurrentContext(aclrtContext *context) {
    if (device_of_thread == NO_DEVICE) {
        return ACL_ERROR_RT_CONTEXT_NULL;
    }
    *context = &contexts[device_of_thread];
    return ACL_SUCCESS;
}

aclError aclrtSetCurrentContext(aclrtContext context) {
    device_of_thread = (int)((char *)context - contexts);
    return ACL_SUCCESS;
}

aclError aclrtGetPrimaryCtxState(int32_t deviceId, uint32_t *flags, int32_t *active) {
    if (flags) {
        *flags = 0;
    }
    *active = 1;
    return ACL_SUCCESS;
}

// ---------------------------------------------------------------------------------------------------------- options
aclError aclrtGetSysParamOpt(aclSysParamOpt opt, int64_t *value) {
    *value = 0;
    return ACL_SUCCESS;
}

aclError aclrtSetOpExecuteTimeOutV2(uint64_t timeout, uint64_t *actualTimeout) {
    if (actualTimeout) {
        *actualTimeout = timeout;
    }
    return ACL_SUCCESS;
}

size_t aclGetCompileoptSize(aclCompileOpt opt) { return sizeof "disable" + 1; }

aclError aclGetCompileopt(aclCompileOpt opt, char *value, size_t length) {
    if (length) {
        strncpy(value, "disable", length);
    }
    return ACL_SUCCESS;
}

// An attribute is a feature of CANN that came late; none is here.
aclError aclGetCannAttributeList(const aclCannAttr **cannAttrList, size_t *num) {
    static const aclCannAttr none[1];
    *cannAttrList = none;
    *num = 0;
    return ACL_SUCCESS;
}

aclError aclGetCannAttribute(aclCannAttr cannAttr, int32_t *value) {
    *value = 0;
    return ACL_SUCCESS;
}
