#include "cpp/bank/line_filler.h"

#include "cpp/base/thread_pool.h"

#include <algorithm>
#include <chrono>

namespace flashnext {
namespace {

// How often progress is told, and an interrupt seen, while a layer fills.
constexpr std::chrono::milliseconds kTick{50};

}  // namespace

MemberBytes member_bytes(std::int32_t dim, std::int32_t inner, const std::int32_t words[3]) {
  const auto d = static_cast<std::size_t>(dim), e = static_cast<std::size_t>(inner);
  MemberBytes bytes{};
  for (std::size_t i = 0; i < 3; ++i) {
    const std::size_t in = i < 2 ? d : e, out = i < 2 ? e : d;
    bytes.trellis[i] = in / 16 * (out / 16) * static_cast<std::size_t>(words[i]) * 2;
    bytes.suh[i] = in * 2;
    bytes.svh[i] = out * 2;
  }
  return bytes;
}

LineFiller::LineFiller(const Checkpoint& checkpoint, std::vector<Layer> layers, int threads)
    : checkpoint_(checkpoint),
      layers_(std::move(layers)),
      threads_(threads > 0 ? threads : available_cores()) {
  for (const Layer& layer : layers_) {
    left_.push_back(layer.count);
    total_ +=
        static_cast<std::uint64_t>(layer.count) * static_cast<std::uint64_t>(layer.layout.bytes);
  }
}

LineFiller::~LineFiller() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  for (std::thread& worker : workers_) worker.join();
}

void LineFiller::fill_line(const Layer& layer, std::int32_t expert) const {
  const ExpertRef& from = layer.from[expert];
  std::byte* line = layer.lines + expert * layer.layout.bytes;
  ReadPiece pieces[9];
  for (std::size_t i = 0; i < 3; ++i) {
    pieces[i] = {from.trellis[i], layer.bytes.trellis[i], line + layer.layout.trellis[i]};
    pieces[3 + i] = {from.suh[i], layer.bytes.suh[i], line + layer.layout.suh[i]};
    pieces[6 + i] = {from.svh[i], layer.bytes.svh[i], line + layer.layout.svh[i]};
  }
  checkpoint_.read(pieces);
}

void LineFiller::work() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    while (next_layer_ < layers_.size() && next_expert_ == layers_[next_layer_].count) {
      ++next_layer_;
      next_expert_ = 0;
    }
    if (next_layer_ == layers_.size()) return;
    const std::size_t at = next_layer_;
    const Layer& layer = layers_[at];
    const std::int32_t expert = next_expert_++;
    lock.unlock();
    std::exception_ptr error;
    try {
      fill_line(layer, expert);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    if (error) {
      if (!error_) error_ = error;
      stop_ = true;
      changed_.notify_one();
      return;
    }
    done_ += static_cast<std::uint64_t>(layer.layout.bytes);
    if (--left_[at] == 0) changed_.notify_one();
  }
}

void LineFiller::run(const std::function<void(std::size_t layer)>& full, const Progress& progress) {
  check(workers_.empty(), "line filler: run() twice");
  for (int i = 0; i < threads_; ++i) workers_.emplace_back([this] { work(); });
  std::size_t told = 0;
  while (told < layers_.size()) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, kTick, [&] { return error_ != nullptr || left_[told] == 0; });
    if (error_) std::rethrow_exception(error_);
    const bool is_full = left_[told] == 0;
    const std::uint64_t done = done_;
    lock.unlock();
    if (progress && total_ > 0) progress("experts", done, total_);
    if (is_full) full(told++);
  }
}

}  // namespace flashnext
