// StepBuffer: the per-step values of ops.h (StepView) in one block, written on the host and copied
// to the device by one copy at the head of every program, at fixed addresses, so that captured
// graphs need no patching and the copy is a part of them.
#pragma once

#include "cpp/model/program.h"

#include <cstdint>

namespace flashnext {

class StepBuffer {
 public:
  StepBuffer(Device& device, std::int32_t max_rows, std::int32_t lanes, std::int32_t max_pages);

  // Host side, to be filled between steps (never while one is in flight).
  StepHead& head() const { return *at<StepHead>(host_, head_); }
  Row* rows() const { return at<Row>(host_, rows_); }                            // (max_rows)
  Segment* segments() const { return at<Segment>(host_, segments_); }            // (lanes)
  std::int32_t* outputs() const { return at<std::int32_t>(host_, outputs_); }    // (max_rows)
  SampleParams* sampling() const { return at<SampleParams>(host_, sampling_); }  // (max_rows)
  std::int32_t* pages() const { return at<std::int32_t>(host_, pages_); }  // (lanes, max_pages)
  std::int32_t max_pages() const { return max_pages_; }

  // Device side, for a program of that bucket.
  StepView view(std::int32_t max_rows, std::int32_t max_segments, std::int32_t max_outputs) const;
  // The same view of the host side.
  StepView host_view(std::int32_t max_rows, std::int32_t max_segments,
                     std::int32_t max_outputs) const;
  // Device side: one zero, which every upload renews.
  std::int32_t* ticket() const { return at<std::int32_t>(device_, ticket_); }
  // Adds the copy; everything that reads the step comes after it.
  void add_upload(Program& program) const;

 private:
  template <class T>
  static T* at(const Block& block, std::size_t offset) {
    return reinterpret_cast<T*>(block.as<std::byte>() + offset);
  }
  StepView view_of(const Block& block, std::int32_t max_rows, std::int32_t max_segments,
                   std::int32_t max_outputs) const;
  std::int32_t max_pages_;
  std::size_t head_ = 0, ticket_, segments_, pages_, rows_, outputs_, sampling_, bytes_;
  Block host_, device_;
};

}  // namespace flashnext
