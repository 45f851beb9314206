#include "cpp/session/memory_plan.h"

#include "cpp/bank/host_ram.h"
#include "cpp/device/plan_device.h"

#include <algorithm>
#include <limits>

namespace flashnext {

namespace {

constexpr std::int32_t kResidentChunk = 512, kOffloadChunk = 2048;  // rows, unless asked for
constexpr const char* kRemedy =
    "\nLower window, lanes, kv_gb, chunk or prefix_snapshots, or raise memory_limit";

std::string bytes_text(std::uint64_t bytes) { return std::to_string(bytes) + " bytes"; }

WeightOptions weight_options(const SessionOptions& o, bool offload) {
  WeightOptions weights;
  weights.rope_positions = o.window;
  weights.experts = !offload;
  weights.embedding = !offload;
  weights.mtp = o.mtp;
  return weights;
}

EngineOptions engine_options(const SessionOptions& o, bool offload) {
  EngineOptions engine;
  engine.lanes = o.lanes;
  engine.window = o.window;
  engine.kv_bytes = o.kv_bytes;
  engine.chunk = o.chunk != 0 ? o.chunk : offload ? kOffloadChunk : kResidentChunk;
  engine.levels = o.levels;
  engine.token_limit = o.token_limit;
  engine.graphs = o.graphs;
  engine.snapshots = o.snapshots;
  engine.taps = o.taps;
  engine.mtp = o.mtp;
  engine.forced_routing = o.forced_routing;
  return engine;
}

cache::CacheOptions cache_options(const SessionOptions& o, const ModelShape& shape,
                                  std::int32_t lines) {
  cache::CacheOptions cache;
  cache.lines = lines;
  cache.trunk_layers = shape.layers;
  cache.decode_rows = decode_rows(o.lanes);
  cache.plan_every = o.plan_every;
  cache.ring_lines = o.ring_lines;
  cache.lockstep = o.lockstep;
  cache.link_limit = o.link_limit;
  cache.cpu = true;  // some experts may have no other way
  cache.cpu_options.threads = o.cpu_threads;
  cache.cpu_deadline_ns = static_cast<std::int64_t>(o.cpu_deadline_seconds * 1e9);
  return cache;
}

class MemoryPlanner {
 public:
  MemoryPlanner(const Checkpoint& checkpoint, const SessionOptions& options, const Device& sizes,
                const HostRoom& host)
      : c_(checkpoint), o_(options), sizes_(sizes), host_(host) {
    limit_ = std::min<std::uint64_t>(
        o_.memory_limit > 0 ? o_.memory_limit : std::numeric_limits<std::uint64_t>::max(),
        sizes_.available(Space::kDevice));
  }

  MemoryPlan run() const {
    if (o_.experts != "auto" && o_.experts != "resident" && o_.experts != "offload") {
      throw InputError("experts = \"" + o_.experts + "\": choose auto, resident or offload");
    }
    if (o_.mtp && !c_.has_mtp()) {
      throw InputError(
          "mtp = true: this checkpoint has no MTP head (no mtp.* tensors); leave it off");
    }
    const std::int32_t experts = c_.shape().experts, least = c_.shape().top_k;
    if (o_.cache_lines != 0 && (o_.cache_lines < least || o_.cache_lines > experts)) {
      throw InputError("cache_lines = " + std::to_string(o_.cache_lines) + ": a token uses " +
                       std::to_string(least) + " of the " + std::to_string(experts) +
                       " experts of a layer; choose a number in between, or leave cache_lines out "
                       "for as many as fit");
    }
    if (o_.experts != "offload") {
      MemoryPlan resident = count(false, 0);
      // On the host device experts stay in the mapped files: nothing needs less memory than that.
      if (o_.experts == "resident" || on_host() || needed(resident) <= limit_) {
        check_fit(resident, on_host() ? "" : ", or keep the experts in host memory (offload)");
        return resident;
      }
    }
    return offload(least, experts);
  }

 private:
  bool on_host() const { return sizes_.kind() == "host"; }

  // A limit is on everything that the host device takes but for the bank, which has its own; and on
  // device memory where there is some.
  std::uint64_t needed(const MemoryPlan& plan) const {
    if (!on_host()) return plan.device_bytes;
    return plan.device_bytes + plan.host_bytes - plan.bank_bytes;
  }

  MemoryPlan offload(std::int32_t least, std::int32_t experts) const {
    MemoryPlan plan = count(true, o_.cache_lines > 0 ? o_.cache_lines : least);
    check_fit(plan, "; experts take " + bytes_text(plan.slice) + " for every line a layer, and a " +
                        "layer needs " + std::to_string(least) + " lines");
    if (o_.cache_lines > 0) return plan;
    // Graphs and code of a device take memory that nobody asks it for.
    const std::uint64_t room = on_host() ? limit_ : limit_ - limit_ / 64;
    while (true) {
      const std::uint64_t used = needed(plan);
      std::int64_t lines = plan.lines;
      if (used > room) {
        lines -= static_cast<std::int64_t>((used - room + plan.slice - 1) / plan.slice);
      } else {
        lines += static_cast<std::int64_t>(std::min<std::uint64_t>(
            (room - used) / plan.slice, static_cast<std::uint64_t>(experts)));
      }
      lines = std::clamp<std::int64_t>(lines, least, experts);
      // What a line needs beside its bytes is little: from above, the first that fits is taken.
      if (lines == plan.lines || (used <= room && plan.lines > least)) return plan;
      plan = count(true, static_cast<std::int32_t>(lines));
    }
  }

  // Builds all that open() builds.
  MemoryPlan count(bool offload, std::int32_t lines) const {
    MemoryPlan result;
    result.weights = weight_options(o_, offload);
    result.engine = engine_options(o_, offload);
    result.offload = offload;
    result.lines = lines;
    result.device_limit = limit_;
    PlanDevice plan(sizes_);
    const Weights weights = Weights::plan(c_, plan, result.weights);
    EngineOptions engine = result.engine;
    engine.graphs = false;
    if (offload) {
      result.cache = cache_options(o_, c_.shape(), lines);
      PlanDevice uncounted(sizes_);  // the bank comes last: it takes the RAM that others leave
      const Bank bank = Bank::plan(c_, uncounted, {1, 1, o_.mtp});
      for (const Bank::Layer& layer : bank.layers()) {
        result.slice += static_cast<std::uint64_t>(layer.layout.bytes);
      }
      cache::ExpertCache cache(plan, bank, cache_shape(c_, bank), c_.shape().hidden,
                               c_.shape().expert_inner, o_.levels, result.cache);
      note_pool(Engine(plan, c_, weights, engine, &cache), result);
    } else {
      note_pool(Engine(plan, c_, weights, engine), result);
    }
    sum(plan, result);
    check_host(result);
    if (offload) count_bank(plan, result);
    if (weights.ple && weights.ple->host_gather) {
      const NgramTable& table = c_.ngram();
      result.ngram_bytes =
          static_cast<std::uint64_t>(table.rows) * static_cast<std::uint64_t>(table.row_bytes);
    }
    return result;
  }

  static void note_pool(const Engine& counted, MemoryPlan& result) {
    result.kv_pages = counted.state().num_pages();
    result.kv_page_bytes = counted.state().bytes_per_page();
  }

  // Adds the bank's part. What else the session takes comes out of the RAM first.
  void count_bank(PlanDevice& plan, MemoryPlan& result) const {
    const std::uint64_t taken = std::min(result.host_bytes, host_.free);
    const std::uint64_t free = host_.free - taken;
    result.bank_limit =
        o_.host_limit > 0 ? std::min(o_.host_limit, free) : free - std::min(free, host_.reserve);
    result.bank_limit = std::max<std::uint64_t>(result.bank_limit, 1);
    result.bank = Bank::plan(c_, plan, {result.bank_limit, 1, o_.mtp}).report();
    const std::uint64_t before = result.host_bytes;
    sum(plan, result);
    result.bank_bytes = result.host_bytes - before;
  }

  static void sum(const PlanDevice& plan, MemoryPlan& result) {
    result.parts.clear();
    result.device_bytes = result.host_bytes = 0;
    for (const Allocated& part : plan.allocations()) {
      (part.space == Space::kDevice ? result.device_bytes : result.host_bytes) += part.bytes;
      const auto same = std::find_if(result.parts.begin(), result.parts.end(), [&](const auto& p) {
        return p.space == part.space && p.what == part.what;
      });
      if (same == result.parts.end()) {
        result.parts.push_back({part.space, part.what, part.bytes});
      } else {
        same->bytes += part.bytes;
      }
    }
  }

  static std::string parts_text(const MemoryPlan& plan) {
    std::string text;
    for (const MemoryPart& part : plan.parts) {
      text += "\n  " + part.what + " (" + to_string(part.space) + "): " + bytes_text(part.bytes);
    }
    return text;
  }

  void check_fit(const MemoryPlan& plan, const std::string& remedy) const {
    const std::uint64_t bytes = needed(plan);
    if (bytes <= limit_) return;
    const std::string space = on_host() ? "host" : "device";
    throw OutOfMemory(space, bytes,
                      "the session needs " + bytes_text(bytes) + " of " + space +
                          " memory and may take " + std::to_string(limit_) + "; its parts are" +
                          parts_text(plan) + kRemedy + remedy + ".");
  }

  // Host memory without the bank's, for which there is always a place in the files.
  void check_host(const MemoryPlan& plan) const {
    if (on_host() || plan.host_bytes <= host_.free) return;
    throw OutOfMemory("host", plan.host_bytes,
                      "the session needs " + bytes_text(plan.host_bytes) + " of host memory and " +
                          bytes_text(host_.free) + " are free; its parts are" + parts_text(plan) +
                          kRemedy + ".");
  }

  const Checkpoint& c_;
  const SessionOptions& o_;
  const Device& sizes_;
  const HostRoom& host_;
  std::uint64_t limit_ = 0;
};

}  // namespace

HostRoom this_host() { return {free_ram(), ram_reserve()}; }

std::int32_t resolve_window(const ModelShape& shape, std::int32_t window) {
  if (window == 0) return std::min(32768, shape.max_positions);
  if (window < 0 || window > shape.max_positions) {
    throw InputError("window = " + std::to_string(window) + ": the model holds 1 to " +
                     std::to_string(shape.max_positions) +
                     " positions; choose a window in that range");
  }
  return window;
}

cache::CacheShape cache_shape(const Checkpoint& checkpoint, const Bank& bank) {
  cache::CacheShape shape{};
  shape.layers = static_cast<std::int32_t>(bank.layers().size());
  shape.experts = checkpoint.shape().experts;
  shape.top_k = checkpoint.shape().top_k;
  return shape;  // lines and their bytes are the cache's to say
}

MemoryPlan plan_memory(const Checkpoint& checkpoint, const SessionOptions& options,
                       const Device& sizes, const HostRoom& host) {
  return MemoryPlanner(checkpoint, options, sizes, host).run();
}

}  // namespace flashnext
