// Streams of all devices: the default ones run at once; what is issued on a side stream may run as late as is legal,
// which is when somebody waits for it.
#pragma once
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <unordered_map>

namespace standin {

struct Mark {  // an event: so much of what a stream was given
  int64_t stream = 0;
  size_t upto = 0;
  std::chrono::steady_clock::time_point at{};
};

class Streams {
 public:
  bool lazy = true;

  int64_t made() {
    std::lock_guard guard(lock_);
    return next_++;
  }

  void issue(int64_t stream, std::function<void()> work) {
    std::lock_guard guard(lock_);
    waiting_[stream].push_back(std::move(work));
  }

  void record(Mark& mark, int64_t stream) {
    std::lock_guard guard(lock_);
    mark = {stream, done_[stream] + waiting_[stream].size(), std::chrono::steady_clock::now()};
  }

  // Whoever waits, what is awaited runs now: no later moment would be legal for a waiter that runs at once.
  void wait(const Mark& mark) { run(mark.stream, mark.upto); }

  void run(int64_t stream, size_t upto = SIZE_MAX) {
    std::lock_guard guard(lock_);
    auto& waiting = waiting_[stream];
    while (!waiting.empty() && done_[stream] < upto) {
      auto work = std::move(waiting.front());
      waiting.pop_front();
      done_[stream]++;
      work();
    }
  }

  void run_all() {
    std::lock_guard guard(lock_);
    for (int64_t stream = 1; stream < next_; stream++) run(stream);
  }

 private:
  std::recursive_mutex lock_;
  int64_t next_ = 1;
  std::unordered_map<int64_t, std::deque<std::function<void()>>> waiting_;
  std::unordered_map<int64_t, size_t> done_;
};

}  // namespace standin
