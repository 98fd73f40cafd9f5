// Causal flash attention forward, dim 64, (batch, heads, tokens, 64) bfloat16: an Ampere-style
// kernel for the emulator's own tests.  64 queries a block, 4 warps, K and V in a cp.async ring.
#include <common/ptx.cuh>

constexpr int D = 64, BM = 64, BN = 64;
#define NEG_INF __int_as_float(0xff800000)

DEVICE __nv_bfloat16 *at(__nv_bfloat16 *tile, int row, int chunk) {
  return tile + row * D + ((chunk ^ (row & 7)) << 3);
}
DEVICE uint32_t pack(float lo, float hi) {
  __nv_bfloat162 p = __floats2bfloat162_rn(lo, hi);
  return *reinterpret_cast<uint32_t *>(&p);
}
DEVICE void load_tile(__nv_bfloat16 *tile, const __nv_bfloat16 *from, int first,
                                          int tokens) {
  for (int i = threadIdx.x; i < 64 * 8; i += 128) {
    int row = i / 8, chunk = i % 8;
    bool ok = first + row < tokens;
#ifdef BUG_OUT_OF_BOUNDS
    ok = true;
#endif
    cp_async_16(at(tile, row, chunk), from + (long long)(ok ? first + row : 0) * D + chunk * 8, ok);
  }
}

KERNEL(128) flash_forward(const __nv_bfloat16 *q, const __nv_bfloat16 *k, const __nv_bfloat16 *v,
                          __nv_bfloat16 *o, float *lse, int tokens, float scale_log2) {
  DYNAMIC_SHARED(__nv_bfloat16, smem);
  __nv_bfloat16 *sq = smem, *sk = sq + BM * D, *sv = sk + 2 * BN * D;
  long long head = (long long)(blockIdx.z * gridDim.y + blockIdx.y) * tokens * D;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, q0 = blockIdx.x * BM;
  q += head;
  k += head;
  v += head;
  o += head;

  load_tile(sq, q, q0, tokens);
  load_tile(sk, k, 0, tokens);
  cp_async_commit();
  load_tile(sv, v, 0, tokens);
  cp_async_commit();

  uint32_t qf[4][4];
  float acc[8][4] = {}, m[2] = {NEG_INF, NEG_INF}, l[2] = {0.f, 0.f};
  int tiles = (min(q0 + BM, tokens) + BN - 1) / BN;
  for (int t = 0; t < tiles; t++) {
    __nv_bfloat16 *kt = sk + (t & 1) * BN * D, *vt = sv + (t & 1) * BN * D;
    cp_async_wait<1>();
#ifndef BUG_MISSING_SYNC
    __syncthreads();  // K tile t visible; everyone has left tile t - 1
#endif
    if (t == 0)
      for (int ks = 0; ks < 4; ks++)
        ldmatrix_x4(qf[ks], at(sq, warp * 16 + (lane & 15), ks * 2 + (lane >> 4)));
    if (t + 1 < tiles) load_tile(sk + ((t + 1) & 1) * BN * D, k, (t + 1) * BN, tokens);
    cp_async_commit();

    float s[8][4] = {};
#pragma unroll
    for (int ks = 0; ks < 4; ks++)
#pragma unroll
      for (int np = 0; np < 4; np++) {
        uint32_t b[4];
        int key = np * 16 + (lane & 7) + ((lane >> 4) << 3);
        ldmatrix_x4(b, at(kt, key, ks * 2 + ((lane >> 3) & 1)));
        uint32_t b0[2] = {b[0], b[1]}, b1[2] = {b[2], b[3]};
        mma_m16n8k16_bf16(s[np * 2], qf[ks], b0, s[np * 2]);
        mma_m16n8k16_bf16(s[np * 2 + 1], qf[ks], b1, s[np * 2 + 1]);
      }

    int row = q0 + warp * 16 + lane / 4;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float top = m[h];
#pragma unroll
      for (int n = 0; n < 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          int col = t * BN + n * 8 + (lane & 3) * 2 + e;
          float &x = s[n][h * 2 + e];
          x = col <= row + h * 8 && col < tokens ? x * scale_log2 : NEG_INF;
          top = fmaxf(top, x);
        }
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      float rescale = exp2f(m[h] - top), sum = 0.f;
      m[h] = top;
#pragma unroll
      for (int n = 0; n < 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float p = exp2f(s[n][h * 2 + e] - top);
          s[n][h * 2 + e] = p;
          sum += p;
          acc[n][h * 2 + e] *= rescale;
        }
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      l[h] = l[h] * rescale + sum;
    }

    cp_async_wait<1>();
    __syncthreads();  // V tile t visible
    if (t + 1 < tiles) load_tile(sv + ((t + 1) & 1) * BN * D, v, (t + 1) * BN, tokens);
    cp_async_commit();
#pragma unroll
    for (int j = 0; j < 4; j++) {
      uint32_t a[4] = {pack(s[2 * j][0], s[2 * j][1]), pack(s[2 * j][2], s[2 * j][3]),
                       pack(s[2 * j + 1][0], s[2 * j + 1][1]),
                       pack(s[2 * j + 1][2], s[2 * j + 1][3])};
#pragma unroll
      for (int np = 0; np < 4; np++) {
        uint32_t b[4];
        ldmatrix_x4_trans(b, at(vt, j * 16 + (lane & 15), np * 2 + (lane >> 4)));
        uint32_t b0[2] = {b[0], b[1]}, b1[2] = {b[2], b[3]};
        mma_m16n8k16_bf16(acc[np * 2], a, b0, acc[np * 2]);
        mma_m16n8k16_bf16(acc[np * 2 + 1], a, b1, acc[np * 2 + 1]);
      }
    }
  }
#pragma unroll
  for (int h = 0; h < 2; h++) {
    int row = q0 + warp * 16 + lane / 4 + h * 8;
    if (row >= tokens) continue;
    float inv = 1.f / l[h];
#pragma unroll
    for (int n = 0; n < 8; n++)
      *reinterpret_cast<uint32_t *>(o + (long long)row * D + n * 8 + (lane & 3) * 2) =
          pack(acc[n][h * 2] * inv, acc[n][h * 2 + 1] * inv);
    if (lane % 4 == 0)
      lse[(long long)(blockIdx.z * gridDim.y + blockIdx.y) * tokens + row] =
          (m[h] + log2f(l[h])) * 0.6931471805599453f;
  }
}
