#include "cpp/model/program.h"

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
  Instruction i{};
  i.kind = Kind::kFork;
  i.lane = lane;
  instructions_.push_back(i);
}

void Program::join(Lane lane) {
  Instruction i{};
  i.kind = Kind::kJoin;
  i.lane = lane;
  instructions_.push_back(i);
}

void Program::enqueue(Device& device, const ProgramStreams& streams) const {
  for (const Instruction& i : instructions_) {
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
