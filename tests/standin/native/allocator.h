// The caching allocator of one device, in the host's memory: the policy of torch's, with freed memory overwritten.
//
// Requests are rounded to 512 bytes. Up to 1 MiB they are cut from segments of 2 MiB; larger ones from segments of
// 20 MiB, and from 10 MiB on from segments of their own size rounded to 2 MiB. The smallest free block that fits is
// taken, and split where more than 1 MiB is left (512 bytes among the small). Neighbours that are free are one block.
// Blocks are reused by the stream that allocated them only. An expandable segment grows at its end by 2 or 20 MiB.
#pragma once
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <list>
#include <mutex>
#include <set>
#include <unordered_map>

namespace standin {

constexpr size_t KIB = 1024, MIB = 1024 * KIB, GIB = 1024 * MIB;
constexpr size_t GRANULE = 512, SMALL_MOST = MIB, SMALL_SEGMENT = 2 * MIB, LARGE_SEGMENT = 20 * MIB;
constexpr size_t OWN_LEAST = 10 * MIB, OWN_UNIT = 2 * MIB, EXPANDABLE_ROOM = 256 * GIB;
constexpr int POISON = 0xFF;

inline size_t rounded_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

struct Count {
  int64_t now = 0, peak = 0;
  void add(int64_t n) {
    now += n;
    peak = std::max(peak, now);
  }
};

struct Figures {
  Count allocated, requested, reserved;
  void forget_peaks() {
    for (Count* count : {&allocated, &requested, &reserved}) count->peak = count->now;
  }
};

struct Pool;

struct Block {
  char* start;
  size_t size;
  int64_t stream;
  Pool* pool;
  bool used = false, expandable = false;
  size_t requested = 0;
  Block *before = nullptr, *after = nullptr;
};

struct BySize {
  bool operator()(const Block* a, const Block* b) const {
    if (a->stream != b->stream) return a->stream < b->stream;
    return a->size != b->size ? a->size < b->size : a->start < b->start;
  }
};

struct Pool {
  bool small;
  std::set<Block*, BySize> free;
  std::unordered_map<int64_t, Block*> last;  // the block at the end of the expandable segment of a stream
};

// Thrown with the allocator unlocked; the caller makes torch's own error of it.
struct OutOfMemory {
  size_t wanted;
  int64_t reserved, limit;
};

class CachingAllocator {
 public:
  Figures figures;
  int64_t limit = INT64_MAX;
  bool poison = true, expandable = false;

  void* allocate(size_t n, int64_t stream) {
    std::lock_guard guard(lock_);
    size_t size = std::max(GRANULE, rounded_up(n, GRANULE));
    Pool& pool = size <= SMALL_MOST ? small_ : large_;
    Block* block = best_fit(pool, size, stream);
    if (!block) block = expandable ? grown(pool, size, stream) : new_segment(pool, size, stream);
    if (should_split(*block, size)) split(block, size);
    block->used = true;
    block->requested = n;
    used_[block->start] = block;
    figures.allocated.add(block->size);
    figures.requested.add(n);
    if (poison) std::memset(block->start, POISON, block->size);
    return block->start;
  }

  void release(void* start) {
    std::lock_guard guard(lock_);
    Block* block = used_.at(start);
    used_.erase(start);
    if (poison) std::memset(block->start, POISON, block->size);
    figures.allocated.add(-int64_t(block->size));
    figures.requested.add(-int64_t(block->requested));
    block->used = false;
    merge(block, block->before);
    merge(block, block->after);
    block->pool->free.insert(block);
  }

  // All blocks of all segments, each segment's in order; `see` is called with the first of its segment and the block.
  template <typename See>
  void each_block(See see) {
    std::lock_guard guard(lock_);
    std::set<const Block*> firsts;
    auto add = [&](const Block* block) {
      while (block->before) block = block->before;
      firsts.insert(block);
    };
    for (auto& [start, block] : used_) add(block);
    for (Pool* pool : {&small_, &large_}) for (Block* block : pool->free) add(block);
    for (const Block* first : firsts) for (const Block* at = first; at; at = at->after) see(*first, *at);
  }

  void empty_cache() {
    std::lock_guard guard(lock_);
    for (Pool* pool : {&small_, &large_}) give_back(*pool);
  }

 private:
  std::recursive_mutex lock_;
  Pool small_{true, {}, {}}, large_{false, {}, {}};
  std::unordered_map<void*, Block*> used_;

  static bool at_the_end(const Block& block) { return block.expandable && !block.after; }

  Block* best_fit(Pool& pool, size_t size, int64_t stream) {
    Block key{nullptr, size, stream, &pool};
    auto found = pool.free.lower_bound(&key);
    auto fits = [&](auto at) { return at != pool.free.end() && (*at)->stream == stream; };
    if (!fits(found)) return nullptr;
    // what can grow is kept for what needs it
    if (at_the_end(**found) && fits(std::next(found))) ++found;
    Block* block = *found;
    pool.free.erase(found);
    return block;
  }

  void reserve(size_t bytes, size_t wanted) {
    if (figures.reserved.now + int64_t(bytes) > limit) empty_cache();
    if (figures.reserved.now + int64_t(bytes) > limit) throw OutOfMemory{wanted, figures.reserved.now, limit};
    figures.reserved.add(bytes);
  }

  Block* new_segment(Pool& pool, size_t size, int64_t stream) {
    size_t segment = pool.small ? SMALL_SEGMENT : size < OWN_LEAST ? LARGE_SEGMENT : rounded_up(size, OWN_UNIT);
    reserve(segment, size);
    return new Block{static_cast<char*>(std::aligned_alloc(GRANULE, segment)), segment, stream, &pool};
  }

  Block* grown(Pool& pool, size_t size, int64_t stream) {
    Block*& last = pool.last[stream];
    size_t unit = pool.small ? SMALL_SEGMENT : LARGE_SEGMENT;
    auto spare = [&] { return last && !last->used ? last->size : 0; };
    if (figures.reserved.now + int64_t(rounded_up(size - spare(), unit)) > limit) empty_cache();  // and what is spare
    size_t there = spare(), more = rounded_up(size - there, unit);
    reserve(more, size);
    if (there) {
      pool.free.erase(last);
      last->size += more;
      return last;
    }
    char* start = last ? last->start + last->size : static_cast<char*>(mmap(nullptr, EXPANDABLE_ROOM,
        PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    auto* block = new Block{start, more, stream, &pool};
    block->expandable = true;
    block->before = last;
    if (last) last->after = block;
    return last = block;
  }

  bool should_split(const Block& block, size_t size) const {
    size_t rest = block.size - size;
    return block.pool->small || expandable ? rest >= GRANULE : rest > SMALL_MOST;
  }

  void split(Block* block, size_t size) {
    auto* rest = new Block{block->start + size, block->size - size, block->stream, block->pool};
    rest->expandable = block->expandable;
    rest->before = block;
    rest->after = block->after;
    if (rest->after) rest->after->before = rest;
    block->after = rest;
    block->size = size;
    if (at_the_end(*rest)) block->pool->last[block->stream] = rest;
    block->pool->free.insert(rest);
  }

  void merge(Block* block, Block* other) {
    if (!other || other->used) return;
    block->pool->free.erase(other);
    if (other == block->before) {
      block->start = other->start;
      block->before = other->before;
      if (block->before) block->before->after = block;
    } else {
      block->after = other->after;
      if (block->after) block->after->before = block;
    }
    block->size += other->size;
    if (at_the_end(*block)) block->pool->last[block->stream] = block;
    delete other;
  }

  void give_back(Pool& pool) {
    for (auto at = pool.free.begin(); at != pool.free.end();) {
      Block* block = *at;
      if (block->expandable || block->before || block->after) {
        ++at;
        continue;
      }
      figures.reserved.add(-int64_t(block->size));
      std::free(block->start);
      delete block;
      at = pool.free.erase(at);
    }
    size_t unit = pool.small ? SMALL_SEGMENT : LARGE_SEGMENT;
    for (auto& [stream, last] : pool.last) {  // whole units at the end of an expandable segment
      size_t spare = last && !last->used ? last->size / unit * unit : 0;
      if (!spare) continue;
      pool.free.erase(last);
      figures.reserved.add(-int64_t(spare));
      last->size -= spare;
      if (last->size) {
        pool.free.insert(last);
      } else {
        Block* gone = last;
        last = gone->before;
        if (last) last->after = nullptr;
        delete gone;
      }
    }
  }
};

}  // namespace standin
