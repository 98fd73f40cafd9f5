// Updates the state of a loss scaler after a step, by whether the gradients were finite.
//
//   finite: good += 1; when good == interval: scale = min(scale * growth, maximum), good = 0
//   else:   scale = max(scale * backoff, minimum), good = 0, skipped += 1
//
//   traffic     40 bytes
//   constants   none
//
//   The trick: the host never reads which of the two it was, so it need not wait.
KERNEL(1)
loss_scaler(double *scale, float *factor, unsigned *counts, const bool *finite, double growth,
            double backoff, double minimum, double maximum, unsigned interval, bool dynamic) {
    double value = *scale;
    unsigned good = counts[0] + 1;
    if (!*finite) {
        value = value * backoff > minimum ? value * backoff : minimum;
        good = 0;
        counts[1]++;
    } else if (good == interval && dynamic) {
        value = value * growth < maximum ? value * growth : maximum;
        good = 0;
    }
    counts[0] = good;
    if (dynamic) {
        *scale = value;
        *factor = (float)value;  // the factor of the loss
    }
}
