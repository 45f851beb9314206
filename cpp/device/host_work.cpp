#include "cpp/device/host_work.h"

#include <algorithm>
#include <cstring>

namespace flashnext {

namespace {
bool overlaps(const void* begin, std::size_t bytes, HostMemory::Range range) noexcept {
  const auto* first = static_cast<const std::byte*>(begin);
  return first < range.end && first + bytes > range.begin;
}
}  // namespace

const void* ArgsArena::copy(const void* args, std::size_t bytes) {
  const std::size_t rounded = (bytes + 15) / 16 * 16;
  check(rounded <= kChunk, "host device: argument struct larger than an arena chunk");
  if (used_ + rounded > kChunk) {
    ++chunk_;
    used_ = 0;
  }
  if (chunk_ == chunks_.size()) chunks_.push_back(std::make_unique<std::byte[]>(kChunk));
  std::byte* place = chunks_[chunk_].get() + used_;
  used_ += rounded;
  std::memcpy(place, args, bytes);
  return place;
}

bool Work::touches(HostMemory::Range range) const noexcept {
  switch (kind) {
    case Kind::kOp: {
      const auto* words = static_cast<const std::byte*>(from);
      for (std::size_t i = 0; i + sizeof(std::uintptr_t) <= bytes; i += sizeof(std::uintptr_t)) {
        std::uintptr_t word;
        std::memcpy(&word, words + i, sizeof word);
        if (word >= reinterpret_cast<std::uintptr_t>(range.begin) &&
            word < reinterpret_cast<std::uintptr_t>(range.end)) {
          return true;
        }
      }
      return false;
    }
    case Kind::kCopy:
      return overlaps(from, bytes, range) || overlaps(to, bytes, range);
    case Kind::kZero:
      return overlaps(to, bytes, range);
    case Kind::kReplay:
      return graph->touches(range);
    case Kind::kWait:
      break;
  }
  return false;
}

const char* name_of(const Work& work) noexcept {
  switch (work.kind) {
    case Work::Kind::kOp:
      return to_string(work.op);
    case Work::Kind::kCopy:
      return "copy";
    case Work::Kind::kZero:
      return "zero";
    case Work::Kind::kWait:
      return "wait";
    case Work::Kind::kReplay:
      return "graph replay";
  }
  return "unknown";
}

bool HostGraph::touches(HostMemory::Range range) const noexcept {
  return std::any_of(nodes.begin(), nodes.end(),
                     [&](const Node& node) { return node.work.touches(range); });
}

void HostGraph::start(StreamId by) {
  runner = by;
  waiting.resize(nodes.size());
  ready.clear();
  ready.reserve(nodes.size());
  for (std::uint32_t i = 0; i < nodes.size(); ++i) {
    waiting[i] = nodes[i].predecessors;
    if (waiting[i] == 0) ready.push_back(i);
  }
}

void HostGraph::finish(std::uint32_t node) {
  const Node& n = nodes[node];
  for (std::uint32_t e = n.first; e < n.first + n.successors; ++e) {
    if (--waiting[edges[e]] == 0) ready.push_back(edges[e]);
  }
}

}  // namespace flashnext
