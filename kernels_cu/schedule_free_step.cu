// A step of schedule-free AdamW over all tensors of an optimizer, in place.
//
//   square = beta2 * square + (1 - beta2) * g^2
//   change = rate * (g / (sqrt(square) / unbiased + eps) + weight_decay * p)
//   p = p + share * (base - p) - (1 - beta1 * (1 - share)) * change
//   base = base - change
//   where unbiased = sqrt(1 - beta2^step), rate = lr * min(1, step / warmup),
//   and share = weight / (sum of weights), weight = (largest rate so far)^2
//
//   Where `finite` is false the step is skipped and no bit changes.  Gradients are multiplied by
//   `factor` first.  Weights have the rate of the step, `lr` that of a group of tensors.
//
//   traffic     elements * (2 * sizeof(parameter) + sizeof(gradient) + sizeof(copy) + 16)
//   constants   those of common/steps.cuh, with the fields BASE and SQUARE
//
//   The trick: the numbers of a step are kept on the device, and one thread of each block derives
//   them from those of the step before; the last block to end writes them.  So the host need not
//   know whether a step was skipped.
#include <common/steps.cuh>

enum Numbers { STEPS, LARGEST, SUM, POWER, NUMBERS };  // POWER: beta2^steps

// numbers: those of the steps before; arrived: blocks that have ended; beta: {beta1, beta2}
KERNEL(THREADS)
schedule_free_step(const long long *tensors, const int *owners, const float *factor,
                   const bool *finite, double *numbers, unsigned *arrived, const double *betas,
                   float rest2, float lr, float eps, float weight_decay, double rate_of_step,
                   float warmup) {
    if (finite && !*finite) return;
    __shared__ float rate, unbiased, share;
    __shared__ double now[NUMBERS];
    if (threadIdx.x == 0) {
        now[STEPS] = numbers[STEPS] + 1;
        const double growth = now[STEPS] < warmup ? now[STEPS] / warmup : 1.0;
        const double grown = rate_of_step * growth, largest = numbers[LARGEST];
        now[LARGEST] = grown > largest ? grown : largest;
        const double weight = now[LARGEST] * now[LARGEST];
        now[SUM] = numbers[SUM] + weight;
        now[POWER] = numbers[POWER] * betas[1];
        rate = (float)(lr * growth);
        unbiased = (float)sqrt(1 - now[POWER]);
        share = weight > 0 ? (float)(weight / now[SUM]) : 0.0f;
    }
    __syncthreads();
    const float beta2 = (float)betas[1], kept = 1.0f - (float)betas[0] * (1.0f - share);
    const long long *tensor = tensors + (long long)owners[blockIdx.x] * FIELDS;
    with_kind(tensor[KIND], [&](auto kind) {
        step_chunk<decltype(kind)::value, BASE, SQUARE>(
            tensor, factor ? *factor : 1.0f,
            [&](float &p, float g, float &base, float &square) {
                square = square * beta2 + g * g * rest2;
                const float size = sqrtf(square) + eps * unbiased;
                const float change = (g / size * unbiased + p * weight_decay) * rate;
                p += (base - p) * share;
                p -= change * kept;
                base -= change;
            });
    });
    if (threadIdx.x == 0) {
        __threadfence();  // this block has read the numbers
        if (atomicInc(arrived, gridDim.x - 1) == gridDim.x - 1) {
            __threadfence();
#pragma unroll
            for (int n = 0; n < NUMBERS; n++) numbers[n] = now[n];
        }
    }
}
