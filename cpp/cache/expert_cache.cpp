#include "cpp/cache/expert_cache.h"

#include "cpp/device/resolve.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace flashnext::cache {

namespace {

constexpr std::size_t kInt = sizeof(std::int32_t);

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

}  // namespace

ExpertCache::ExpertCache(Device& device, const Bank& bank, CacheShape shape, std::int32_t dim,
                         std::int32_t inner, std::int32_t levels, const CacheOptions& options)
    : device_(device),
      bank_(bank),
      shape_(shape),
      dim_(dim),
      inner_(inner),
      levels_(levels),
      options_(options),
      copies_(device) {
  check(shape_.layers == static_cast<std::int32_t>(bank.layers().size()), "cache: layers");
  options_.lines = std::min(options_.lines, shape_.experts);
  check(options_.lines >= 1, "cache: no line a layer");
  shape_.lines = options_.lines;
  shape_.line_bytes = 0;
  for (const Bank::Layer& layer : bank.layers()) {
    shape_.line_bytes = std::max(shape_.line_bytes, layer.layout.bytes);
  }
  allocate();
}

ExpertCache::~ExpertCache() = default;

std::size_t ExpertCache::ids_bytes() const noexcept {
  return size(options_.decode_rows) * size(shape_.top_k) * kInt;
}

void ExpertCache::allocate() {
  const std::int64_t experts = shape_.experts, lines = shape_.lines, layers = shape_.layers;
  const std::int64_t pairs = std::int64_t{options_.decode_rows} * shape_.top_k;
  staging_lines_ = std::max(static_cast<std::int32_t>(std::min(pairs, experts)),
                            std::min(options_.ring_lines, shape_.experts));
  std::int64_t at = 0;
  const auto take = [&at](std::int64_t n) { return std::exchange(at, at + (n + 63) / 64 * 64); };
  at_.line_of = take(experts);
  at_.expert_of = take(lines);
  at_.stamp = take(lines);
  at_.seen = take(experts);
  at_.order = take(experts);
  at_.rule = take(1);
  at_.cpu_of = take(pairs + 1);
  at_.reachable = take(experts);
  at_.size = at;

  const auto device = [&](std::int64_t bytes, const char* what) {
    return Block(device_, Space::kDevice, size(bytes), what);
  };
  const auto pinned = [&](std::int64_t bytes, const char* what) {
    return Block(device_, Space::kPinned, size(bytes), what);
  };
  std::int64_t pool_bytes = 0;
  for (const Bank::Layer& layer : bank_.layers()) pool_bytes += lines * layer.layout.bytes;
  pools_ = device(pool_bytes, "expert lines");
  staging_ = device(staging_lines_ * shape_.line_bytes, "expert lines in passing");
  const auto table_bytes = layers * at_.size * static_cast<std::int64_t>(kInt);
  tables_ = device(table_bytes, "expert tables");
  tables_host_ = pinned(table_bytes, "expert tables, host side");
  refs_ = device(layers * experts * static_cast<std::int64_t>(sizeof(ExpertRef)), "expert tables");
  groups_ = device(layers * experts * static_cast<std::int64_t>(kInt), "expert tables");
  const auto ids = layers * static_cast<std::int64_t>(ids_bytes());
  ids_ = device(ids, "expert ids of a step");
  ids_host_ = pinned(ids, "expert ids of a step, host side");
  const auto counters = layers * static_cast<std::int64_t>(sizeof(CacheCounters));
  counters_ = device(counters, "expert counters");
  counters_host_ = pinned(counters, "expert counters, host side");

  // What ops hand over: fetches, their number, experts of the processor, their number, sequence.
  const auto fetch_bytes = pairs * static_cast<std::int64_t>(sizeof(Fetch));
  const auto cpu_bytes = pairs * static_cast<std::int64_t>(kInt);
  handover_ = device(fetch_bytes + cpu_bytes + 1024, "expert fetches");
  auto* base = handover_.as<std::byte>();
  step_.staging = staging_.as<std::byte>();
  step_.num_fetches = reinterpret_cast<std::int32_t*>(base);
  step_.num_cpu = reinterpret_cast<std::int32_t*>(base + 256);
  step_.sequence = reinterpret_cast<MailSequence*>(base + 512);
  step_.fetches = reinterpret_cast<Fetch*>(base + 1024);
  step_.cpu = reinterpret_cast<std::int32_t*>(base + 1024 + fetch_bytes);
  if (options_.cpu) {
    mail_head_ = pinned(sizeof(MailboxHead), "mailbox");
    mail_jobs_ = pinned(pairs * static_cast<std::int64_t>(sizeof(MailJob)), "mailbox");
    const auto row = dim_ * static_cast<std::int64_t>(sizeof(float));
    mail_x_ = pinned(options_.decode_rows * row, "mailbox");
    mail_y_ = pinned(pairs * row, "mailbox");
    step_.mail = {mail_head_.as<MailboxHead>(), mail_jobs_.as<MailJob>(), mail_x_.as<float>(),
                  mail_y_.as<float>()};
  }
  if (options_.link_limit > 0) pace_ = device(256, "pace");

  std::byte* pool = pools_.as<std::byte>();
  for (std::int64_t l = 0; l < layers; ++l) {
    const Bank::Layer& from = bank_.layers()[size(l)];
    LayerCache c{};
    c.tables = tables_at(tables_.as<std::int32_t>() + l * at_.size);
    c.layout = from.layout;
    c.bank = from.lines;
    c.pool = pool;
    c.experts = refs_.as<ExpertRef>() + l * experts;
    c.group = groups_.as<std::int32_t>() + l * experts;
    c.ids = ids_.as<std::int32_t>() + l * pairs;
    c.counters = counters_.as<CacheCounters>() + l;
    layers_.push_back(c);
    pool += lines * from.layout.bytes;
  }
  for (std::int32_t i = 0; i < options_.max_promotions; ++i) {
    events_.emplace_back(device_);
    free_events_.push_back(size(i));
  }
  stats_.resize(size(layers));
  dirty_.assign(size(layers), true);
  cpu_of_.assign(size(pairs + 1), 0);
}

CacheTables ExpertCache::tables_at(std::int32_t* base) const {
  return {base + at_.line_of, base + at_.expert_of, base + at_.stamp,  base + at_.seen,
          base + at_.order,   base + at_.rule,      base + at_.cpu_of, base + at_.reachable,
          shape_.experts,     shape_.lines};
}

void ExpertCache::fill(std::shared_ptr<Policy> policy, std::span<const std::uint64_t> profile,
                       const Progress& progress) {
  planner_ = std::make_unique<Planner>(shape_, std::move(policy), profile);
  if (options_.cpu) {
    std::memset(mail_head_.data(), 0, sizeof(MailboxHead));
    std::vector<LayerExperts> experts;
    for (const Bank::Layer& layer : bank_.layers()) {
      experts.push_back({layer.host, {layer.words[0], layer.words[1], layer.words[2]}});
    }
    const CpuShape shape{dim_, inner_, shape_.top_k, levels_, options_.decode_rows * shape_.top_k};
    cpu_ =
        std::make_unique<CpuExperts>(step_.mail, std::move(experts), shape, options_.cpu_options);
  }
  device_.zero_async(copies_.id(), handover_.data(), handover_.bytes());
  first_ = planner_->initial();
  const std::uint64_t total = pools_.bytes();
  std::uint64_t done = 0;
  for (std::int32_t l = 0; l < shape_.layers; ++l) {
    Lines& lines = lines_.emplace_back(shape_.experts, shape_.lines, "layer " + std::to_string(l));
    lines.fill(first_[size(l)]);
    lines.set_cpu_share(cpu_of_);
    lines.set_reachable(bank_layer(l).pinned);
    for (std::int32_t e = 0; e < shape_.experts; ++e) {
      const std::int32_t line = lines.line_of()[size(e)];
      if (line < 0) continue;
      copy_lines(copies_.id(), l, e, 1, layers_[size(l)].pool + line * line_bytes(l));
    }
    device_.synchronize(copies_.id());
    done += size(shape_.lines * line_bytes(l));
    if (progress) progress("lines", done, total);
  }
  upload(copies_.id());
  device_.synchronize(copies_.id());
}

void ExpertCache::copy_lines(StreamId stream, std::int32_t layer, std::int32_t expert,
                             std::int32_t count, std::byte* to) {
  const Bank::Layer& from = bank_layer(layer);
  const std::int64_t bytes = from.layout.bytes * count;
  const bool paced = options_.link_limit > 0;
  if (paced) launch(device_, stream, PaceArgs{pace_.as<std::int64_t>(), 0});
  const auto in_bank = [&](std::int32_t e) {
    return from.lines != nullptr && from.host[size(e)].trellis[0] ==
                                        from.lines + e * from.layout.bytes + from.layout.trellis[0];
  };
  bool together = true;
  for (std::int32_t e = expert; e < expert + count; ++e) together = together && in_bank(e);
  if (together) {
    device_.copy_async(stream, to, from.lines + expert * from.layout.bytes, size(bytes));
  } else {
    // Some lie in the mapped files, member by member.
    for (std::int32_t i = 0; i < count; ++i) {
      const ExpertRef& ref = from.host[size(expert + i)];
      std::byte* line = to + i * from.layout.bytes;
      for (std::size_t m = 0; m < 3; ++m) {
        const std::int64_t in = m == 2 ? inner_ : dim_;
        const std::int64_t out = m == 2 ? dim_ : inner_;
        device_.copy_async(stream, line + from.layout.trellis[m], ref.trellis[m],
                           size(in / 16 * (out / 16) * from.words[m] * 2));
        device_.copy_async(stream, line + from.layout.suh[m], ref.suh[m], size(in * 2));
        device_.copy_async(stream, line + from.layout.svh[m], ref.svh[m], size(out * 2));
      }
    }
  }
  if (paced) launch(device_, stream, PaceArgs{pace_.as<std::int64_t>(), link_ns(bytes)});
}

const std::byte* ExpertCache::line_of(std::int32_t layer, std::int32_t expert) {
  catch_up();
  const std::int32_t line = lines_[size(layer)].line_of()[size(expert)];
  return line < 0 ? nullptr : layers_[size(layer)].pool + line * line_bytes(layer);
}

ExpertRef ExpertCache::ref_of(std::int32_t layer, const std::byte* line) const {
  return expert_in_line(bank_layer(layer).layout, line);
}

// Writes the tables of changed layers to the device. The host's copy is free: steps that read it
// have ended.
void ExpertCache::upload(StreamId main) {
  for (std::int32_t l = 0; l < shape_.layers; ++l) {
    if (!dirty_[size(l)]) continue;
    dirty_[size(l)] = false;
    std::int32_t* base = tables_host_.as<std::int32_t>() + l * at_.size;
    const Lines& from = lines_[size(l)];
    std::copy(from.line_of().begin(), from.line_of().end(), base + at_.line_of);
    std::copy(from.expert_of().begin(), from.expert_of().end(), base + at_.expert_of);
    std::copy(from.stamp().begin(), from.stamp().end(), base + at_.stamp);
    std::copy(from.seen().begin(), from.seen().end(), base + at_.seen);
    std::copy(from.order().begin(), from.order().end(), base + at_.order);
    base[at_.rule] = from.installs() ? 1 : 0;
    std::copy(cpu_of_.begin(), cpu_of_.end(), base + at_.cpu_of);
    std::copy(bank_layer(l).pinned.begin(), bank_layer(l).pinned.end(), base + at_.reachable);
    device_.copy_async(main, tables_.as<std::int32_t>() + l * at_.size, base,
                       size(at_.size) * kInt);
  }
}

std::int32_t ExpertCache::before_step(StreamId main) {
  if (!under_way_.empty()) land();
  // Lines that are passed by are not the policy's to change either.
  if (!bypass_ && sequence_ % options_.plan_every == 0) plan();
  upload(main);
  if (cpu_) cpu_->arm();
  return ++sequence_;
}

// Promotions whose copies have run become lines, in the order in which they began.
void ExpertCache::land() {
  catch_up();
  std::erase_if(under_way_, [&](const Promoted& p) {
    if (!device_.reached(events_[p.event].id())) return false;
    lines_[size(p.at.layer)].finish_fill(p.at.line, p.at.expert);
    free_events_.push_back(p.event);
    touch(p.at.layer);
    return true;
  });
}

void ExpertCache::plan() {
  catch_up();
  std::vector<std::int32_t> held;  // (layers, lines)
  for (const Lines& lines : lines_) {
    held.insert(held.end(), lines.expert_of().begin(), lines.expert_of().end());
  }
  PlanOutput plan = planner_->next(sequence_, held);
  policy_installs_ = plan.install;
  const std::vector<Promoting> begun =
      apply_plan(plan, lines_, sequence_, static_cast<std::int32_t>(free_events_.size()));
  // NOTE: the lines of `begun` are free of readers: the last step has ended, and the next one sees
  // them marked as filling.
  for (const Promoting& p : begun) {
    const std::size_t event = free_events_.back();
    free_events_.pop_back();
    copy_lines(copies_.id(), p.layer, p.expert, 1,
               layers_[size(p.layer)].pool + p.line * line_bytes(p.layer));
    device_.record(events_[event].id(), copies_.id());
    under_way_.push_back({p, event});
    ++stats_[size(p.layer)].promoted;
  }
  dirty_.assign(dirty_.size(), true);
  if (options_.lockstep && !begun.empty()) {
    device_.synchronize(copies_.id());
    land();
  }
}

bool ExpertCache::after_step(std::int32_t first, std::int32_t count, std::int32_t rows) {
  const auto* ids = ids_host_.as<std::int32_t>();
  const std::int64_t pairs = std::int64_t{options_.decode_rows} * shape_.top_k;
  Step step{sequence_, first, count, rows, {}};
  for (std::int32_t l = first; l < first + count; ++l) {
    step.ids.insert(step.ids.end(), ids + l * pairs, ids + l * pairs + rows * shape_.top_k);
    const CacheCounters& c = counters_host_.as<CacheCounters>()[l];
    LayerStats& s = stats_[size(l)];
    ++s.steps;
    s.hits += size(c.hits);
    s.fetched += size(c.fetched);
    s.installed += size(c.installed);
    s.on_cpu += size(c.on_cpu);
    s.fetch_ns += size(c.fetch_ns);
    s.wait_ns += size(c.wait_ns);
  }
  if (trace_ != nullptr) {
    trace_->append(TraceKind::kStep, sequence_, rows, first, count,
                   std::span<const std::int32_t>(step.ids));
  }
  pending_.push_back(std::move(step));
  return cpu_ == nullptr || !stalled_now();
}

// Whether the workers missed a deadline; from then on they are not asked any more.
bool ExpertCache::stalled_now() {
  cpu_->disarm();
  const MailboxHead& head = *step_.mail.head;
  if (head.stalled == 0 || !stall_.empty()) return false;
  stall_ = "rank 0, layer " + std::to_string(head.stalled_layer) + ", sequence " +
           std::to_string(head.stalled) + ": the processor did not compute its experts within " +
           std::to_string(options_.cpu_deadline_ns / 1'000'000) + " ms" +
           (cpu_->fault().empty() ? "" : " (" + cpu_->fault() + ")");
  for (const Bank::Layer& layer : bank_.layers()) {
    if (std::find(layer.pinned.begin(), layer.pinned.end(), 0) != layer.pinned.end()) {
      throw StalledError(stall_ +
                         "; experts outside of pinned memory can be computed nowhere else");
    }
  }
  share_misses(std::vector<std::int32_t>(cpu_of_.size(), 0));
  return true;
}

void ExpertCache::catch_up() {
  for (const Step& step : pending_) {
    const std::int32_t* ids = step.ids.data();
    for (std::int32_t l = step.first; l < step.first + step.count; ++l) {
      lines_[size(l)].resolve(ids, step.rows, shape_.top_k, step.sequence);
      planner_->count_choices(l, {ids, size(step.rows * shape_.top_k)}, step.sequence);
      ids += step.rows * shape_.top_k;
    }
  }
  pending_.clear();
}

void ExpertCache::count_prompt(std::int32_t layer, std::span<const std::int32_t> ids,
                               std::uint64_t streamed) {
  if (is_suspended_) return;
  planner_->count_choices(layer, ids, sequence_);
  if (trace_ != nullptr) {
    trace_->append(TraceKind::kPrompt, sequence_,
                   static_cast<std::int32_t>(ids.size()) / shape_.top_k, layer, 1, ids);
  }
  stats_[size(layer)].streamed += streamed;
}

void ExpertCache::share_misses(std::span<const std::int32_t> cpu_of) {
  if (cpu_of.size() != cpu_of_.size()) throw LogicError("cache: table of the processor's share");
  catch_up();
  std::copy(cpu_of.begin(), cpu_of.end(), cpu_of_.begin());
  for (Lines& lines : lines_) lines.set_cpu_share(cpu_of_);
  dirty_.assign(dirty_.size(), true);
}

void ExpertCache::bypass(bool on) {
  catch_up();
  bypass_ = on;
  for (Lines& lines : lines_) lines.set_install(policy_installs_ && !on);
  dirty_.assign(dirty_.size(), true);
}

CacheTotals ExpertCache::totals() const {
  CacheTotals t;
  for (std::int32_t l = 0; l < shape_.layers; ++l) {
    const LayerStats& s = stats_[size(l)];
    const std::uint64_t line = size(line_bytes(l));
    t.sum.steps += s.steps;
    t.sum.hits += s.hits;
    t.sum.fetched += s.fetched;
    t.sum.installed += s.installed;
    t.sum.on_cpu += s.on_cpu;
    t.sum.fetch_ns += s.fetch_ns;
    t.sum.wait_ns += s.wait_ns;
    t.sum.promoted += s.promoted;
    t.sum.streamed += s.streamed;
    t.fetched_bytes += s.fetched * line;
    t.promoted_bytes += s.promoted * line;
    t.cpu_bytes += s.on_cpu * line;
    t.streamed_bytes += s.streamed * line;
  }
  return t;
}

void ExpertCache::suspend(StreamId main) {
  suspended_share_ = cpu_of_;
  suspended_bypass_ = bypass_;
  is_suspended_ = true;
  share_misses(std::vector<std::int32_t>(cpu_of_.size(), 0));
  bypass(true);
  upload(main);
}

void ExpertCache::resume() {
  is_suspended_ = false;
  share_misses(suspended_share_);
  bypass(suspended_bypass_);
}

void ExpertCache::forget() {
  catch_up();
  planner_->forget();
  stats_.assign(stats_.size(), {});
  sequence_ = 0;
  // Steps in between passed the lines by, so that they hold what they held at first.
  for (std::int32_t l = 0; l < shape_.layers; ++l) lines_[size(l)].fill(first_[size(l)]);
  dirty_.assign(dirty_.size(), true);
}

void ExpertCache::check_integrity(StreamId main) {
  device_.synchronize(copies_.id());
  land();
  upload(main);
  device_.synchronize(main);
  device_.copy_async(main, tables_host_.data(), tables_.data(), tables_.bytes());
  device_.synchronize(main);
  for (std::int32_t l = 0; l < shape_.layers; ++l) {
    const Lines& mine = lines_[size(l)];
    mine.check_integrity();
    const std::int32_t* theirs = tables_host_.as<std::int32_t>() + l * at_.size;
    const auto same = [theirs](std::span<const std::int32_t> values, std::int64_t at) {
      return std::equal(values.begin(), values.end(), theirs + at);
    };
    if (!same(mine.line_of(), at_.line_of) || !same(mine.expert_of(), at_.expert_of) ||
        !same(mine.stamp(), at_.stamp) || !same(mine.seen(), at_.seen)) {
      throw LogicError("cache: the mirror of layer " + std::to_string(l) +
                       " differs from the device's tables");
    }
  }
}

}  // namespace flashnext::cache
