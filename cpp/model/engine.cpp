#include "cpp/model/engine.h"

#include "cpp/device/host_ops.h"

#include <algorithm>

namespace flashnext {

namespace {

// Logits of one step are held in at most this much memory; it bounds the rows of a step that asks
// for all of them.
constexpr std::size_t kLogitsBytes = std::size_t{64} << 20;

std::string number(std::int64_t n) { return std::to_string(n); }

}  // namespace

Engine::Engine(Device& device, const Checkpoint& checkpoint, const Weights& weights,
               const EngineOptions& options, cache::ExpertCache* cache)
    : device_(device),
      checkpoint_(checkpoint),
      weights_(weights),
      shape_(checkpoint.shape()),
      options_(options),
      cache_(cache),
      mtp_(options.mtp),
      streams_(device),
      copies_(device),
      gather_pool_(1) {
  check(!mtp_ || weights.mtp.has_value(), "the MTP head has no weights");
  if (options_.lanes < 1 || options_.lanes > 64) {
    throw InputError("lanes = " + number(options_.lanes) + ": must be 1 to 64");
  }
  if (options_.window < 1 || options_.window > shape_.max_positions) {
    throw InputError("window = " + number(options_.window) + ": the model holds 1 to " +
                     number(shape_.max_positions) + " positions; choose a window in that range");
  }
  if (options_.chunk < 1 || options_.chunk > 65536) {
    throw InputError("chunk = " + number(options_.chunk) + ": must be 1 to 65536 rows");
  }
  if (options_.levels != 32258 && options_.levels != 127) {
    throw InputError("levels = " + number(options_.levels) +
                     ": activations have 32258 levels (default) or 127");
  }
  if (options_.token_limit < 0 || options_.token_limit > shape_.vocab) {
    throw InputError("token_limit = " + number(options_.token_limit) + ": the vocabulary has " +
                     number(shape_.vocab) + " ids");
  }
  if (options_.snapshots < 0 || options_.snapshots > 4096) {
    throw InputError("snapshots = " + number(options_.snapshots) + ": must be 0 to 4096");
  }
  check(cache == nullptr || cache->options().decode_rows == decode_rows(options_.lanes),
        "the cache was made for another number of lanes");
  options_.chunk = std::min(options_.chunk, options_.window);
  if (options_.token_limit == 0) options_.token_limit = shape_.vocab;
  build();
}

Engine::~Engine() {
  // Copies of state read and write memory that goes now.
  try {
    device_.synchronize(copies_.id());
  } catch (const Error&) {  // whoever ran the failed work was told
  }
}

void Engine::allocate(std::int32_t large_rows) {
  const auto lanes = static_cast<std::size_t>(options_.lanes);
  const std::size_t row_bytes = static_cast<std::size_t>(weights_.head.out) * sizeof(float);
  const std::size_t stack = static_cast<std::size_t>(shape_.stack()) * sizeof(float);
  // A lane has a slot and a spare, so that a window of drafts can be undone.
  state_ = std::make_unique<StatePool>(
      device_, shape_, mtp_, 2 * options_.lanes,
      pool_pages(shape_, mtp_, options_.window, options_.lanes, options_.kv_bytes));
  lanes_.resize(lanes);
  for (std::size_t i = 0; i < lanes; ++i) {
    lanes_[i].slot = static_cast<std::int32_t>(2 * i);
    lanes_[i].spare = static_cast<std::int32_t>(2 * i + 1);
    free_lanes_.push_back(options_.lanes - 1 - static_cast<std::int32_t>(i));
  }
  for (std::size_t i = 0; i < 2 * lanes; ++i) slot_copies_.emplace_back(device_);
  const auto buffer = [&](std::int32_t rows) {
    return std::make_unique<StepBuffer>(device_, rows, options_.lanes, max_pages_);
  };
  const std::int32_t small_rows = decode_rows(options_.lanes);
  small_ = buffer(small_rows);
  rewind_ = buffer(small_rows);
  large_ = buffer(large_rows);
  if (mtp_) {
    mtp_small_ = buffer(small_rows);
    mtp_large_ = buffer(large_rows);
  }
  const auto outputs = static_cast<std::size_t>(max_outputs_);
  logits_host_ = Block(device_, Space::kPinned, outputs * row_bytes, "logits, host side");
  tokens_host_ =
      Block(device_, Space::kPinned, outputs * sizeof(std::int32_t), "tokens, host side");
  if (weights_.ple && weights_.ple->host_gather) {
    packed_host_ = Block(device_, Space::kPinned,
                         static_cast<std::size_t>(large_rows) *
                             static_cast<std::size_t>(shape_.ngram_heads()) *
                             static_cast<std::size_t>(checkpoint_.ngram().row_bytes),
                         "n-gram rows, host side");
  }
  if (cache_ != nullptr) {
    if (large_rows > small_rows) {
      stream_ = std::make_unique<cache::ExpertStream>(device_, *cache_, large_rows);
    }
    if (options_.forced_routing) {
      const std::size_t bytes = cache_->bank().layers().size() * cache_->ids_bytes();
      forced_ = Block(device_, Space::kDevice, bytes, "replayed expert ids");
      forced_host_ = Block(device_, Space::kPinned, bytes, "replayed expert ids, host side");
      std::fill_n(forced_host_.as<std::int32_t>(), bytes / sizeof(std::int32_t), -1);
    }
  }
  if (options_.snapshots > 0) {
    snapshots_ =
        Block(device_, Space::kPinned,
              static_cast<std::size_t>(options_.snapshots) * state_->slot_bytes(), "snapshots");
    for (std::int32_t i = options_.snapshots - 1; i >= 0; --i) free_snapshots_.push_back(i);
  }
  if (options_.taps) {
    const auto layers = static_cast<std::size_t>(shape_.layers);
    taps_ = Block(device_, Space::kDevice, layers * static_cast<std::size_t>(large_rows) * stack,
                  "layer taps");
    taps_host_ = Block(device_, Space::kPinned, layers * stack, "layer taps, host side");
  }
}

std::vector<Bucket> Engine::buckets(std::int32_t large_rows) const {
  std::vector<Bucket> list;
  const std::int32_t most = std::min(decode_rows(options_.lanes), large_rows);
  const auto decode = [&](std::int32_t r) {
    list.push_back({Phase::kDecode, r, std::min(r, options_.lanes), r});
  };
  for (const std::int32_t r : kDecodeBuckets) {
    if (r < most) decode(r);
  }
  decode(most);
  // The kernels of decode steps read a short prompt faster than those of long ones, also where its
  // lane does not decode so many rows.
  for (const std::int32_t r : {kDecodeRows, 64, 512, 2048, large_rows}) {
    if (r > list.back().rows && r <= large_rows) {
      list.push_back({Phase::kPrefill, r, options_.lanes, std::min(r, max_outputs_)});
    }
  }
  return list;
}

void Engine::build() {
  max_pages_ = pages_for(options_.window);
  const std::size_t row_bytes = static_cast<std::size_t>(weights_.head.out) * sizeof(float);
  const auto by_memory = static_cast<std::int32_t>(
      std::min<std::size_t>(kLogitsBytes / row_bytes, std::size_t{1} << 20));
  max_outputs_ =
      std::max({options_.lanes, decode_rows(options_.lanes), std::min(options_.chunk, by_memory)});
  const std::int32_t large_rows = std::max(options_.chunk, options_.lanes);
  allocate(large_rows);

  // Programs run one at a time, so they share one arena.
  std::size_t arena = 0;
  std::vector<GraphBuilder::Sizes> counted;
  const std::vector<Bucket> all = buckets(large_rows);
  for (const Bucket& bucket : all) {
    Built trial;
    trial.bucket = bucket;
    counted.push_back(build_bucket(trial, nullptr, {}));
    arena = std::max(arena, counted.back().total());
  }
  activations_ = Block(device_, Space::kDevice, arena, "activations");
  for (std::size_t i = 0; i < all.size(); ++i) {
    auto built = std::make_unique<Built>();
    built->bucket = all[i];
    build_bucket(*built, activations_.as<std::byte>(), counted[i]);
    if (options_.graphs) {
      capture(built->trunk_program, built->trunk_graphs);
      if (mtp_) capture(built->mtp_program, built->mtp_graphs);
      if (built->rewind_program.num_ops() > 0) capture(built->rewind_program, built->rewind_graphs);
    }
    built_.push_back(std::move(built));
  }
  counters_.ops_per_token = built_.front()->trunk_program.num_ops();
}

GraphBuilder::Sizes Engine::build_bucket(Built& built, std::byte* base,
                                         const GraphBuilder::Sizes& sizes) {
  const Bucket& k = built.bucket;
  const bool decodes = k.phase == Phase::kDecode;
  built.buffer = decodes ? small_.get() : large_.get();
  built.mtp_buffer = decodes ? mtp_small_.get() : mtp_large_.get();
  built.step = built.buffer->view(k.rows, k.segments, k.outputs);
  const GraphContext context{checkpoint_,
                             weights_,
                             *state_,
                             options_.levels,
                             options_.window,
                             options_.token_limit,
                             built.buffer->ticket(),
                             cache_,
                             forced_.as<std::int32_t>()};

  // All three lists share the arena: the MTP head reads the trunk's streams, a rewind the trunk's
  // staged inputs.
  GraphBuilder builder(device_, base, sizes);
  TrunkOptions trunk{};
  trunk.phase = k.phase;
  trunk.taps = options_.taps ? taps_.as<float>() : nullptr;
  trunk.packed_host = packed_host_.as<std::byte>();
  trunk.tokens = tokens_host_.as<std::int32_t>();
  built.buffer->add_upload(builder.program());
  if (decodes && forced_.data() != nullptr) {
    builder.program().copy(Lane::kMain, forced_.data(), forced_host_.data(), forced_.bytes());
  }
  built.trunk = build_trunk(builder, context, built.step, trunk);
  if (decodes && cache_ != nullptr) {
    add_cache_results(builder.program(), 0, static_cast<std::size_t>(shape_.layers));
  }
  built.trunk_program = std::exchange(builder.program(), {});
  if (mtp_) {
    built.mtp_step = built.mtp_buffer->view(k.rows, 1, k.outputs);
    // Of the trunk it needs the streams alone; a rewind needs what the trunk staged.
    if (!decodes) builder.reuse(built.trunk.scratch);
    built.mtp_buffer->add_upload(builder.program());
    built.mtp = build_mtp(builder, context, built.mtp_step, k.phase);
    if (decodes && cache_ != nullptr) {
      add_cache_results(builder.program(), static_cast<std::size_t>(shape_.layers), 1);
    }
    built.mtp_program = std::exchange(builder.program(), {});
  }
  if (decodes) {
    rewind_->add_upload(builder.program());
    build_rewind(builder, built.trunk, rewind_->view(k.rows, 1, 1));
    built.rewind_program = std::exchange(builder.program(), {});
  }
  return builder.used();
}

void Engine::capture(const Program& program, Graphs& graphs) {
  for (std::size_t part = 0; part < program.parts(); ++part) {
    Capture scope(device_, streams_.main());
    program.enqueue(device_, streams_, part);
    graphs.push_back(scope.finish());
    ++counters_.graphs;
  }
}

void Engine::run(const Built& built, const Program& program, const Graphs& graphs,
                 std::int32_t rows) {
  for (std::size_t part = 0; part < program.parts(); ++part) {
    if (!graphs.empty() && use_graphs_) {
      graphs[part].replay(streams_.main());
    } else {
      program.enqueue(device_, streams_, part);
    }
    if (part + 1 == program.parts()) return;
    if (const auto& experts = program.after(part)) {
      stream_->run(streams_.main(), *experts, rows);
    } else {
      gather_ngrams(built);
    }
  }
}

Engine::Built& Engine::bucket_for(std::int32_t rows, std::int32_t outputs) {
  for (const auto& built : built_) {
    if (built->bucket.rows >= rows && built->bucket.outputs >= outputs) return *built;
  }
  throw LogicError("no bucket holds " + number(rows) + " rows and " + number(outputs) + " outputs");
}

Engine::LaneState& Engine::lane(std::int32_t index) {
  check(index >= 0 && index < options_.lanes, "lane out of range");
  return lanes_[static_cast<std::size_t>(index)];
}

const Engine::LaneState& Engine::lane(std::int32_t index) const {
  check(index >= 0 && index < options_.lanes, "lane out of range");
  return lanes_[static_cast<std::size_t>(index)];
}

std::int32_t Engine::length(std::int32_t index) const {
  return static_cast<std::int32_t>(lane(index).ids.size());
}

const std::vector<std::int32_t>& Engine::ids(std::int32_t index) const { return lane(index).ids; }

void Engine::validate(std::span<const LaneRows> rows) const {
  std::int64_t total = 0, outputs = 0;
  std::vector<bool> seen(lanes_.size(), false);
  for (const LaneRows& r : rows) {
    const LaneState& l = lane(r.lane);
    check(!seen[static_cast<std::size_t>(r.lane)], "a lane appears twice in one step");
    seen[static_cast<std::size_t>(r.lane)] = true;
    check(!r.tokens.empty(), "a lane of a step has no rows");
    for (const std::int32_t id : r.tokens) {
      if (id < 0 || id >= shape_.vocab) {
        throw InputError("token id " + number(id) + " is outside the vocabulary of 0 to " +
                         number(shape_.vocab - 1) + "; check which tokenizer made it");
      }
    }
    const auto end = static_cast<std::int64_t>(l.ids.size() + r.tokens.size());
    if (end > options_.window) {
      throw InputError("a sequence of " + number(end) + " tokens exceeds the window of " +
                       number(options_.window) + "; open the session with a larger window");
    }
    check(static_cast<std::int64_t>(l.pages.size()) * kPageTokens >= end,
          "pages were not reserved before the step");
    total += static_cast<std::int64_t>(r.tokens.size());
    if (r.logits == LaneRows::Logits::kAll) {
      outputs += static_cast<std::int64_t>(r.tokens.size());
    } else if (r.logits == LaneRows::Logits::kLast) {
      ++outputs;
    }
  }
  check(total >= 1 && total <= std::max(options_.chunk, options_.lanes),
        "rows of a step exceed the chunk");
  check(outputs <= max_outputs_, "outputs of a step exceed what the engine holds");
}

void Engine::fill_pages(const StepBuffer& buffer, std::int32_t index) {
  const LaneState& l = lane(index);
  std::copy(l.pages.begin(), l.pages.end(), buffer.pages() + std::int64_t{index} * max_pages_);
}

void Engine::fill(const Built& built, std::span<const LaneRows> rows) {
  const StepBuffer& b = *built.buffer;
  StepHead head{};
  const bool decodes = built.bucket.phase == Phase::kDecode;
  for (LaneState& l : lanes_) l.stepped = l.rewindable = false;
  outputs_.clear();
  for (const LaneRows& r : rows) {
    LaneState& l = lane(r.lane);
    const auto pos0 = static_cast<std::int32_t>(l.ids.size());
    const auto n = static_cast<std::int32_t>(r.tokens.size());
    Segment segment{head.rows, n, pos0, r.lane, l.slot, l.slot};
    // What may be undone, or repeated without the processor, leaves the old state as it is.
    const bool aside = n > 1 || (cache_ != nullptr && cache_->options().cpu);
    // So does a step beside the copy of that state to a snapshot.
    if ((decodes && aside) || copied_out(l.slot)) segment.state_out = l.spare;
    settle(segment.state_out);
    if (copy_of(l.slot).kind == SlotCopy::Kind::kIn) settle(l.slot);
    for (std::int32_t i = 0; i < n; ++i) {
      const auto before = [&](std::int32_t back) {
        const std::int32_t p = pos0 + i - back;
        if (p < 0) return shape_.separator;
        return p >= pos0 ? r.tokens[static_cast<std::size_t>(p - pos0)]
                         : l.ids[static_cast<std::size_t>(p)];
      };
      b.rows()[head.rows + i] = {r.tokens[static_cast<std::size_t>(i)],
                                 before(1),
                                 before(2),
                                 pos0 + i,
                                 r.lane,
                                 head.segments};
      const bool wanted =
          r.logits == LaneRows::Logits::kAll || (r.logits == LaneRows::Logits::kLast && i == n - 1);
      if (!wanted) continue;
      b.outputs()[head.outputs] = head.rows + i;
      SampleParams sampling = r.sampling;
      sampling.position = pos0 + i + 1;
      b.sampling()[head.outputs] = sampling;
      ++head.outputs;
      outputs_.push_back({r.lane, pos0 + i, -1, nullptr});
    }
    b.segments()[head.segments] = segment;
    head.rows += n;
    ++head.segments;
    fill_pages(b, r.lane);
    l.last = segment;
    l.stepped = true;
  }
  b.head() = head;
}

void Engine::gather_ngrams(const Built& built) {
  // The device cannot read the mapped table: hash and gather here, with the host's ops on the
  // host's copy of the step.
  host::Context context{gather_pool_, exl3::Isa::kScalar};
  const NgramTable& table = checkpoint_.ngram();
  StepView step =
      built.buffer->host_view(built.bucket.rows, built.bucket.segments, built.bucket.outputs);
  NgramHashArgs hash = ngram_hash_args(shape_, table, step);
  std::vector<std::int64_t> ids(static_cast<std::size_t>(step.head->rows * shape_.ngram_heads()));
  hash.ids = ids.data();
  host::ngram_hash(hash, context);
  host::ngram_gather({{&step.head->rows, 1, built.bucket.rows},
                      ids.data(),
                      table.shards.data(),
                      packed_host_.as<std::byte>(),
                      table.shard_rows,
                      table.rows,
                      shape_.ngram_heads(),
                      table.row_bytes},
                     context);
}

const std::vector<StepOutput>& Engine::step(std::span<const LaneRows> rows, bool fetch_logits) {
  validate(rows);
  std::int32_t total = 0, outputs = 0;
  for (const LaneRows& r : rows) {
    const auto n = static_cast<std::int32_t>(r.tokens.size());
    total += n;
    outputs += r.logits == LaneRows::Logits::kAll ? n : r.logits == LaneRows::Logits::kLast ? 1 : 0;
  }
  Built& built = bucket_for(total, outputs);
  fill(built, rows);
  run_layers(built, {built.trunk_program, built.trunk_graphs, *built.buffer, 0, shape_.layers},
             total);
  if (mtp_) {  // its state goes with the trunk's into the other slot
    for (const LaneRows& r : rows) {
      const LaneState& l = lane(r.lane);
      if (l.last.state_out != l.slot) copy_mtp_state(l.last.state_out, l.slot);
    }
  }
  const std::size_t row_bytes = static_cast<std::size_t>(weights_.head.out) * sizeof(float);
  if (fetch_logits && outputs > 0) {
    device_.copy_async(streams_.main(), logits_host_.data(), built.trunk.logits,
                       static_cast<std::size_t>(outputs) * row_bytes);
  }
  device_.synchronize(streams_.main());

  for (const LaneRows& r : rows) {
    LaneState& l = lane(r.lane);
    l.ids.insert(l.ids.end(), r.tokens.begin(), r.tokens.end());
    if (l.last.state_out != l.slot) {
      std::swap(l.slot, l.spare);
      l.rewindable = built.rewind_program.num_ops() > 0;
    }
  }
  for (std::size_t i = 0; i < outputs_.size(); ++i) {
    outputs_[i].token = tokens_host_.as<std::int32_t>()[i];
    if (fetch_logits) {
      outputs_[i].logits =
          logits_host_.as<float>() + i * static_cast<std::size_t>(weights_.head.out);
    }
  }
  last_ = &built;
  counters_.steps += 1;
  counters_.rows += static_cast<std::uint64_t>(total);
  counters_.outputs += static_cast<std::uint64_t>(outputs);
  return outputs_;
}

}  // namespace flashnext
