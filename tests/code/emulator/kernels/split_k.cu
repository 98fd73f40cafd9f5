// y = A x with the columns split over blockIdx.y, for the emulator's own tests: partial sums meet
// by an atomic, or the last block of a row adds them.
KERNEL(128) split_k_atomic(const float *a, const float *x, float *y, int rows, int columns) {
  __shared__ float partial[4];
  int span = (columns + gridDim.y - 1) / gridDim.y, lo = blockIdx.y * span;
  int hi = min(lo + span, columns);
  float s = 0.f;
  for (int i = lo + threadIdx.x; i < hi; i += blockDim.x)
    s += a[(long long)blockIdx.x * columns + i] * x[i];
  for (int o = 16; o; o >>= 1) s += __shfl_down_sync(0xffffffffu, s, o);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = s;
  __syncthreads();
  if (threadIdx.x == 0) {
    float t = partial[0] + partial[1] + partial[2] + partial[3];
#ifdef BUG_PLAIN_ADD
    y[blockIdx.x] += t;
#else
    atomicAdd(&y[blockIdx.x], t);
#endif
  }
}

KERNEL(128) split_k_last_block(const float *a, const float *x, float *y, float *work,
                               unsigned *ticket, int rows, int columns) {
  DYNAMIC_SHARED(float, smem);
  __shared__ bool last;
  int span = (columns + gridDim.y - 1) / gridDim.y, lo = blockIdx.y * span;
  int hi = min(lo + span, columns);
  float s = 0.f;
  for (int i = lo + threadIdx.x; i < hi; i += blockDim.x)
    s += a[(long long)blockIdx.x * columns + i] * x[i];
  smem[threadIdx.x] = s;
  for (int o = blockDim.x / 2; o; o >>= 1) {
    __syncthreads();
    if (threadIdx.x < o) smem[threadIdx.x] += smem[threadIdx.x + o];
  }
  if (threadIdx.x == 0) {
    work[blockIdx.x * gridDim.y + blockIdx.y] = smem[0];
    __threadfence();
    last = atomicInc(&ticket[blockIdx.x], gridDim.y - 1) == gridDim.y - 1;
    __threadfence();
  }
  __syncthreads();
  if (last && threadIdx.x == 0) {
    float t = 0.f;
    for (int i = 0; i < gridDim.y; i++) t += __ldcg(&work[blockIdx.x * gridDim.y + i]);
    y[blockIdx.x] = t;
  }
}
