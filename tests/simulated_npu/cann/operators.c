// Operators by name, and what describes their tensors.
//
// Operators of torch run on the host, see aten_kernels.py. Those here are what torch_npu's C++ code runs by itself,
// without torch's dispatcher: filling fresh memory, and padding for a copy.
#include "acl/acl.h"
#include "acl/acl_op_compiler.h"
#include "simulator.h"

#include <string.h>

#define MAX_DIMENSIONS 16

struct aclTensorDesc {
    aclDataType type;
    aclFormat format;
    int dimensions;
    int64_t sizes[MAX_DIMENSIONS];
};

struct aclDataBuffer {
    char *data;
    size_t size;
};

// Bytes of an element; 0 for a type that is not known here.
static size_t size_of_type(aclDataType type) {
    switch (type) {
        case ACL_INT8: case ACL_UINT8: case ACL_BOOL: return 1;
        case ACL_FLOAT16: case ACL_BF16: case ACL_INT16: case ACL_UINT16: return 2;
        case ACL_FLOAT: case ACL_INT32: case ACL_UINT32: return 4;
        case ACL_INT64: case ACL_UINT64: case ACL_DOUBLE: case ACL_COMPLEX64: return 8;
        default: return 0;
    }
}

static int64_t number_of_elements(const aclTensorDesc *tensor) {
    int64_t count = 1;
    for (int i = 0; i < tensor->dimensions; i++) {
        count *= tensor->sizes[i];
    }
    return count;
}

aclTensorDesc *aclCreateTensorDesc(aclDataType dataType, int numDims, const int64_t *dims, aclFormat format) {
    aclTensorDesc *tensor = calloc(1, sizeof *tensor);
    tensor->type = dataType;
    tensor->format = format;
    tensor->dimensions = numDims < MAX_DIMENSIONS ? numDims : MAX_DIMENSIONS;
    for (int i = 0; i < tensor->dimensions; i++) {
        tensor->sizes[i] = dims[i];
    }
    return tensor;
}

void aclDestroyTensorDesc(const aclTensorDesc *desc) { free((void *)desc); }

aclDataType aclGetTensorDescType(const aclTensorDesc *desc) { return desc->type; }

aclFormat aclGetTensorDescFormat(const aclTensorDesc *desc) { return desc->format; }

size_t aclGetTensorDescNumDims(const aclTensorDesc *desc) { return (size_t)desc->dimensions; }

aclError aclGetTensorDescDimV2(const aclTensorDesc *desc, size_t index, int64_t *dimSize) {
    *dimSize = desc->sizes[index];
    return ACL_SUCCESS;
}

aclDataBuffer *aclCreateDataBuffer(void *data, size_t size) {
    aclDataBuffer *buffer = malloc(sizeof *buffer);
    *buffer = (aclDataBuffer){data, size};
    return buffer;
}

aclError aclDestroyDataBuffer(const aclDataBuffer *dataBuffer) {
    free((void *)dataBuffer);
    return ACL_SUCCESS;
}

aclopAttr *aclopCreateAttr() { return malloc(1); }

void aclopDestroyAttr(const aclopAttr *attr) { free((void *)attr); }

// ------------------------------------------------------------------------------------------------------ the operators
// inputs: shape, value of one element
static void fill(const aclTensorDesc *output, const aclDataBuffer *value, aclDataBuffer *to) {
    size_t size = size_of_type(output->type);
    for (int64_t i = 0; i < number_of_elements(output); i++) {
        memcpy(to->data + i * size, value->data, size);
    }
}

// inputs: a contiguous tensor; pairs of (elements before, elements after) for each dimension, int32 or int64
static void pad_with_zeros(const aclTensorDesc *input, const aclDataBuffer *from, const aclTensorDesc *widths,
                           const aclDataBuffer *pairs, const aclTensorDesc *output, aclDataBuffer *to) {
    size_t size = size_of_type(input->type);
    memset(to->data, 0, number_of_elements(output) * size);
    for (int64_t i = 0; i < number_of_elements(input); i++) {
        int64_t rest = i, place = 0, stride = 1;
        for (int d = input->dimensions - 1; d >= 0; d--) {
            int64_t before =
                widths->type == ACL_INT64 ? ((int64_t *)pairs->data)[2 * d] : ((int32_t *)pairs->data)[2 * d];
            place += (rest % input->sizes[d] + before) * stride;
            rest /= input->sizes[d];
            stride *= output->sizes[d];
        }
        memcpy(to->data + place * size, from->data + i * size, size);
    }
}

aclError aclopCompileAndExecute(const char *opType, int numInputs, const aclTensorDesc *const inputDesc[],
                                const aclDataBuffer *const inputs[], int numOutputs,
                                const aclTensorDesc *const outputDesc[], aclDataBuffer *const outputs[],
                                const aclopAttr *attr, aclopEngineType engineType, aclopCompileType compileFlag,
                                const char *opPath, aclrtStream stream) {
    trace("aclopCompileAndExecute(%s)", opType);
    int known_type = numOutputs == 1 && size_of_type(outputDesc[0]->type);
    if (!strcmp(opType, "Fill") && numInputs == 2 && known_type) {
        fill(outputDesc[0], inputs[1], outputs[0]);
        return ACL_SUCCESS;
    }
    if ((!strcmp(opType, "PadV3") || !strcmp(opType, "Pad")) && numInputs >= 2 && known_type) {
        pad_with_zeros(inputDesc[0], inputs[0], inputDesc[1], inputs[1], outputDesc[0], outputs[0]);
        return ACL_SUCCESS;
    }
    complain("torch_npu runs CANN's operator %s (%d inputs, output of type %d), which is not emulated: add it to "
             "tests/simulated_npu/cann/operators.c",
             opType, numInputs, numOutputs ? (int)outputDesc[0]->type : -1);
    return ACL_ERROR_OP_NOT_FOUND;
}
