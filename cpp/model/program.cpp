#include "cpp/model/program.h"

#include <span>

namespace flashnext {

void Program::copy(Lane lane, void* to, const void* from, std::size_t bytes) {
  Instruction i{};
  i.kind = Kind::kCopy;
  i.lane = lane;
  i.bytes = bytes;
  i.to = to;
  i.from = from;
  instructions_.push_back(i);
}

void Program::fork(Lane lane) {
  open_[static_cast<std::size_t>(lane)] = true;
  Instruction i{};
  i.kind = Kind::kFork;
  i.lane = lane;
  instructions_.push_back(i);
}

void Program::join(Lane lane) {
  bool& open = open_[static_cast<std::size_t>(lane)];
  if (!open) return;
  open = false;
  Instruction i{};
  i.kind = Kind::kJoin;
  i.lane = lane;
  instructions_.push_back(i);
}

void Program::cut(const std::optional<cache::StreamedExperts>& experts) {
  for (std::size_t lane = 0; lane < kNumLanes; ++lane) join(static_cast<Lane>(lane));
  cuts_.push_back({instructions_.size(), experts});
}

void Program::enqueue(Device& device, const ProgramStreams& streams, std::size_t part) const {
  const std::size_t begin = part == 0 ? 0 : cuts_.at(part - 1).at;
  const std::size_t end = part < cuts_.size() ? cuts_[part].at : instructions_.size();
  for (const Instruction& i : std::span(instructions_).subspan(begin, end - begin)) {
    const auto lane = static_cast<std::size_t>(i.lane);
    const StreamId stream = streams.stream(i.lane);
    switch (i.kind) {
      case Kind::kOp:
        device.launch(stream, i.op, args_.data() + i.offset, i.bytes);
        break;
      case Kind::kCopy:
        device.copy_async(stream, i.to, i.from, i.bytes);
        break;
      case Kind::kFork:
        device.record(streams.forked[lane].id(), streams.main());
        device.wait(stream, streams.forked[lane].id());
        break;
      case Kind::kJoin:
        device.record(streams.joined[lane].id(), stream);
        device.wait(streams.main(), streams.joined[lane].id());
        break;
    }
  }
}

std::size_t Program::num_ops() const noexcept {
  return static_cast<std::size_t>(
      std::count_if(instructions_.begin(), instructions_.end(),
                    [](const Instruction& i) { return i.kind == Kind::kOp; }));
}

}  // namespace flashnext
