// A short name for a checkpoint, by which files about it (profiles of expert use, routing traces)
// recognise it.
#pragma once

#include "cpp/checkpoint/checkpoint.h"

#include <cstdint>

namespace flashnext {

// 64 bits from the shape of the model, the name, type, shape and size of every tensor, and the
// first bytes of the routers, which decide what experts are used. Reads a page a layer. The same
// checkpoint gives the same value in another folder, and synthetic ones differ by their seed.
std::uint64_t fingerprint(const Checkpoint& checkpoint);

}  // namespace flashnext
