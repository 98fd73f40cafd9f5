// Adam with decoupled weight decay: the update of one parameter, in place.
//
//   mean = beta1 * mean + (1 - beta1) * g        square = beta2 * square + (1 - beta2) * g^2
//   p = p * decay_factor - rate * mean / (sqrt(square) + eps)
//   where decay_factor = 1 - lr * weight_decay,
//   rate = lr * sqrt(1 - beta2^step) / (1 - beta1^step),
//   and eps is the user's eps times sqrt(1 - beta2^step)
//
//   traffic     elements * (sizeof(T) * 2 + sizeof(G) + 16)
//   constants   T, G      dtypes of the parameter, of the gradient
//               LANES     values of one access of p: 16 bytes, or fewer as the addresses allow
//               THREADS   threads of a block
//
//   The trick: one pass; a 16-bit parameter is widened, updated in float32 and rounded once.
#include <common/adamw.cuh>
#include <common/vector.cuh>

KERNEL(THREADS)
adamw_(T *parameter, const G *gradient, float *mean, float *square, long long elements, float beta1,
       float rest1, float beta2, float rest2, float rate, float eps, float decay_factor) {
    const Rates rates = {beta1, rest1, beta2, rest2, rate, eps, decay_factor};
    const long long at = ((long long)blockIdx.x * THREADS + threadIdx.x) * LANES;
    const long long count = elements - at;
    float p[LANES], g[LANES], m[LANES], s[LANES];
    load(p, parameter + at, count);
    load(g, gradient + at, count);
    load(m, mean + at, count);
    load(s, square + at, count);
#pragma unroll
    for (int j = 0; j < LANES; j++) update(p[j], g[j], m[j], s[j], rates);
    store(parameter + at, p, count);
    store(mean + at, m, count);
    store(square + at, s, count);
}
