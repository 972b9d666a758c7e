// The end of a step: what the host reads goes to pinned memory.
#include "primitives.cuh"

constexpr int PUBLISH_THREADS = 256;

// Copies num_results words, then moves num_proofs words (mirror-store counts and non-finite counts), which become zero
// for the next step. target: address of the u64 that holds the address of the step's pinned buffer, so that a captured
// launch serves buffers in turn; the host reads it after the step's event. Grid: any number of CTAs.
extern "C" __global__ void __launch_bounds__(PUBLISH_THREADS)
    publish_step(const u64* target, const u32* results, i32 num_results, u32* proofs, i32 num_proofs) {
    allow_next_kernel();
    u32* host = (u32*)*target;
    wait_previous_kernel();
    const int first = blockIdx.x * PUBLISH_THREADS + threadIdx.x, stride = gridDim.x * PUBLISH_THREADS;
    for (int i = first; i < num_results; i += stride) host[i] = results[i];
    for (int i = first; i < num_proofs; i += stride) {
        host[num_results + i] = proofs[i];
        proofs[i] = 0;
    }
}
