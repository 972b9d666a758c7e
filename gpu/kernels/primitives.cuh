// What the kernels need from the hardware, one name per thing, for every architecture from sm_70 on.
//
// Three levels, chosen at compile time:
//   HAS_WGMMA  warpgroup products (sm_90a)
//   HAS_BULK   bulk copies that complete on an mbarrier, programmatic dependent launch (sm_90 and later)
//   HAS_MMA    mma.sync and cp.async (sm_80 and later); below, products are f32 fused multiply-adds over shuffles
// -DKVALET_NO_WGMMA, -DKVALET_NO_BULK and -DKVALET_NO_MMA take a level away, so that any device can run the lower ones.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

#define DEVICE __device__ __forceinline__
#define FULL_WARP 0xffffffffu
#define NEGATIVE_INFINITY __int_as_float(0xff800000)

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800 && !defined(KVALET_NO_MMA)
#define HAS_MMA 1
#else
#define HAS_MMA 0
#endif
#if HAS_MMA && __CUDA_ARCH__ >= 900 && !defined(KVALET_NO_BULK)
#define HAS_BULK 1
#else
#define HAS_BULK 0
#endif
#if HAS_BULK && defined(__CUDA_ARCH_FEAT_SM90_ALL) && !defined(KVALET_NO_WGMMA)
#define HAS_WGMMA 1
#else
#define HAS_WGMMA 0
#endif

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// ---- order between kernels -------------------------------------------------------------------------------------
// A kernel lets its successor start at once; a kernel waits before it touches anything that others write or read.
DEVICE void allow_next_kernel() {
#if HAS_BULK
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
DEVICE void wait_previous_kernel() {
#if HAS_BULK
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---- mbarriers and bulk copies (HAS_BULK) ------------------------------------------------------------------------
#if HAS_BULK
DEVICE void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
DEVICE void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Waits for a phase. Bounded unless -DKVALET_UNBOUNDED_WAIT: a hang costs more than a trap. (In wgmma loops the bound
// makes ptxas serialize them, so those sources define KVALET_UNBOUNDED_WAIT.)
DEVICE void barrier_wait(u32 barrier, u32 parity) {
    u32 done;
#ifndef KVALET_UNBOUNDED_WAIT
    int tries = 0;
#endif
    do {
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
#ifndef KVALET_UNBOUNDED_WAIT
        if (!done && ++tries > 4000000) __trap();
#endif
    } while (!done);
}
// What createpolicy gives for evict_first with fraction 1.0.
#define EVICT_FIRST 0x12f0000000000000ull
DEVICE u64 evict_first_policy() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
// bytes: a multiple of 16, both addresses 16-byte aligned.
DEVICE void bulk_copy(u32 shared, const void* source, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
                 "l"(source), "r"(bytes), "r"(barrier)
                 : "memory");
}
DEVICE void bulk_copy(u32 shared, const void* source, u32 bytes, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
            shared),
        "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}
DEVICE void shared_to_async_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
#endif

// ---- asynchronous 16-byte copies (a plain copy below sm_80) --------------------------------------------------------
// Copies the first `bytes` (0 or 16) of 16 bytes and zeroes the rest.
DEVICE void async_copy16(u32 shared, const void* source, u32 bytes = 16) {
#if HAS_MMA
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(source), "r"(bytes) : "memory");
#else
    uint4 value = bytes ? *(const uint4*)source : make_uint4(0, 0, 0, 0);
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(shared), "r"(value.x), "r"(value.y), "r"(value.z),
                 "r"(value.w)
                 : "memory");
#endif
}
DEVICE void async_commit() {
#if HAS_MMA
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int PENDING>
DEVICE void async_wait() {
#if HAS_MMA
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// ---- loads and stores ----------------------------------------------------------------------------------------------
DEVICE u32 load_shared32(u32 a) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(a));
    return v;
}
DEVICE u32 load_shared16(u32 a) {
    u16 v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(a));
    return v;
}
DEVICE uint2 load_shared64(u32 a) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(a));
    return v;
}
DEVICE uint4 load_shared128(u32 a) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a));
    return v;
}
DEVICE float4 load_shared_float4(u32 a) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(a));
    return v;
}
DEVICE void store_shared128(u32 a, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(a), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
DEVICE void store_shared_float4(u32 a, const float* v) {
    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(a), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
                 : "memory");
}
DEVICE float2 load_shared_float2(u32 a) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(a));
    return v;
}
DEVICE u32 load_shared8(u32 a) {
    u32 v;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(a));
    return v;
}
DEVICE void store_shared64(u32 a, u32 low, u32 high) {
    asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(a), "r"(low), "r"(high) : "memory");
}
DEVICE void store_shared32(u32 a, u32 v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(a), "r"(v) : "memory"); }
DEVICE void store_shared16(u32 a, u16 v) { asm volatile("st.shared.u16 [%0], %1;" ::"r"(a), "h"(v) : "memory"); }
DEVICE void store_shared_float(u32 a, float v) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(a), "f"(v) : "memory"); }
DEVICE void store_shared_float2(u32 a, float x, float y) {
    asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(a), "f"(x), "f"(y) : "memory");
}
// Four 8 x 8 matrices of 16-bit values; lane 8 i + r gives the address of row r of matrix i. Lane 4 g + t gets of each
// (row g, columns 2t, 2t + 1); transposed: (rows 2t, 2t + 1, column g).
DEVICE void load_matrices(u32 (&r)[4], u32 a) {
#if HAS_MMA
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(a));
#else
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < 4; i++) r[i] = load_shared32(__shfl_sync(FULL_WARP, a, 8 * i + (lane >> 2)) + (lane & 3) * 4);
#endif
}
DEVICE void load_matrices_transposed(u32 (&r)[4], u32 a) {
#if HAS_MMA
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(a));
#else
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 even = load_shared16(__shfl_sync(FULL_WARP, a, 8 * i + 2 * (lane & 3)) + (lane >> 2) * 2);
        const u32 odd = load_shared16(__shfl_sync(FULL_WARP, a, 8 * i + 2 * (lane & 3) + 1) + (lane >> 2) * 2);
        r[i] = even | (odd << 16);
    }
#endif
}
// Transposes an 8 x 8 matrix of 16-bit values: lane 4 g + t gives (row g, columns 2t, 2t + 1) and gets (rows 2t, 2t + 1,
// column g).
DEVICE u32 transpose_matrix(u32 v) {
    u32 r;
#if HAS_MMA
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
#else
    const int lane = threadIdx.x & 31, source = 8 * (lane & 3) + (lane >> 3), shift = (lane >> 2 & 1) * 16;
    const u32 even = __shfl_sync(FULL_WARP, v, source) >> shift, odd = __shfl_sync(FULL_WARP, v, source + 4) >> shift;
    r = (even & 0xffffu) | (odd << 16);
#endif
    return r;
}
// Read-once data, 16 bytes: stays out of the first-level cache.
DEVICE uint4 load_streaming(const void* p) {
    uint4 v;
#if HAS_MMA
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
#else
    v = *(const uint4*)p;
#endif
    return v;
}
// An entry of a table. The compiler does not take it for the same in all lanes, so it waits at the first use only.
DEVICE u64 load_global64(const void* p) {
    u64 v;
    asm volatile("ld.global.u64 %0, [%1];" : "=l"(v) : "l"(p));
    return v;
}
// 16 bytes that an earlier kernel of the step wrote.
DEVICE uint4 load_global128(const void* p) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}

// ---- numbers -------------------------------------------------------------------------------------------------------
// Pairs: the low half is the first value.
DEVICE u32 pack_half(float low, float high) {
    u32 r;
#if HAS_MMA
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#else
    asm("{.reg .f16 a, b; cvt.rn.f16.f32 a, %1; cvt.rn.f16.f32 b, %2; mov.b32 %0, {a, b};}"
        : "=r"(r)
        : "f"(low), "f"(high));
#endif
    return r;
}
DEVICE u16 float_to_half(float x) {
    u16 r;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(x));
    return r;
}
DEVICE float half_to_float(u16 x) {
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x));
    return r;
}
DEVICE float2 unpack_half(u32 pair) {
    float2 r;
    asm("{.reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}" : "=f"(r.x), "=f"(r.y) : "r"(pair));
    return r;
}
// bf16, round to nearest even; NaN stays a NaN.
DEVICE u16 float_to_bf16(float x) {
    u32 bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (u16)((bits >> 16) | 0x40);
    return (u16)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}
DEVICE u32 pack_bf16(float low, float high) {
#if HAS_MMA
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
#else
    return (u32)float_to_bf16(low) | ((u32)float_to_bf16(high) << 16);
#endif
}
DEVICE float bf16_low(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float bf16_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
DEVICE u32 subtract_half2(u32 a, u32 b) {
    u32 r;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
DEVICE u32 multiply_half2(u32 a, u32 b) {
    u32 r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
DEVICE u32 fma_half2(u32 a, u32 b, u32 c) {
    u32 r;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}
// Differences of small whole numbers: exact, so any way to compute them gives the same bits.
DEVICE u32 subtract_bf16x2(u32 a, u32 b) {
#if HAS_BULK
    u32 r;
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
#elif HAS_MMA
    u32 r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(0x3f803f80u), "r"(b ^ 0x80008000u));
    return r;
#else
    return pack_bf16(bf16_low(a) - bf16_low(b), bf16_high(a) - bf16_high(b));
#endif
}
DEVICE u32 and_or(u32 a, u32 mask, u32 bits) {
    u32 r;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(a), "r"(mask), "r"(bits));
    return r;
}
DEVICE u32 and_xor(u32 a, u32 mask, u32 bits) {
    u32 r;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(r) : "r"(a), "r"(mask), "r"(bits));
    return r;
}
DEVICE u32 permute_bytes(u32 a, u32 b, u32 selector) {
    u32 r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
    return r;
}
// 2^x by the hardware's unit; 0 for -inf.
DEVICE float exp2_fast(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// ---- the warp's matrix product: c += a b -----------------------------------------------------------------------
// a: 16 rows x 16 k, b: 16 k x 8 columns, c: 16 x 8 f32. Lane 4 g + t holds a0 = (row g, k 2t..), a1 = (g + 8, 2t..),
// a2 = (g, 2t + 8..), a3 = (g + 8, 2t + 8..); b0 = (k 2t.., column g), b1 = (k 2t + 8.., column g);
// c0, c1 = (row g, columns 2t, 2t + 1), c2, c3 = (row g + 8, the same).
#if !HAS_MMA
template <typename Widen>
DEVICE float4 multiply_shuffled(float4 c, uint4 a, u32 b0, u32 b1, Widen widen) {
    const int lane = threadIdx.x & 31, quad = lane & ~3, t = lane & 3;
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float2 top = widen(__shfl_sync(FULL_WARP, half ? a.z : a.x, quad + j));
            const float2 low = widen(__shfl_sync(FULL_WARP, half ? a.w : a.y, quad + j));
            const float2 first = widen(__shfl_sync(FULL_WARP, half ? b1 : b0, 8 * t + j));
            const float2 second = widen(__shfl_sync(FULL_WARP, half ? b1 : b0, 8 * t + 4 + j));
            c.x = fmaf(top.y, first.y, fmaf(top.x, first.x, c.x));
            c.y = fmaf(top.y, second.y, fmaf(top.x, second.x, c.y));
            c.z = fmaf(low.y, first.y, fmaf(low.x, first.x, c.z));
            c.w = fmaf(low.y, second.y, fmaf(low.x, second.x, c.w));
        }
    }
    return c;
}
// Functions of their own: put in place, hundreds of them would take minutes to compile.
__device__ __noinline__ float4 multiply_bf16_shuffled(float4 c, uint4 a, u32 b0, u32 b1) {
    return multiply_shuffled(c, a, b0, b1, [](u32 v) { return make_float2(bf16_low(v), bf16_high(v)); });
}
__device__ __noinline__ float4 multiply_half_shuffled(float4 c, uint4 a, u32 b0, u32 b1) {
    return multiply_shuffled(c, a, b0, b1, [](u32 v) { return unpack_half(v); });
}
#endif
DEVICE void multiply_bf16(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if HAS_MMA
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
    const float4 sum = multiply_bf16_shuffled({c[0], c[1], c[2], c[3]}, {a0, a1, a2, a3}, b0, b1);
    c[0] = sum.x, c[1] = sum.y, c[2] = sum.z, c[3] = sum.w;
#endif
}
DEVICE void multiply_half(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if HAS_MMA
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
    const float4 sum = multiply_half_shuffled({c[0], c[1], c[2], c[3]}, {a0, a1, a2, a3}, b0, b1);
    c[0] = sum.x, c[1] = sum.y, c[2] = sum.z, c[3] = sum.w;
#endif
}
