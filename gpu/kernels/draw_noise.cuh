// Numbers of a draw. exp_exact, log_exact and gumbel_noise give the host's bits (gpu/cpu/sampling.py): the same terms,
// each product and sum rounded by itself.
#pragma once
#include "primitives.cuh"

constexpr double LN2 = 0.6931471805599453, LOG2E = 1.4426950408889634;

// 2^exponent, for a normal result.
DEVICE double power_of_two(int exponent) { return __longlong_as_double((i64)(exponent + 1023) << 52); }

// exp of x <= 0.
DEVICE double exp_exact(double x) {
    if (x < -700.0) return 0.0;
    const int exponent = __double2int_rd(__dadd_rn(__dmul_rn(x, LOG2E), 0.5));
    const double rest = __dadd_rn(x, -__dmul_rn((double)exponent, LN2));
    double factorial = 6227020800.0;  // of 13
    double sum = 1.0 / factorial;
#pragma unroll
    for (int n = 13; n > 0; n--) {
        factorial /= n;
        sum = __dadd_rn(__dmul_rn(sum, rest), 1.0 / factorial);
    }
    return __dmul_rn(sum, power_of_two(exponent));
}

// exp of -700 <= x <= 0 with half the operations, to 1e-14: for sums.
DEVICE double exp_fused(double x) {
    const int exponent = __double2int_rn(x * LOG2E);
    const double rest = __fma_rn((double)exponent, -LN2, x);
    double factorial = 39916800.0;  // of 11
    double sum = 1.0 / factorial;
#pragma unroll
    for (int n = 11; n > 0; n--) {
        factorial /= n;
        sum = __fma_rn(sum, rest, 1.0 / factorial);
    }
    return sum * power_of_two(exponent);
}

// Natural logarithm of a normal x > 0.
DEVICE double log_exact(double x) {
    const i64 bits = __double_as_longlong(x);
    int exponent = (int)(bits >> 52) - 1022;
    double mantissa = __longlong_as_double((bits & 0x000fffffffffffffll) | 0x3fe0000000000000ll);
    if (mantissa < 0.7071067811865476) {
        mantissa *= 2.0;
        exponent--;
    }
    const double ratio = __ddiv_rn(__dadd_rn(mantissa, -1.0), __dadd_rn(mantissa, 1.0));
    const double square = __dmul_rn(ratio, ratio);
    double sum = 0.0;
#pragma unroll
    for (int n = 23; n > 0; n -= 2) sum = __dadd_rn(__dmul_rn(sum, square), 1.0 / n);
    return __dadd_rn(__dmul_rn((double)exponent, LN2), __dmul_rn(__dmul_rn(2.0, ratio), sum));
}

// Philox4x32-10 (Salmon et al., SC11) at counter (position, choice, quad, 0): the words of ids 4 quad .. 4 quad + 3.
DEVICE uint4 philox(u64 seed, u32 position, u32 choice, u32 quad) {
    u32 key0 = (u32)seed, key1 = (u32)(seed >> 32);
    u32 x0 = position, x1 = choice, x2 = quad, x3 = 0;
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const u32 high0 = __umulhi(0xD2511F53u, x0), low0 = 0xD2511F53u * x0;
        const u32 high1 = __umulhi(0xCD9E8D57u, x2), low1 = 0xCD9E8D57u * x2;
        x0 = high1 ^ x1 ^ key0;
        x2 = high0 ^ x3 ^ key1;
        x1 = low1;
        x3 = low0;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return make_uint4(x0, x1, x2, x3);
}

// -log(-log(u)) for u = (word + 1/2) / 2^32.
DEVICE double gumbel_noise(u32 word) {
    const double u = __dmul_rn(__dadd_rn((double)word, 0.5), 2.3283064365386963e-10);
    return -log_exact(-log_exact(u));
}
// At most 0.001 below the noise, mostly above it: -log(1 - u), since -log(u) >= 1 - u.
DEVICE float noise_bound(u32 word) {
    float log2_rest;
    asm("lg2.approx.f32 %0, %1;" : "=f"(log2_rest) : "f"((float)~word + 0.5f));
    return 0.69314718f * (32.0f - log2_rest);
}
