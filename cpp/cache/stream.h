// ExpertStream: the experts of a prompt's step. The host learns which experts the rows of a layer
// chose, computes those with a line at once, and streams the others that were chosen through the
// ring of staging lines: the copy engine fills one part of the ring while the device computes
// another. When nearly every expert is chosen anyhow, the first parts of the next layer are copied
// while its attention runs.
#pragma once

#include "cpp/cache/expert_cache.h"
#include "cpp/cache/streamed_experts.h"

#include <cstdint>
#include <vector>

namespace flashnext::cache {

class ExpertStream {
 public:
  // max_rows: of a prompt's step. Allocates on the device.
  ExpertStream(Device& device, ExpertCache& cache, std::int32_t max_rows);

  // Waits for the ids of `rows` rows on `main`, then enqueues everything; args.y and args.shared_y
  // are complete in the order of `main`.
  void run(StreamId main, const StreamedExperts& experts, std::int32_t rows);
  // A new step begins: what was copied ahead for another is dropped.
  void begin();

  struct Stats {
    std::uint64_t layers = 0, passes = 0, lines = 0, bytes = 0;
    std::uint64_t ahead = 0, ahead_unused = 0;  // lines copied before their layer was routed
  };
  const Stats& stats() const noexcept { return stats_; }

 private:
  struct Part {  // of the ring
    std::byte* lines;
    Event ready, free;
    bool used = false;
  };
  // Experts whose lines are in a part of the ring, or on their way.
  struct Load {
    std::size_t part;
    std::vector<std::int32_t> experts;
  };

  std::vector<std::int32_t> missing(std::int32_t layer, bool only_chosen);
  Load load(std::int32_t layer, std::span<const std::int32_t> experts);
  void copy_ahead(std::int32_t layer, std::int32_t rows);

  Device& device_;
  ExpertCache& cache_;
  Stream copies_;
  std::vector<Part> parts_;
  std::size_t next_part_ = 0;
  std::int32_t part_lines_ = 1;
  Block ids_host_, refs_, refs_host_, groups_, groups_host_;
  std::vector<std::int32_t> pairs_;  // (experts) of the layer at hand
  std::int32_t ahead_layer_ = -1;
  std::vector<Load> ahead_;
  Stats stats_;
};

}  // namespace flashnext::cache
