// Vector clocks: they tell which accesses happened before which.
//
// A clock has one time for every thread and agent of a cluster.  Threads that leave a barrier know
// the same times of each other, so they share one table, and each stores its own time separately: a
// barrier of n threads takes n steps instead of n tables of n times.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace emu {
using Clock = uint32_t;
using Times = std::vector<Clock>;
using Known = std::shared_ptr<const Times>;  // an immutable table

class VectorClock {
  Known known;
  int me = 0;
  friend class Together;

 public:
  Clock own = 0;

  void start(int id, Clock time, const Known &nothing) {
    known = nothing;
    me = id;
    own = time;
  }
  Clock operator[](int id) const { return id == me ? own : (*known)[id]; }
  explicit operator bool() const { return bool(known); }

  // Use a table that includes all times known here.
  void replace(const Known &all) { known = all; }

  void learn(int id, Clock time) {
    struct Step {
      Known from, to;
      int id;
      Clock time;
    };
    static Step last;  // cached, as the next thread usually takes the same step
    if ((*this)[id] >= time) return;
    if (last.from != known || last.id != id || last.time != time) {
      auto to = std::make_shared<Times>(*known);
      (*to)[id] = time;
      last = {known, to, id, time};
    }
    known = last.to;
  }

  void learn(const Known &other) {
    struct Step {
      Known from, other, to;
    };
    static Step last;
    if (known == other) return;
    if (last.from != known || last.other != other) {
      auto to = std::make_shared<Times>(*known);
      for (size_t i = 0; i < to->size(); i++) (*to)[i] = std::max((*to)[i], (*other)[i]);
      last = {known, other, to};
    }
    known = last.to;
  }

  void learn(const VectorClock &other) {
    learn(other.known);
    learn(other.me, other.own);
  }
};

// The merged times of several clocks.
class Together {
  Times times;
  Known added;  // the last table: threads that share it only differ in their own time

 public:
  void clear(size_t ids) {
    times.assign(ids, 0);
    added = nullptr;
  }
  bool empty() const { return times.empty(); }
  void add(const VectorClock &clock) {
    if (added != clock.known) {
      added = clock.known;
      for (size_t i = 0; i < times.size(); i++) times[i] = std::max(times[i], (*added)[i]);
    }
    times[clock.me] = std::max(times[clock.me], clock.own);
  }
  Known table() const { return std::make_shared<const Times>(times); }
};
}  // namespace emu
