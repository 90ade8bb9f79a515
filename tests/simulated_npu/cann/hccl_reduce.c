// Element-wise reductions, for the data types that the real HCCL reduces: int8 to int64, fp16, bf16 and fp32.
#include "hccl.h"

#include <string.h>

uint64_t size_of(HcclDataType type) {
    switch (type) {
        case HCCL_INT8: case HCCL_UINT8: case HCCL_HIF8: case HCCL_FP8E4M3: case HCCL_FP8E5M2: case HCCL_FP8E8M0:
            return 1;
        case HCCL_INT16: case HCCL_UINT16: case HCCL_FP16: case HCCL_BFP16:
            return 2;
        case HCCL_INT32: case HCCL_UINT32: case HCCL_FP32:
            return 4;
        case HCCL_INT64: case HCCL_UINT64: case HCCL_FP64:
            return 8;
        case HCCL_INT128:
            return 16;
        default:
            return 0;
    }
}

static float float_of_bf16(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// Rounds to nearest, ties to even; a NaN stays one.
static uint16_t bf16_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffff) > 0x7f800000) {
        return (uint16_t)(bits >> 16) | 0x40;
    }
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

#define SAME(x) (x)
#define FLOAT_OF_FP16(x) ((float)(x))
#define FP16_OF_FLOAT(x) ((_Float16)(x))

#define COMBINE(x, y)                       \
    (op == HCCL_REDUCE_SUM    ? (x) + (y)   \
     : op == HCCL_REDUCE_PROD ? (x) * (y)   \
     : op == HCCL_REDUCE_MAX  ? ((x) > (y) ? (x) : (y)) \
                              : ((x) < (y) ? (x) : (y)))

#define REDUCE(TYPE, LOAD, STORE)                                        \
    {                                                                    \
        TYPE *a = target;                                                \
        const TYPE *b = source;                                          \
        for (uint64_t i = 0; i < count; i++) {                           \
            a[i] = STORE(COMBINE(LOAD(a[i]), LOAD(b[i])));               \
        }                                                                \
        return HCCL_SUCCESS;                                             \
    }

HcclResult reduce_into(void *target, const void *source, uint64_t count, HcclDataType type, HcclReduceOp op) {
    if (op > HCCL_REDUCE_MIN) {
        complain("HCCL has no reduction %d", (int)op);
        return HCCL_E_NOT_SUPPORT;
    }
    switch (type) {
        case HCCL_INT8: REDUCE(int8_t, SAME, SAME)
        case HCCL_INT16: REDUCE(int16_t, SAME, SAME)
        case HCCL_INT32: REDUCE(int32_t, SAME, SAME)
        case HCCL_INT64: REDUCE(int64_t, SAME, SAME)
        case HCCL_FP16: REDUCE(_Float16, FLOAT_OF_FP16, FP16_OF_FLOAT)
        case HCCL_BFP16: REDUCE(uint16_t, float_of_bf16, bf16_of_float)
        case HCCL_FP32: REDUCE(float, SAME, SAME)
        default:
            complain("HCCL does not reduce data type %d", (int)type);
            return HCCL_E_NOT_SUPPORT;
    }
}
