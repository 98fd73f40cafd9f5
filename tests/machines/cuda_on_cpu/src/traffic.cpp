// Traffic: the requests of warps, in sectors of global memory and passes over shared memory.
//
// The n-th executions of one instruction by the lanes of a warp form one request.  Global memory
// moves sectors of 32 bytes.  Shared memory has 32 banks of 4 bytes; a pass serves a warp's
// accesses of up to 4 bytes, half a warp's of 8, a quarter's of 16, and two different words of one
// bank take two passes.  In a TMA copy, each row of the tile is a request to global memory.
#include "machine.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

namespace emu {
struct Lane {
  uint64_t address;
  uint32_t size;
  int lane;
};
using Place = std::tuple<const void *, int, int, int>;  // file or pc, line, space, access
struct Total {
  uint64_t requests = 0, bytes = 0, moved = 0, least = 0;
};
static std::map<Place, Total> totals;
static std::map<std::tuple<Place, int, unsigned>, std::vector<Lane>> open;  // warp, occurrence
static std::map<std::tuple<Place, int>, unsigned> occurrences;              // thread

static void close(const Place &place, const std::vector<Lane> &lanes) {
  Total &total = totals[place];
  total.requests++;
  uint64_t bytes = 0;
  if (std::get<2>(place) == 0) {  // global
    std::set<uint64_t> sectors;
    std::set<std::pair<uint64_t, uint32_t>> wanted;
    for (auto &l : lanes) {
      if (wanted.insert({l.address, l.size}).second) bytes += l.size;
      for (uint64_t s = l.address / 32; s <= (l.address + l.size - 1) / 32; s++) sectors.insert(s);
    }
    total.moved += sectors.size();
    total.least += (bytes + 31) / 32;
  } else {
    uint32_t widest = 4;
    for (auto &l : lanes) widest = std::max(widest, l.size);
    int together = widest >= 16 ? 8 : widest >= 8 ? 16 : 32;  // lanes in a pass
    for (int first = 0; first < 32; first += together) {
      std::set<uint64_t> bank[32];
      size_t most = 0;
      for (auto &l : lanes)
        for (uint64_t w = l.address / 4; w <= (l.address + l.size - 1) / 4; w++)
          if (l.lane >= first && l.lane < first + together) {
            bank[w % 32].insert(w);
            most = std::max(most, bank[w % 32].size());
          }
      total.moved += most;
      total.least += most > 0;
    }
    for (auto &l : lanes) bytes += l.size;
  }
  total.bytes += bytes;
}

void count_access(uint64_t address, size_t size, bool shared, Access a, Where at, const Fiber *f) {
  Place place{at.file, at.line, shared, a != Read};
  unsigned turn = occurrences[{place, f->index}]++;
  open[{place, f->index / 32, turn}].push_back({address, uint32_t(size), f->index % 32});
}

void close_traffic() {  // at the end of a cluster
  for (auto &[key, lanes] : open) close(std::get<0>(key), lanes);
  open.clear();
  occurrences.clear();
}

struct Row {
  const void *file;
  int line, shared, write;
  uint64_t requests, bytes, moved, least;
};

extern "C" void emu_count(int on) {
  M.counting = on;
  totals.clear();
}

// Copies up to `room` rows and returns how many there are.
extern "C" int emu_counted(Row *rows, int room) {
  int n = 0;
  for (auto &[place, t] : totals) {
    auto [file, line, shared, write] = place;
    if (n < room) rows[n] = {file, line, shared, write, t.requests, t.bytes, t.moved, t.least};
    n++;
  }
  return n;
}
}  // namespace emu
