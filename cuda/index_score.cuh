// Scores of the selection blocks: what index_select.cu launches before it picks.
#pragma once

#include "cpp/device/ops.h"

#include <cuda_runtime_api.h>

namespace flashnext::cuda::attn {

inline constexpr int kScoreBlocks = 64;  // blocks of one tile: four pages

// Scores (rows of the chunk, stride) of the complete blocks of rows [row0, row0 + rows) that see
// more than max_blocks; the others are left alone. Each dot is one fma chain over the index dims,
// heads are added in order: a score does not depend on the launch.
void index_scores(cudaStream_t stream, const IndexSelectArgs& args, float* scores,
                  std::int64_t stride, int row0, int rows);

}  // namespace flashnext::cuda::attn
