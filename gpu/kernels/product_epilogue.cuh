// What the product kernels do with their sums.
#pragma once
#include "activation.cuh"

enum Epilogue {
    EPILOGUE_STORE = 0,   // output f32 [row][num_outputs] = sum, + bias where there is one
    EPILOGUE_ADD = 1,     // output f32 [row][num_outputs] += sum: the residual stream
    EPILOGUE_SWIGLU = 2,  // tiles alternate gate and up: output bf16 activations of num_outputs / 2
};

// gate / (1 + e^-gate) * up
DEVICE float swiglu(float gate, float up) {
    const float e = exp2_fast(-1.4426950408889634f * gate);
    return __fmul_rn(__fdividef(gate, __fadd_rn(1.0f, e)), up);
}

// One value of EPILOGUE_STORE or EPILOGUE_ADD (KIND).
template <int KIND>
DEVICE void put_output(float* output, const float* bias, int row, int n, int num_outputs, float sum) {
    float* target = output + (size_t)row * num_outputs + n;
    if (KIND == EPILOGUE_ADD)
        *target = __fadd_rn(*target, sum);
    else
        *target = bias ? __fadd_rn(sum, bias[n]) : sum;
}
