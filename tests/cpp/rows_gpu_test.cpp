// Decode steps of many rows on the first CUDA device.
#include "tests/cpp/cuda_demo.h"
#include "tests/cpp/rows_cases.h"

namespace flashnext {
namespace {

using namespace test;

const LaneTexts& texts() {
  static const LaneTexts all = lane_texts(cuda_options());
  return all;
}

TEST(RowsGpu, Resident) { check_row_counts(cuda_options(), texts(), "resident"); }
TEST(RowsGpu, Eager) {
  SessionOptions o = cuda_options();
  o.graphs = false;
  check_row_counts(o, texts(), "eager");
}
TEST(RowsGpu, Offloaded) { check_offloaded_row_counts(cuda_options(), texts()); }
TEST(RowsGpu, StalledProcessor) { check_stalled_rows(cuda_options(), texts()); }
TEST(RowsGpu, Rewinds) {
  check_rewinds_of_many_rows(cuda_options(), texts());
  check_rewinds_of_many_rows(offloaded(cuda_options(), kDemoTopK + 1), texts());
}

}  // namespace
}  // namespace flashnext
