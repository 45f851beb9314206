#include "cpp/cache/replay.h"

#include "cpp/base/errors.h"

#include <utility>

namespace flashnext::cache {

namespace {

std::size_t index(std::int32_t i) noexcept { return static_cast<std::size_t>(i); }

void add(LayerReplay& to, const LayerReplay& from) {
  to.hits += from.hits;
  to.fetched += from.fetched;
  to.installed += from.installed;
  to.on_cpu += from.on_cpu;
  to.promoted += from.promoted;
  to.prompt_uses += from.prompt_uses;
  to.prompt_hits += from.prompt_hits;
}

std::uint64_t u64(std::int32_t n) noexcept { return static_cast<std::uint64_t>(n); }

class Player {
 public:
  Player(const Trace& trace, const CacheShape& shape, std::shared_ptr<Policy> policy,
         const ReplayOptions& options)
      : trace_(trace),
        shape_(shape),
        options_(options),
        planner_(shape, std::move(policy), options.profile, options.planner),
        used_(index(shape.experts), false) {
    const std::vector<std::vector<std::int32_t>> initial = planner_.initial();
    for (std::int32_t layer = 0; layer < shape.layers; ++layer) {
      lines_.emplace_back(shape.experts, shape.lines, "layer " + std::to_string(layer));
      lines_.back().fill(initial[index(layer)]);
      lines_.back().set_cpu_share(options.cpu_of);
    }
    out_.layers.resize(index(shape.layers));
  }

  ReplayResult run() {
    for (const TraceRecord& record : trace_.records) {
      if (record.kind == TraceKind::kPrompt) {
        prompt(record);
      } else {
        step(record);
      }
    }
    for (const Lines& lines : lines_) lines.check_integrity();
    for (const LayerReplay& layer : out_.layers) add(out_.sum, layer);
    out_.bytes =
        (out_.sum.fetched + out_.sum.promoted) * static_cast<std::uint64_t>(shape_.line_bytes);
    out_.policy = planner_.policy_name();
    out_.fault = planner_.fault();
    out_.plans = planner_.plans();
    out_.plan_seconds = planner_.plan_seconds();
    return std::move(out_);
  }

 private:
  std::span<const std::int32_t> ids_of(const TraceRecord& record, std::int32_t i) {
    const std::span<const std::uint16_t> choices = trace_.choices(record, i);
    ids_.assign(choices.begin(), choices.end());
    return ids_;
  }

  void plan(std::int32_t sequence) {
    std::vector<std::int32_t> expert_of;
    for (const Lines& lines : lines_) {
      expert_of.insert(expert_of.end(), lines.expert_of().begin(), lines.expert_of().end());
    }
    const PlanOutput plan = planner_.next(sequence, expert_of);
    for (const Promoting& p : apply_plan(plan, lines_, sequence, options_.max_promotions)) {
      lines_[index(p.layer)].finish_fill(p.line, p.expert);
      ++out_.layers[index(p.layer)].promoted;
    }
  }

  void step(const TraceRecord& record) {
    const std::int32_t before = record.sequence - 1;
    if (record.sequence != sequence_ && before % options_.plan_every == 0) {
      plan(before);
    }
    sequence_ = record.sequence;
    StepCounts sum;
    for (std::int32_t i = 0; i < record.layers; ++i) {
      const std::int32_t layer = record.first + i;
      const std::span<const std::int32_t> ids = ids_of(record, i);
      const StepCounts c =
          lines_[index(layer)].resolve(ids.data(), record.rows, shape_.top_k, record.sequence);
      planner_.count_choices(layer, ids, record.sequence);
      LayerReplay& total = out_.layers[index(layer)];
      total.hits += u64(c.hits);
      total.fetched += u64(c.fetched);
      total.installed += u64(c.installed);
      total.on_cpu += u64(c.on_cpu);
      sum.hits += c.hits;
      sum.fetched += c.fetched;
      sum.installed += c.installed;
      sum.on_cpu += c.on_cpu;
    }
    out_.steps.push_back({record.sequence, record.rows, sum});
  }

  void prompt(const TraceRecord& record) {
    for (std::int32_t i = 0; i < record.layers; ++i) {
      const std::int32_t layer = record.first + i;
      const std::span<const std::int32_t> ids = ids_of(record, i);
      planner_.count_choices(layer, ids, record.sequence);
      for (const std::int32_t expert : ids) {
        if (used_[index(expert)]) continue;
        used_[index(expert)] = true;
        ++out_.layers[index(layer)].prompt_uses;
        out_.layers[index(layer)].prompt_hits +=
            lines_[index(layer)].line_of()[index(expert)] >= 0 ? 1u : 0u;
      }
      for (const std::int32_t expert : ids) used_[index(expert)] = false;
    }
  }

  const Trace& trace_;
  const CacheShape& shape_;
  const ReplayOptions& options_;
  Planner planner_;
  std::vector<Lines> lines_;       // (layers)
  std::vector<std::int32_t> ids_;  // scratch
  std::vector<bool> used_;         // (experts) scratch
  std::int32_t sequence_ = 0;
  ReplayResult out_;
};

}  // namespace

double ReplayResult::hit_rate() const noexcept {
  const std::uint64_t uses = sum.hits + sum.fetched + sum.on_cpu;
  return uses == 0 ? 0 : static_cast<double>(sum.hits) / static_cast<double>(uses);
}

CacheShape shape_of(const TraceHead& head, std::int32_t lines) {
  return {head.layers, head.experts, head.top_k, lines, head.line_bytes};
}

ReplayResult replay(const Trace& trace, const CacheShape& shape, std::shared_ptr<Policy> policy,
                    const ReplayOptions& options) {
  const TraceHead& h = trace.head;
  if (shape.layers != h.layers || shape.experts != h.experts || shape.top_k != h.top_k) {
    throw InputError("the trace has " + std::to_string(h.layers) + " layers of " +
                     std::to_string(h.experts) + " experts, " + std::to_string(h.top_k) +
                     " a token, and the cache is for another model");
  }
  if (shape.lines < 1 || shape.lines > shape.experts) {
    throw InputError("lines is " + std::to_string(shape.lines) + "; a layer has 1 to " +
                     std::to_string(shape.experts));
  }
  if (options.plan_every < 1) throw InputError("plan_every must be at least 1");
  const std::size_t size = index(h.layers) * index(h.experts);
  if (!options.profile.empty() && options.profile.size() != size) {
    throw InputError("the profile has another shape than the trace");
  }
  return Player(trace, shape, std::move(policy), options).run();
}

}  // namespace flashnext::cache
