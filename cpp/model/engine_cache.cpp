// The parts of the engine that know of experts in host memory.
#include "cpp/model/engine.h"

#include <algorithm>

namespace flashnext {

// At the end of a program: what the host wants to know of its layers with experts.
void Engine::add_cache_results(Program& program, std::size_t first, std::size_t count) const {
  const std::size_t ids = cache_->ids_bytes();
  program.copy(Lane::kMain, static_cast<std::byte*>(cache_->ids_host()) + first * ids,
               cache_->layer(first).ids, count * ids);
  program.copy(Lane::kMain, static_cast<CacheCounters*>(cache_->counters_host()) + first,
               cache_->layer(first).counters, count * sizeof(CacheCounters));
}

// With a cache, waits for the program as well. When the processor does not answer in time the
// program is repeated without it: the state before the step is untouched, since such steps write
// their state aside.
void Engine::run_layers(const Built& built, const Part& part, std::int32_t rows) {
  const bool misses = cache_ != nullptr && built.bucket.phase == Phase::kDecode;  // in its graph
  if (cache_ != nullptr && !misses) stream_->begin();
  for (;;) {
    if (misses) part.buffer.head().sequence = cache_->before_step(streams_.main());
    run(built, part.program, part.graphs, rows);
    if (!misses) return;
    cache_->catch_up();
    device_.synchronize(streams_.main());
    if (cache_->after_step(part.first, part.count, rows)) return;
  }
}

void Engine::force_routing(std::span<const std::int32_t> ids, std::int32_t rows) {
  check(forced_.data() != nullptr, "force_routing needs options.forced_routing and a cache");
  auto* to = forced_host_.as<std::int32_t>();
  std::fill_n(to, forced_host_.bytes() / sizeof(std::int32_t), -1);
  if (ids.empty()) return;
  const std::int64_t pairs = std::int64_t{rows} * shape_.top_k;
  const std::int64_t stride = std::int64_t{cache_->options().decode_rows} * shape_.top_k;
  check(rows >= 1 && rows <= cache_->options().decode_rows &&
            static_cast<std::int64_t>(ids.size()) == shape_.layers * pairs,
        "force_routing: ids must be (layers, rows, top_k)");
  for (std::int64_t l = 0; l < shape_.layers; ++l) {
    std::copy_n(ids.begin() + static_cast<std::ptrdiff_t>(l * pairs), pairs, to + l * stride);
  }
}

}  // namespace flashnext
