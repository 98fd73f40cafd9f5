// One element of an AdamW step, in float32.
#pragma once

struct Rates {
    // rest = 1 - beta; decay_factor: 1 - lr * weight_decay
    float beta1, rest1, beta2, rest2, rate, eps, decay_factor;
};

DEVICE void update(float &p, float g, float &m, float &s, const Rates &r) {
    m = m * r.beta1 + g * r.rest1;
    s = s * r.beta2 + g * g * r.rest2;
    p = p * r.decay_factor - m / (sqrtf(s) + r.eps) * r.rate;
}
