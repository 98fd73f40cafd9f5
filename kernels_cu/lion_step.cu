// A step of Lion over all tensors of an optimizer, in place.
//
//   p = p * decay_factor - lr * sign(beta1 * mean + (1 - beta1) * g)
//   mean = beta2 * mean + (1 - beta2) * g
//   where decay_factor = 1 - lr * weight_decay
//
//   Where `finite` is false the step is skipped and no bit changes.  Gradients are multiplied by
//   `factor` first.
//
//   traffic     elements * (2 * sizeof(parameter) + sizeof(gradient) + sizeof(copy) + 8)
//   constants   those of common/steps.cuh, with the field MEAN
//
//   The trick: one launch; steps are counted on the device, so the host need not know whether this
//   one was skipped.
#include <common/steps.cuh>

KERNEL(THREADS)
lion_step(const long long *tensors, const int *owners, const float *factor, const bool *finite,
          unsigned *steps, float beta1, float rest1, float beta2, float rest2, float lr,
          float decay_factor) {
    if (finite && !*finite) return;
    const long long *tensor = tensors + (long long)owners[blockIdx.x] * FIELDS;
    with_kind(tensor[KIND], [&](auto kind) {
        step_chunk<decltype(kind)::value, MEAN>(
            tensor, factor ? *factor : 1.0f, [&](float &p, float g, float &mean) {
                const float u = g * rest1 + mean * beta1;
                const float sign = u > 0 ? 1.0f : u < 0 ? -1.0f : u;  // 0 and NaN are their own
                p = p * decay_factor - sign * lr;
                mean = mean * beta2 + g * rest2;
            });
    });
    if (blockIdx.x == 0 && threadIdx.x == 0) ++*steps;
}
