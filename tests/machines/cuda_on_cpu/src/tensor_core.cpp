// Tensor cores: mma.sync, ldmatrix and wgmma, with the fragment layouts of the PTX ISA.
//
// wgmma reads its operands when issued; its accumulators are poison until the wait, and an earlier
// access to them is an error.  Its reads of shared memory use the async proxy.
#include "machine.hpp"

#include <algorithm>
#include <unwind.h>

namespace emu {
static float decode(int type, uint16_t bits) {
  if (type >= E4M3) return decode_fp8(type, bits);
  if (type == F16) {
    _Float16 h;
    memcpy(&h, &bits, 2);
    return (float)h;
  }
  uint32_t wide = uint32_t(bits) << 16;
  float f;
  memcpy(&f, &wide, 4);
  return f;
}

static int values_of_word(int type) { return type == S8 || type >= E4M3 ? 4 : type == TF32 ? 1 : 2; }

// ---- mma.sync m16n8: k16 of 16 bits, k8 of tf32, k32 of 8 bits ---------------------------------
struct MmaLane {
  int type;
  uint32_t *d;
  const uint32_t *a, *b, *c;
};

static double element(int type, uint32_t r, int i) {
  if (type == S8) return int8_t(r >> 8 * i);
  if (type >= E4M3) return decode(type, r >> 8 * i & 255);
  if (type != TF32) return decode(type, uint16_t(r >> 16 * i));
  float f;
  r &= ~0x1fffu;  // a tensor core ignores the last 13 bits
  memcpy(&f, &r, 4);
  return f;
}

template <class C> static void multiply(void **lane) {
  auto L = [&](int l) -> MmaLane & { return *(MmaLane *)lane[l]; };
  int type = L(0).type, e = values_of_word(type);
  C A[16][32], B[32][8], D[16][8];
  for (int l = 0; l < 32; l++) {
    int g = l >> 2, t = l & 3;
    for (int i = 0; i < e; i++) {
      for (int r = 0; r < 4; r++)
        A[g + (r & 1) * 8][t * e + (r >> 1) * 4 * e + i] = (C)element(type, L(l).a[r], i);
      for (int r = 0; r < 2; r++) B[t * e + r * 4 * e + i][g] = (C)element(type, L(l).b[r], i);
    }
    for (int r = 0; r < 4; r++) memcpy(&D[g + (r >> 1) * 8][t * 2 + (r & 1)], &L(l).c[r], 4);
  }
  for (int i = 0; i < 16; i++)
    for (int k = 0; k < 8 * e; k++)
      for (int j = 0; j < 8; j++) D[i][j] += A[i][k] * B[k][j];
  for (int l = 0; l < 32; l++)
    for (int r = 0; r < 4; r++)
      memcpy(&L(l).d[r], &D[(l >> 2) + (r >> 1) * 8][(l & 3) * 2 + (r & 1)], 4);
}

void mma(int type, void *d, const uint32_t *a, const uint32_t *b, const void *c, const char *file,
         int line) {
  MmaLane mine{type, (uint32_t *)d, a, b, (const uint32_t *)c};
  auto op = [](void **lane, int) {
    ((MmaLane *)lane[0])->type == S8 ? multiply<int>(lane) : multiply<float>(lane);
  };
  collective(MMA, M.cur->index / 32, 32, ~0u, "mma.sync", &mine, op, {file, line});
}

// ---- ldmatrix ----------------------------------------------------------------------------------
struct LdLane {
  int n;
  bool trans;
  uint32_t *r;
  const char *row;
  Where at;
};

void ldmatrix(int n, bool trans, uint32_t *r, const void *row, const char *file, int line) {
  LdLane mine{n, trans, r, (const char *)row, {file, line}};
  auto op = [](void **lane, int) {
    auto L = [&](int i) -> LdLane & { return *(LdLane *)lane[i]; };
    int warp = M.cur->index & ~31;
    for (int m = 0; m < L(0).n; m++) {
      uint16_t t[8][8];
      for (int i = 0; i < 8; i++) {  // lane 8 m + i has the address of row i of matrix m
        auto &l = L(m * 8 + i);
        if ((uintptr_t)l.row & 15)
          fail("ldmatrix row address of lane " + std::to_string(m * 8 + i) +
                   " is not 16-byte aligned", l.at);
        touch(l.row, 16, Read, l.at, -1, &M.fiber[warp + m * 8 + i]);
        memcpy(t[i], l.row, 16);
      }
      for (int l = 0; l < 32; l++) {
        int i = l >> 2, j = (l & 3) * 2;
        L(l).r[m] = L(0).trans ? t[j][i] | uint32_t(t[j + 1][i]) << 16
                               : t[i][j] | uint32_t(t[i][j + 1]) << 16;
      }
    }
  };
  collective(LDMATRIX, M.cur->index / 32, 32, ~0u, "ldmatrix", &mine, op, {file, line});
}

// ---- wgmma -------------------------------------------------------------------------------------
struct Pending {
  Where at;
  float *d;
  std::vector<float> value;
};
struct Group {
  Clock tick;
  std::vector<Pending> acc;
};
struct WgState {
  bool fenced = false;
  std::vector<Group> groups{1};
};
static std::vector<WgState> wg;

// Returns the 16-byte unit of element (mn, k): 8 elements along k (K-major) or mn (MN-major); 16
// elements of 8 bits, for which the caller counts k in pairs.
static const char *unit(uint64_t desc, bool mn_major, int mn, int k, Where at, int agent) {
  uint32_t start = (desc & 0x3fff) << 4;
  uint32_t leading = (desc >> 16 & 0x3fff) << 4, stride = (desc >> 32 & 0x3fff) << 4;
  int mode = desc >> 62 & 3;  // 0 none, 1 128 B, 2 64 B, 3 32 B
  if (desc >> 49 & 7) fail("wgmma: descriptor base offset is not emulated", at);
  uint32_t pitch = mode ? 256u >> mode : 16, a = start;
  if (!mn_major)
    a += mn % 8 * pitch + mn / 8 * stride + k / 8 * (mode ? 16 : leading);
  else if (mode)
    a += mn / 8 * 16 % pitch + mn / 8 * 16 / pitch * leading + k % 8 * pitch + k / 8 * stride;
  else
    a += mn / 8 * stride + k % 8 * 16 + k / 8 * leading;
  char *p = from_shared(swizzled(mode ? 4 - mode : 0, a), 16, at);
  touch(p, 16, Read, at, agent);
  return p;
}

static void load_operand(float *out, int rows, uint64_t desc, bool mn_major, int type, Where at,
                         int agent) {  // out[k][rows]
  for (int mn = 0; mn < rows; mn += mn_major ? 8 : 1)
    for (int k = 0; k < 16; k += mn_major ? 1 : 8) {
      const char *from = unit(desc, mn_major, mn, k, at, agent);
      uint16_t h[8];
      memcpy(h, from, 16);
      if (type >= E4M3)  // always K-major
        for (int i = 0; i < 16; i++) out[(2 * k + i) * rows + mn] = decode(type, uint8_t(from[i]));
      else
        for (int i = 0; i < 8; i++)
          (mn_major ? out[k * rows + mn + i] : out[(k + i) * rows + mn]) = decode(type, h[i]);
    }
}

void wgmma_fence(const char *, int) { wg[M.cur->index].fenced = true; }

void wgmma_commit() {
  auto &s = wg[M.cur->index];
  int agent = M.cur->index / 128;
  s.groups.back().tick = M.checks ? agent_clock(agent).own : 0;
  s.groups.emplace_back();
  s.fenced = false;
}

// The call stack, innermost call first.  A GPU's compiler inlines functions at each call, and a
// product is one instruction for all four warps, so their call stacks must agree.  Walking a stack
// takes time, so only the first and the last lane of a warp do it.
struct Calls {
  uintptr_t pc[24];
  int count = 0;
  Calls() {
    if (M.checks && M.cur->index % 32 % 31 == 0) _Unwind_Backtrace(add, this);
  }
  static _Unwind_Reason_Code add(_Unwind_Context *frame, void *all) {
    auto &own = *(Calls *)all;
    if (own.count == 24) return _URC_END_OF_STACK;
    own.pc[own.count++] = _Unwind_GetIP(frame);
    return _URC_NO_REASON;
  }
};

static void check_calls(const Calls &own, const Calls &first, Where at) {
  auto line = [](uintptr_t pc) { return place({(const char *)pc, kInstructionPointer}); };
  for (int i = 0; i < std::min(own.count, first.count); i++)
    if (own.pc[i] != first.pc[i])
      fail("wgmma: warps of one warpgroup ask from two places, " + line(own.pc[i]) + " and " +
               line(first.pc[i]), at);
}

struct WgLane {
  Fiber *f;
  int n, type;
  float *d;
  const uint32_t *registers;  // A, or null
  uint64_t a, b;
  int scale_d;
  bool ta, tb;
  Where at;
  Calls calls;
};

void wgmma(int n, int type, float *d, const uint32_t *registers, uint64_t a, uint64_t b,
           int scale_d, bool ta, bool tb, const char *file, int line) {
  WgLane mine{M.cur, n, type, d, registers, a, b, scale_d, ta, tb, {file, line}, {}};
  if (!wg[M.cur->index].fenced)
    fail("wgmma.mma_async without wgmma.fence since the last commit", mine.at);
  auto op = [](void **lane, int) {
    auto &z = *(WgLane *)lane[0];
    int agent = z.f->index / 128, N = z.n;
    for (int l = 1; l < 128; l++) {
      auto &m = *(WgLane *)lane[l];
      check_calls(m.calls, z.calls, m.at);
      if (m.a != z.a || m.b != z.b || m.scale_d != z.scale_d)
        fail("wgmma: descriptors differ between threads of the warpgroup", m.at);
    }
    if (M.checks) {
      static Together all;
      all.clear(M.ids);
      for (int l = 0; l < 128; l++) all.add(((WgLane *)lane[l])->f->clock);
      agent_clock(agent).learn(all.table());
      agent_clock(agent).own++;
    }
    static float A[32][64], B[32 * 256], D[64][256];
    int e = values_of_word(z.type);
    if (!z.registers) load_operand(A[0], 64, z.a, z.ta, z.type, z.at, agent);
    for (int t = 0; z.registers && t < 128; t++)  // a warp's 16 rows, in the layout of mma.m16n8
      for (int r = 0; r < 4; r++)
        for (int h = 0; h < e; h++)
          A[t % 4 * e + (r >> 1) * 4 * e + h][t / 32 * 16 + t % 32 / 4 + (r & 1) * 8] =
              (float)element(z.type, ((WgLane *)lane[t])->registers[r], h);
    load_operand(B, N, z.b, z.tb, z.type, z.at, agent);
    // thread t holds rows 16 (t / 32) + t % 32 / 4 (+ 8), columns 8 j + 2 (t % 4) (+ 1)
    auto cell = [&](int t, int i) -> float & {
      return D[16 * (t / 32) + t % 32 / 4 + (i >> 1 & 1) * 8][i / 4 * 8 + t % 4 * 2 + (i & 1)];
    };
    for (int t = 0; t < 128; t++) {
      auto &m = *(WgLane *)lane[t];
      const float *c = m.d;
      for (auto &g : wg[m.f->index].groups)
        for (auto &p : g.acc)
          if (p.d == m.d) c = p.value.data();
      for (int i = 0; i < N / 2; i++) cell(t, i) = m.scale_d ? c[i] : 0;
    }
    for (int i = 0; i < 64; i++)
      for (int j = 0; j < N; j += 8) {  // eight columns, in one register of the CPU
        float sum[8], *d = &D[i][j];
        memcpy(sum, d, sizeof sum);
        for (int k = 0; k < 8 * e; k++) {
          const float *b = &B[k * N + j];
          for (int v = 0; v < 8; v++) sum[v] += A[k][i] * b[v];
        }
        memcpy(d, sum, sizeof sum);
      }
    for (int t = 0; t < 128; t++) {
      auto &m = *(WgLane *)lane[t];
      auto &acc = wg[m.f->index].groups.back().acc;
      Pending *p = nullptr;
      for (auto &q : acc)
        if (q.d == m.d) p = &q;
      if (!p) {
        acc.push_back({m.at, m.d, std::vector<float>(N / 2)});
        p = &acc.back();
      }
      for (int i = 0; i < N / 2; i++) p->value[i] = cell(t, i);
      memset(m.d, 0xff, N / 2 * sizeof(float));
      m.f->accumulating = 1;
    }
  };
  collective(WGMMA, M.cur->index / 128, 128, 0, "wgmma", &mine, op, {file, line});
}

void wgmma_wait(int pending, const char *, int) {
  auto &s = wg[M.cur->index];
  int done = std::max(0, int(s.groups.size()) - 1 - pending);
  for (int g = 0; g < done; g++) {
    for (auto &p : s.groups[g].acc) {
      bool newer = false;
      for (size_t h = g + 1; h < s.groups.size(); h++)
        for (auto &q : s.groups[h].acc) newer |= q.d == p.d;
      if (!newer) memcpy(p.d, p.value.data(), p.value.size() * sizeof(float));
    }
    if (M.checks) M.cur->clock.learn(M.fibers + M.cur->index / 128, s.groups[g].tick);
  }
  s.groups.erase(s.groups.begin(), s.groups.begin() + done);
  M.cur->accumulating = 0;
  for (auto &g : s.groups) M.cur->accumulating |= !g.acc.empty();
}

void check_registers(const void *p, size_t n, Where at) {
  for (auto &g : wg[M.cur->index].groups)
    for (auto &acc : g.acc)
      if ((char *)p < (char *)(acc.d + acc.value.size()) && (char *)p + n > (char *)acc.d)
        fail("accumulators of a wgmma before its wgmma.wait_group", at);
}

void check_products() {
  for (auto &g : wg[M.cur->index].groups)
    if (!g.acc.empty())
      fail("thread exits before the wgmma.wait_group of this product", g.acc[0].at);
}

void reset_tensor_core() { wg.assign(M.fibers, {}); }
}  // namespace emu
