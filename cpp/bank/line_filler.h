// Inside the room: copies experts into their lines by several threads, layer after layer.
#pragma once

#include "cpp/bank/bank.h"

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace flashnext {

// Sizes of the members of an expert in bytes: gate, up, down.
struct MemberBytes {
  std::size_t trellis[3];
  std::size_t suh[3];
  std::size_t svh[3];
};
MemberBytes member_bytes(std::int32_t dim, std::int32_t inner, const std::int32_t words[3]);

class LineFiller {
 public:
  struct Layer {
    LineLayout layout;
    MemberBytes bytes;
    const ExpertRef* from;  // (count) where the members lie in the checkpoint
    std::byte* lines;       // (count) lines
    std::int32_t count;
  };

  LineFiller(const Checkpoint& checkpoint, std::vector<Layer> layers, int threads);
  ~LineFiller();  // stops what still runs
  LineFiller(const LineFiller&) = delete;
  LineFiller& operator=(const LineFiller&) = delete;

  // Fills all lines. On the calling thread: `full` hears every layer in order, as soon as it and
  // those before it are full; `progress` hears stage "experts" in bytes. Both may throw; that, or
  // what a read throws, ends the work.
  void run(const std::function<void(std::size_t layer)>& full, const Progress& progress);

 private:
  void work();
  void fill_line(const Layer& layer, std::int32_t expert) const;

  const Checkpoint& checkpoint_;
  const std::vector<Layer> layers_;
  const int threads_;
  std::uint64_t total_ = 0;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t next_layer_ = 0;  // the next line to fill
  std::int32_t next_expert_ = 0;
  std::vector<std::int32_t> left_;  // (layers) lines that are not full
  std::uint64_t done_ = 0;          // bytes
  bool stop_ = false;
  std::exception_ptr error_;
  std::vector<std::thread> workers_;
};

}  // namespace flashnext
