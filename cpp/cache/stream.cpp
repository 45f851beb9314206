#include "cpp/cache/stream.h"

#include <algorithm>
#include <span>

namespace flashnext::cache {

namespace {

// Parts of the ring: one is computed, one is ready, the others are filled.
constexpr std::int32_t kParts = 4;
// Rows that choose experts at random choose this many times as many as there are: then next to none
// (e^-8) is left out, and copying ahead of the choice moves next to nothing in vain.
constexpr std::int64_t kSurelyChosen = 8;

}  // namespace

ExpertStream::ExpertStream(Device& device, ExpertCache& cache, std::int32_t max_rows)
    : device_(device), cache_(cache), copies_(device) {
  const auto experts = static_cast<std::size_t>(cache.shape().experts);
  const std::int32_t parts = std::min(kParts, cache.staging_lines());
  part_lines_ = cache.staging_lines() / parts;
  for (std::int32_t i = 0; i < parts; ++i) {
    parts_.push_back(
        {cache.step().staging + std::int64_t{i} * part_lines_ * cache.shape().line_bytes,
         Event(device), Event(device)});
  }
  ids_host_ = Block(device, Space::kPinned,
                    static_cast<std::size_t>(max_rows) *
                        static_cast<std::size_t>(cache.shape().top_k) * sizeof(std::int32_t),
                    "expert ids of a prompt, host side");
  refs_ = Block(device, Space::kDevice, experts * sizeof(ExpertRef), "streamed experts");
  refs_host_ =
      Block(device, Space::kPinned, experts * sizeof(ExpertRef), "streamed experts, host side");
  groups_ = Block(device, Space::kDevice, experts * sizeof(std::int32_t), "streamed experts");
  groups_host_ =
      Block(device, Space::kPinned, experts * sizeof(std::int32_t), "streamed experts, host side");
  pairs_.resize(experts);
}

void ExpertStream::begin() {
  if (ahead_.empty()) return;
  // Whoever uses the ring next must not meet copies that nobody waits for any more.
  device_.synchronize(copies_.id());
  ahead_.clear();
  ahead_layer_ = -1;
}

// Experts without a line, ascending.
std::vector<std::int32_t> ExpertStream::missing(std::int32_t layer, bool only_chosen) {
  std::vector<std::int32_t> list;
  for (std::int32_t e = 0; e < cache_.shape().experts; ++e) {
    if (only_chosen && pairs_[static_cast<std::size_t>(e)] == 0) continue;
    if (cache_.line_of(layer, e) == nullptr) list.push_back(e);
  }
  return list;
}

// Enqueues the copies of up to a part's lines.
ExpertStream::Load ExpertStream::load(std::int32_t layer, std::span<const std::int32_t> experts) {
  Load load{next_part_, {experts.begin(), experts.end()}};
  Part& part = parts_[next_part_];
  next_part_ = (next_part_ + 1) % parts_.size();
  if (part.used) device_.wait(copies_.id(), part.free.id());
  part.used = true;
  const std::int64_t line_bytes = cache_.line_bytes(layer);
  for (std::size_t i = 0; i < experts.size();) {
    // Neighbours in the bank are neighbours in the ring: one copy.
    std::size_t n = 1;
    while (i + n < experts.size() && experts[i + n] == experts[i] + static_cast<std::int32_t>(n)) {
      ++n;
    }
    cache_.copy_lines(copies_.id(), layer, experts[i], static_cast<std::int32_t>(n),
                      part.lines + static_cast<std::int64_t>(i) * line_bytes);
    i += n;
  }
  device_.record(part.ready.id(), copies_.id());
  stats_.lines += experts.size();
  stats_.bytes += experts.size() * static_cast<std::uint64_t>(line_bytes);
  return load;
}

void ExpertStream::copy_ahead(std::int32_t layer, std::int32_t rows) {
  const CacheShape& shape = cache_.shape();
  if (std::int64_t{rows} * shape.top_k < kSurelyChosen * shape.experts) return;
  const std::vector<std::int32_t> all = missing(layer, false);
  std::span<const std::int32_t> left(all);
  ahead_layer_ = layer;
  for (std::size_t i = 0; i < parts_.size() && !left.empty(); ++i) {
    const auto n = std::min(left.size(), static_cast<std::size_t>(part_lines_));
    ahead_.push_back(load(layer, left.first(n)));
    left = left.subspan(n);
    stats_.ahead += n;
  }
}

void ExpertStream::run(StreamId main, const StreamedExperts& experts, std::int32_t rows) {
  const CacheShape& shape = cache_.shape();
  const std::int32_t layer = experts.layer;
  const std::size_t pairs = static_cast<std::size_t>(rows) * static_cast<std::size_t>(shape.top_k);
  auto* ids = ids_host_.as<std::int32_t>();
  device_.copy_async(main, ids, experts.args.ids, pairs * sizeof(std::int32_t));
  device_.synchronize(main);
  std::fill(pairs_.begin(), pairs_.end(), 0);
  for (std::size_t i = 0; i < pairs; ++i) ++pairs_[static_cast<std::size_t>(ids[i])];
  if (ahead_layer_ != layer) begin();

  // Which pass computes an expert, and where it lies then.
  auto* group = groups_host_.as<std::int32_t>();
  auto* refs = refs_host_.as<ExpertRef>();
  std::vector<std::int32_t> pass_pairs(1, 0);
  std::fill_n(group, shape.experts, -1);
  for (std::int32_t e = 0; e < shape.experts; ++e) {
    const std::byte* line = cache_.line_of(layer, e);
    if (line == nullptr) continue;
    group[e] = 0;
    refs[e] = cache_.ref_of(layer, line);
    pass_pairs[0] += pairs_[static_cast<std::size_t>(e)];
  }
  const std::vector<std::int32_t> list = missing(layer, true);
  std::vector<std::int32_t> left;  // not copied ahead
  const std::int64_t line_bytes = cache_.line_bytes(layer);
  const auto assign = [&](const Load& load, std::int32_t pass) {
    pass_pairs.push_back(0);
    for (std::size_t i = 0; i < load.experts.size(); ++i) {
      const std::int32_t e = load.experts[i];
      group[e] = pass;
      refs[e] =
          cache_.ref_of(layer, parts_[load.part].lines + static_cast<std::int64_t>(i) * line_bytes);
      pass_pairs.back() += pairs_[static_cast<std::size_t>(e)];
      if (pairs_[static_cast<std::size_t>(e)] == 0) ++stats_.ahead_unused;
    }
  };
  std::vector<Load> loads = std::move(ahead_);
  ahead_.clear();
  ahead_layer_ = -1;
  std::int32_t pass = 0;
  for (const Load& load : loads) assign(load, ++pass);
  std::copy_if(list.begin(), list.end(), std::back_inserter(left),
               [&](std::int32_t e) { return group[e] < 0; });
  const std::size_t ahead = loads.size();
  // Ring parts of the later passes follow in turn, so their places are known before their copies
  // are enqueued.
  std::size_t part = next_part_;
  for (std::size_t i = 0; i < left.size(); i += static_cast<std::size_t>(part_lines_)) {
    const std::size_t n = std::min(left.size() - i, static_cast<std::size_t>(part_lines_));
    Load next{part,
              {left.begin() + static_cast<std::ptrdiff_t>(i),
               left.begin() + static_cast<std::ptrdiff_t>(i + n)}};
    part = (part + 1) % parts_.size();
    assign(next, ++pass);
    loads.push_back(std::move(next));
  }
  device_.copy_async(main, refs_.data(), refs, refs_.bytes());
  device_.copy_async(main, groups_.data(), group, groups_.bytes());

  ExpertsArgs args = experts.args;
  args.experts = refs_.as<ExpertRef>();
  args.group = groups_.as<std::int32_t>();
  for (std::int32_t p = 0; p <= pass; ++p) {
    if (p > 0) {
      Load& load = loads[static_cast<std::size_t>(p - 1)];
      if (static_cast<std::size_t>(p - 1) >= ahead) load = this->load(layer, load.experts);
      device_.wait(main, parts_[load.part].ready.id());
    }
    args.only = p;
    args.max_pairs = pass_pairs[static_cast<std::size_t>(p)];
    if (p > 0) args.shared = nullptr;
    if (args.max_pairs > 0 || args.shared != nullptr) {
      if (args.max_pairs == 0) args.max_pairs = 1;  // 0 would mean all
      flashnext::launch(device_, main, args);
      ++stats_.passes;
    }
    if (p > 0) {
      device_.record(parts_[loads[static_cast<std::size_t>(p - 1)].part].free.id(), main);
    }
  }
  ++stats_.layers;
  std::uint64_t streamed = 0;
  for (const Load& load : loads) streamed += load.experts.size();
  cache_.count_prompt(layer, {ids, pairs}, streamed);
  if (layer + 1 < cache_.options().trunk_layers) copy_ahead(layer + 1, rows);
}

}  // namespace flashnext::cache
