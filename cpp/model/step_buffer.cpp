#include "cpp/model/step_buffer.h"

#include <cstring>

namespace flashnext {

namespace {
std::size_t part(std::size_t begin, std::size_t items, std::size_t item_bytes) {
  return (begin + items * item_bytes + 63) / 64 * 64;
}
}  // namespace

StepBuffer::StepBuffer(Device& device, std::int32_t max_rows, std::int32_t lanes,
                       std::int32_t max_pages)
    : max_pages_(max_pages) {
  const auto rows = static_cast<std::size_t>(max_rows), l = static_cast<std::size_t>(lanes);
  ticket_ = part(head_, 1, sizeof(StepHead));
  segments_ = part(ticket_, 1, sizeof(std::int32_t));
  pages_ = part(segments_, l, sizeof(Segment));
  rows_ = part(pages_, l * static_cast<std::size_t>(max_pages), sizeof(std::int32_t));
  outputs_ = part(rows_, rows, sizeof(Row));
  sampling_ = part(outputs_, rows, sizeof(std::int32_t));
  bytes_ = part(sampling_, rows, sizeof(SampleParams));
  host_ = Block(device, Space::kPinned, bytes_, "step values, host side");
  device_ = Block(device, Space::kDevice, bytes_, "step values");
  std::memset(host_.data(), 0, bytes_);
}

StepView StepBuffer::view(std::int32_t max_rows, std::int32_t max_segments,
                          std::int32_t max_outputs) const {
  return view_of(device_, max_rows, max_segments, max_outputs);
}

StepView StepBuffer::host_view(std::int32_t max_rows, std::int32_t max_segments,
                               std::int32_t max_outputs) const {
  return view_of(host_, max_rows, max_segments, max_outputs);
}

StepView StepBuffer::view_of(const Block& block, std::int32_t max_rows, std::int32_t max_segments,
                             std::int32_t max_outputs) const {
  StepView v{};
  v.head = at<StepHead>(block, head_);
  v.rows = at<Row>(block, rows_);
  v.segments = at<Segment>(block, segments_);
  v.outputs = at<std::int32_t>(block, outputs_);
  v.sampling = at<SampleParams>(block, sampling_);
  v.pages = at<std::int32_t>(block, pages_);
  v.max_pages = max_pages_;
  v.max_rows = max_rows;
  v.max_segments = max_segments;
  v.max_outputs = max_outputs;
  return v;
}

void StepBuffer::add_upload(Program& program) const {
  program.copy(Lane::kMain, device_.data(), host_.data(), bytes_);
}

}  // namespace flashnext
