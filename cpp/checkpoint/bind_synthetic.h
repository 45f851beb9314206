// Inside the room: a checkpoint without files.
#pragma once

#include "cpp/checkpoint/bind.h"
#include "cpp/checkpoint/synthetic.h"

#include <deque>
#include <memory>

namespace flashnext {

// What a synthetic checkpoint owns beside Bound.
struct SyntheticHold {
  std::shared_ptr<const SyntheticMemory> memory;
  std::deque<Tensor> tensors;
};

// Fills `bound` from its shape.
void bind_synthetic(Bound& bound, const SyntheticOptions& options, SyntheticHold& hold);

}  // namespace flashnext
