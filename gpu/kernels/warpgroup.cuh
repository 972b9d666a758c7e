// Warpgroup products of sm_90a (HAS_WGMMA): 64 rows x N columns x 16 k by the four warps of an aligned group, with the
// right operand in shared memory and the left one in registers or shared memory.
//
// Accumulators: warp w of the group holds rows 16 w ..; lane 4 g + t has, for the 8-column tile n, c[4n], c[4n+1] =
// (row g, columns 8n + 2t, + 1) and c[4n+2], c[4n+3] = (row g + 8, the same): the layout of mma.sync m16n8k16, whose
// left fragments are the left registers here too.
//
// Operands in shared memory have rows of 128 bytes (64 values), 16-byte unit u of row r at u ^ (r % 8); tiles start at
// multiples of 1024 bytes.
#pragma once
#include "primitives.cuh"

#if HAS_WGMMA
DEVICE void warpgroup_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
DEVICE void warpgroup_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most PENDING committed groups are unfinished; groups finish in order.
template <int PENDING>
DEVICE void warpgroup_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Registers of finished products: whatever reads them stays behind this, whatever the next product starts from before
// it.
template <int COUNT>
DEVICE void pin_registers(float (&c)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(c[i])::"memory");
}
// Registers of each thread of the calling warpgroup; COUNT is a multiple of 8.
template <int COUNT>
DEVICE void lower_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
DEVICE void raise_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Descriptors of a tile with 128-byte swizzle; add (bytes >> 4) to move inside it.
// k along the 128 bytes (one k16 = 32 bytes further), 8 rows = 1024 bytes.
DEVICE u64 descriptor_k_major(u32 address) {
    return 0x4000000000000000ull | ((u64)(1024 >> 4) << 32) | (1ull << 16) | ((address >> 4) & 0x3fff);
}
// Columns along the 128 bytes (k16 = 16 rows = 2048 bytes further); the next 64 columns lie `next_columns` bytes
// further.
DEVICE u64 descriptor_column_major(u32 address, u32 next_columns) {
    return 0x4000000000000000ull | ((u64)(1024 >> 4) << 32) | ((u64)(next_columns >> 4) << 16) |
           ((address >> 4) & 0x3fff);
}

// The same tile `bytes` further on: only the low word changes.
DEVICE u64 descriptor_at(u64 descriptor, u32 bytes) {
    return (descriptor & 0xffffffff00000000ull) | (u32)((u32)descriptor + (bytes >> 4));
}

// Operand lists of the inline assembly. COUNT accumulators come first, the inputs after them.
#define WGMMA_TEXT_32                                                                                                \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29," \
    "%30,%31"
#define WGMMA_TEXT_64                                                                                       \
    WGMMA_TEXT_32                                                                                           \
        ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55," \
        "%56,%57,%58,%59,%60,%61,%62,%63"
#define WGMMA_TEXT_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define WGMMA_TEXT_48 WGMMA_TEXT_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define WGMMA_TEXT_96                                                                       \
    WGMMA_TEXT_64                                                                           \
        ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83," \
        "%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define WGMMA_LIST_8(c, i)                                                                                  \
    "+f"((c)[i]), "+f"((c)[i + 1]), "+f"((c)[i + 2]), "+f"((c)[i + 3]), "+f"((c)[i + 4]), "+f"((c)[i + 5]), \
        "+f"((c)[i + 6]), "+f"((c)[i + 7])
#define WGMMA_LIST_32(c, i) WGMMA_LIST_8(c, i), WGMMA_LIST_8(c, i + 8), WGMMA_LIST_8(c, i + 16), WGMMA_LIST_8(c, i + 24)
#define WGMMA_LIST_16(c, i) WGMMA_LIST_8(c, i), WGMMA_LIST_8(c, i + 8)
#define WGMMA_LIST_48(c) WGMMA_LIST_32(c, 0), WGMMA_LIST_16(c, 32)
#define WGMMA_LIST_64(c) WGMMA_LIST_32(c, 0), WGMMA_LIST_32(c, 32)
#define WGMMA_LIST_96(c) WGMMA_LIST_64(c), WGMMA_LIST_32(c, 64)

// c = a b, or c += a b when `accumulate`. Left operand in four registers.
#define WGMMA_REGISTERS(SHAPE, TRANSPOSED, TEXT, LIST, N0, N1, N2, N3, N4, N5)                                  \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #N5 ", 0;\nwgmma.mma_async.sync.aligned." SHAPE " {" TEXT \
                 "}, {%" #N0 ",%" #N1 ",%" #N2 ",%" #N3 "}, %" #N4 ", p, 1, 1, " #TRANSPOSED ";\n}"             \
                 : LIST                                                                                         \
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(accumulate))
// Left operand in shared memory, k along the 128 bytes.
#define WGMMA_SHARED(SHAPE, TRANSPOSED, TEXT, LIST, N0, N1, N2)                                                 \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #N2 ", 0;\nwgmma.mma_async.sync.aligned." SHAPE " {" TEXT \
                 "}, %" #N0 ", %" #N1 ", p, 1, 1, 0, " #TRANSPOSED ";\n}"                                       \
                 : LIST                                                                                         \
                 : "l"(a), "l"(b), "r"(accumulate))

// f16, 64 columns, b with k along its rows of 128 bytes.
DEVICE void warpgroup_multiply_half(float (&c)[32], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int accumulate) {
    WGMMA_REGISTERS("m64n64k16.f32.f16.f16", 0, WGMMA_TEXT_32, WGMMA_LIST_32(c, 0), 32, 33, 34, 35, 36, 37);
}
DEVICE void warpgroup_multiply_half(float (&c)[32], u64 a, u64 b, int accumulate) {
    WGMMA_SHARED("m64n64k16.f32.f16.f16", 0, WGMMA_TEXT_32, WGMMA_LIST_32(c, 0), 32, 33, 34);
}
// f16, 64 or 128 columns, b with its columns along the rows of 128 bytes.
DEVICE void warpgroup_multiply_half_columns(float (&c)[32], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int accumulate) {
    WGMMA_REGISTERS("m64n64k16.f32.f16.f16", 1, WGMMA_TEXT_32, WGMMA_LIST_32(c, 0), 32, 33, 34, 35, 36, 37);
}
DEVICE void warpgroup_multiply_half_columns(float (&c)[64], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int accumulate) {
    WGMMA_REGISTERS("m64n128k16.f32.f16.f16", 1, WGMMA_TEXT_64, WGMMA_LIST_64(c), 64, 65, 66, 67, 68, 69);
}
// bf16, 32, 64, 96 or 192 columns, b with k along its rows of 128 bytes.
DEVICE void warpgroup_multiply_bf16(float (&c)[16], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int accumulate) {
    WGMMA_REGISTERS("m64n32k16.f32.bf16.bf16", 0, WGMMA_TEXT_16, WGMMA_LIST_16(c, 0), 16, 17, 18, 19, 20, 21);
}
DEVICE void warpgroup_multiply_bf16(float (&c)[32], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int accumulate) {
    WGMMA_REGISTERS("m64n64k16.f32.bf16.bf16", 0, WGMMA_TEXT_32, WGMMA_LIST_32(c, 0), 32, 33, 34, 35, 36, 37);
}
DEVICE void warpgroup_multiply_bf16(float (&c)[48], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int accumulate) {
    WGMMA_REGISTERS("m64n96k16.f32.bf16.bf16", 0, WGMMA_TEXT_48, WGMMA_LIST_48(c), 48, 49, 50, 51, 52, 53);
}
DEVICE void warpgroup_multiply_bf16(float (&c)[96], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int accumulate) {
    WGMMA_REGISTERS("m64n192k16.f32.bf16.bf16", 0, WGMMA_TEXT_96, WGMMA_LIST_96(c), 96, 97, 98, 99, 100, 101);
}
#endif
