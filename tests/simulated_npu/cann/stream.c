// Streams and events. Whatever is put on a stream is done when the call returns, so there is nothing to wait for.
#include "acl/acl.h"
#include "simulator.h"

#include <time.h>
#include <unistd.h>

struct stream {
    int32_t id;
};

struct event {
    struct timespec recorded_at;
};

static int32_t streams_made;

aclError aclrtCreateStream(aclrtStream *stream) {
    struct stream *made = malloc(sizeof *made);
    made->id = __sync_fetch_and_add(&streams_made, 1);
    *stream = made;
    return ACL_SUCCESS;
}

aclError aclrtCreateStreamWithConfig(aclrtStream *stream, uint32_t priority, uint32_t flag) {
    return aclrtCreateStream(stream);
}

aclError aclrtDestroyStream(aclrtStream stream) {
    free(stream);
    return ACL_SUCCESS;
}

aclError aclrtDestroyStreamForce(aclrtStream stream) { return aclrtDestroyStream(stream); }

aclError aclrtStreamGetId(aclrtStream stream, int32_t *streamId) {
    *streamId = stream ? ((struct stream *)stream)->id : 0;
    return ACL_SUCCESS;
}

aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus *status) {
    *status = ACL_STREAM_STATUS_COMPLETE;
    return ACL_SUCCESS;
}

aclError aclrtGetStreamOverflowSwitch(aclrtStream stream, uint32_t *flag) {
    *flag = 0;
    return ACL_SUCCESS;
}

aclError aclrtCreateEventExWithFlag(aclrtEvent *event, uint32_t flag) {
    *event = calloc(1, sizeof(struct event));
    return ACL_SUCCESS;
}

aclError aclrtCreateEventWithFlag(aclrtEvent *event, uint32_t flag) { return aclrtCreateEventExWithFlag(event, flag); }

aclError aclrtCreateEvent(aclrtEvent *event) { return aclrtCreateEventExWithFlag(event, 0); }

aclError aclrtDestroyEvent(aclrtEvent event) {
    free(event);
    return ACL_SUCCESS;
}

aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
    clock_gettime(CLOCK_MONOTONIC, &((struct event *)event)->recorded_at);
    return ACL_SUCCESS;
}

aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus *status) {
    *status = ACL_EVENT_RECORDED_STATUS_COMPLETE;
    return ACL_SUCCESS;
}

aclError aclrtQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus *status) {
    *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
    return ACL_SUCCESS;
}

static double microseconds(aclrtEvent event) {
    struct timespec t = ((struct event *)event)->recorded_at;
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

aclError aclrtEventElapsedTime(float *ms, aclrtEvent startEvent, aclrtEvent endEvent) {
    *ms = (float)((microseconds(endEvent) - microseconds(startEvent)) * 1e-3);
    return ACL_SUCCESS;
}

aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t *timestamp) {
    *timestamp = (uint64_t)microseconds(event);
    return ACL_SUCCESS;
}

// torch_npu has a thread that calls this in a loop; it must not take a whole core.
aclError aclrtProcessReport(int32_t timeout) {
    usleep(1000);
    return ACL_SUCCESS;
}

aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc fn, void *args) {
    fn(args);
    return ACL_SUCCESS;
}

aclError aclrtLaunchCallback(aclrtCallback fn, void *userData, aclrtCallbackBlockType blockType, aclrtStream stream) {
    fn(userData);
    return ACL_SUCCESS;
}
