// The parts of the engine beside the trunk's steps: MTP slots and layer taps.
#include "cpp/model/engine.h"

#include <algorithm>

namespace flashnext {

std::vector<float> Engine::mtp_step(std::int32_t index, std::int32_t next) {
  check(mtp_, "the MTP head is not built");
  LaneState& l = lane(index);
  // What it reads are the streams of the last step.
  if (last_ == nullptr || !l.stepped) {
    throw LogicError("mtp_step of lane " + std::to_string(index) +
                     ": the last step had no rows of this lane; call it after every step");
  }
  const Segment& segment = l.last;
  const auto end = static_cast<std::int32_t>(l.ids.size());
  if (l.mtp_length < segment.pos0 - 1) {
    throw LogicError("mtp_step of lane " + std::to_string(index) +
                     ": it was not called after every step of the lane");
  }
  if (next >= shape_.vocab) {
    throw InputError("token id " + std::to_string(next) + " is outside the vocabulary");
  }
  const Built& built = *last_;
  const StepBuffer& b = *built.mtp_buffer;
  const std::int64_t stack = shape_.stack();
  const std::size_t stack_bytes = static_cast<std::size_t>(stack) * sizeof(float);
  settle(l.slot);  // the head's part of both is written
  settle(l.spare);
  float* carry = state_->slot(l.slot) + state_->layout().carry;
  const std::int64_t window = state_->layout().index_windows.back();
  const std::size_t window_bytes = static_cast<std::size_t>(shape_.index_block - 1) *
                                   static_cast<std::size_t>(shape_.index_dim) * sizeof(float);
  const std::int32_t last_slot = next >= 0 ? end : end - 1;  // one past
  const std::int32_t most = std::min(built.bucket.rows, built.bucket.outputs);
  const auto vocab = static_cast<std::size_t>(shape_.vocab);
  const auto row = static_cast<std::size_t>(weights_.head.out);
  std::vector<float> logits;
  l.rewindable = false;  // its own state would stay behind

  for (std::int32_t begin = l.mtp_length; begin < last_slot; begin += most) {
    const std::int32_t n = std::min(most, last_slot - begin);
    for (std::int32_t i = 0; i < n; ++i) {
      const std::int32_t s = begin + i;
      const std::int32_t token = s + 1 < end ? l.ids[static_cast<std::size_t>(s + 1)] : next;
      b.rows()[i] = {token, 0, 0, s, index, 0};
      b.outputs()[i] = i;
      b.sampling()[i] = {};
      const float* from = s < segment.pos0
                              ? carry
                              : built.trunk.streams + (segment.row0 + s - segment.pos0) * stack;
      device_.copy_async(streams_.main(), built.mtp.hidden + i * stack, from, stack_bytes);
    }
    // Aside, since the program may be repeated without the processor's misses.
    b.segments()[0] = {0, n, begin, index, l.slot, l.spare};
    b.head() = {n, 1, n, 0};
    fill_pages(b, index);
    run_layers(built, {built.mtp_program, built.mtp_graphs, b, shape_.layers, 1}, n);
    device_.copy_async(streams_.main(), state_->slot(l.slot) + window,
                       state_->slot(l.spare) + window, window_bytes);
    device_.copy_async(streams_.main(), logits_host_.data(), built.mtp.logits,
                       static_cast<std::size_t>(n) * row * sizeof(float));
    device_.synchronize(streams_.main());
    for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i) {
      const float* from = logits_host_.as<float>() + i * row;
      logits.insert(logits.end(), from, from + vocab);
    }
  }
  l.mtp_length = std::max(l.mtp_length, last_slot);
  if (segment.rows == 0) return logits;  // all rewound: the streams before them are still the last
  device_.copy_async(streams_.main(), carry,
                     built.trunk.streams + (segment.row0 + segment.rows - 1) * stack, stack_bytes);
  device_.synchronize(streams_.main());
  return logits;
}

void Engine::copy_mtp_state(std::int32_t to, std::int32_t from) {
  const SlotLayout& layout = state_->layout();
  device_.copy_async(streams_.main(), state_->slot(to) + layout.mtp,
                     state_->slot(from) + layout.mtp,
                     static_cast<std::size_t>(layout.floats - layout.mtp) * sizeof(float));
}

std::vector<float> Engine::taps() {
  check(options_.taps && last_ != nullptr, "taps need options.taps and a step");
  const std::int64_t stack = shape_.stack();
  const std::size_t stack_bytes = static_cast<std::size_t>(stack) * sizeof(float);
  const std::int64_t row = last_->buffer->head().rows - 1;
  float* out = taps_host_.as<float>();
  for (std::int32_t l = 0; l < shape_.layers; ++l) {
    device_.copy_async(streams_.main(), out + l * stack,
                       taps_.as<float>() + (std::int64_t{l} * last_->bucket.rows + row) * stack,
                       stack_bytes);
  }
  device_.synchronize(streams_.main());
  return {out, out + shape_.layers * stack};
}

}  // namespace flashnext
