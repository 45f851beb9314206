// The experts of one layer of a prompt's step, as stream.h runs them and programs hold them.
#pragma once

#include "cpp/device/ops.h"

#include <cstdint>

namespace flashnext::cache {

struct StreamedExperts {
  ExpertsArgs args;  // of all pairs at once, with scratch for them
  std::int32_t layer;
};

}  // namespace flashnext::cache
