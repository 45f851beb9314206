#include "cpp/session/session.h"

#include "cpp/cache/profile.h"
#include "cpp/checkpoint/fingerprint.h"
#include "cpp/device/cuda_device.h"
#include "cpp/device/host_device.h"
#include "cpp/session/memory_plan.h"
#include "cpp/session/offload.h"

#include <algorithm>
#include <charconv>
#include <cmath>

namespace flashnext {

namespace {

// Options that were given and mean nothing without a cache of experts, as a list.
std::string idle_options(const SessionOptions& o) {
  std::string text;
  const auto add = [&](bool given, const char* name) {
    if (given) text += (text.empty() ? "" : ", ") + std::string(name);
  };
  add(o.policy != nullptr, "policy");
  add(o.keep_profile && !o.profile.empty(), "profile");
  add(o.cache_lines > 0, "cache_lines");
  add(o.host_limit > 0, "ram_gb");
  add(o.cpu_misses != SessionOptions{}.cpu_misses, "cpu_misses");
  add(o.cpu_threads > 0, "cpu_threads");
  add(o.lockstep, "lockstep");
  return text;
}

constexpr std::int32_t kProofRows = 64;  // of the prompt that proves that all fits
// With experts in host memory a part of a prompt reads nearly all of a layer's experts over the
// link whether it has 512 rows or 2,048: smaller parts would read prompts several times slower.
constexpr std::int32_t kLeastOffloadPart = 512, kOffloadTurnSpacing = 256;

// N of "cuda" (0) or "cuda:N"; -1 for anything else.
int cuda_ordinal(const std::string& name) {
  if (name == "cuda") return 0;
  if (!name.starts_with("cuda:")) return -1;
  int n = -1;
  const char* end = name.data() + name.size();
  const auto [at, error] = std::from_chars(name.data() + 5, end, n);
  return error == std::errc() && at == end ? n : -1;
}

// Why this CUDA device may not run a model; empty when it may. Architectures are enabled by
// evidence, not by hope: a receipt of the gate, shipped or written on this machine for this build.
std::string cuda_refusal(int ordinal, const std::vector<std::string>& accepted) {
  if (!cuda_built())
    return "flashnext was built without CUDA (install it where nvcc is on the PATH)";
  const std::vector<CudaDeviceInfo> all = cuda_devices();
  if (ordinal >= static_cast<int>(all.size())) {
    return "no CUDA device " + std::to_string(ordinal) + " is here (found " +
           std::to_string(all.size()) + ")";
  }
  const CudaDeviceInfo& info = all[static_cast<std::size_t>(ordinal)];
  const std::string capability = "sm_" + std::to_string(info.major) + std::to_string(info.minor);
  if (capability == "sm_121" || info.integrated) {
    return capability + " (" + info.name +
           ") shares the host's memory: keeping experts in host RAM and lines on the card makes no "
           "sense there";
  }
  if (!info.compiled) {
    return capability + " (" + info.name +
           ") has no code in this build, which holds sm_90 and sm_120";
  }
  if (std::find(accepted.begin(), accepted.end(), capability) == accepted.end()) {
    return capability + " (" + info.name +
           ") has no passing receipt of the gate \"device\" for this build; run `flashnext gate` "
           "on this machine";
  }
  return {};
}

void check_options(const SessionOptions& o) {
  const auto refuse = [](const std::string& name, const std::string& value, const char* expected) {
    throw InputError(name + " = " + value + ": must be " + expected);
  };
  if (o.plan_every < 1) refuse("plan_every", std::to_string(o.plan_every), "at least 1 step");
  if (o.cpu_threads < 0 || o.cpu_threads > 1024) {
    refuse("cpu_threads", std::to_string(o.cpu_threads), "0 (one a core but one) to 1024");
  }
  if (!(o.cpu_deadline_seconds > 0 && o.cpu_deadline_seconds <= 3600)) {
    refuse("cpu_deadline_seconds", std::to_string(o.cpu_deadline_seconds), "above 0, at most 3600");
  }
  if (!(o.link_limit >= 0 && std::isfinite(o.link_limit))) {
    refuse("link_limit", std::to_string(o.link_limit), "0 (off) or bytes a second");
  }
  cache::parse_cpu_misses(o.cpu_misses);  // throws for what is no such option
}

}  // namespace

Session::Session(Checkpoint checkpoint, SessionOptions options)
    : checkpoint_(std::move(checkpoint)), options_(std::move(options)) {}

Session::~Session() {
  thread_.reset();
  // What goes wrong here is lost: nobody is left to be told, and the old file is still whole.
  save_profile();
}

std::string Session::save_profile() {
  if (!keep_profile_) return {};
  keep_profile_ = false;
  try {
    between_steps([&] { cache_->catch_up(); });
    const std::span<const std::uint64_t> here = cache_->planner().total();
    std::vector<std::uint64_t> uses(here.begin(), here.end());
    uses.insert(uses.end(), profile_rest_.begin(), profile_rest_.end());
    return cache::save_profile(options_.profile, fingerprint(checkpoint_),
                               shape().layers + shape().mtp_layers, shape().experts, uses);
  } catch (const std::exception& e) {
    return e.what();
  }
}

std::unique_ptr<Session> Session::open(const std::string& path, const SessionOptions& options,
                                       const Progress& progress) {
  return open(Checkpoint::open(path, progress), options, progress);
}

std::unique_ptr<Session> Session::open(Checkpoint checkpoint, const SessionOptions& options,
                                       const Progress& progress) {
  std::unique_ptr<Session> s(new Session(std::move(checkpoint), options));
  s->notes_ = s->checkpoint_.notes();
  SessionOptions& o = s->options_;
  check_options(o);
  o.window = resolve_window(s->shape(), o.window);
  s->open_device();
  const MemoryPlan plan = plan_memory(s->checkpoint_, o, *s->device_);
  s->weights_ =
      std::make_unique<Weights>(Weights::load(s->checkpoint_, *s->device_, plan.weights, progress));
  if (plan.offload) s->open_cache(plan, progress);
  s->engine_ = std::make_unique<Engine>(*s->device_, s->checkpoint_, *s->weights_, plan.engine,
                                        s->cache_.get());
  SchedulerOptions scheduling;
  scheduling.token_wait = o.token_wait;
  if (plan.offload) {
    scheduling.least_part = kLeastOffloadPart;
    scheduling.turn_spacing = kOffloadTurnSpacing;
  }
  scheduling.vocabulary = std::move(o.vocabulary);
  s->scheduler_ = std::make_unique<Scheduler>(*s->engine_, std::move(scheduling));
  if (s->cache_) s->fill_cache(progress);
  s->note_cache();
  s->device_->seal();
  s->memory_ = s->device_->allocations();
  s->device_description_ = s->device_->description();
  s->publish();
  s->thread_ = std::make_unique<EngineThread>(*s->scheduler_, [p = s.get()] { p->publish(); });
  if (!o.trace.empty()) s->record(o.trace);
  return s;
}

// The experts in host memory, and the room for their lines on the device.
void Session::open_cache(const MemoryPlan& plan, const Progress& progress) {
  bank_ = std::make_unique<Bank>(
      Bank::fill(checkpoint_, *device_, {plan.bank_limit, 0, options_.mtp}, progress));
  if (!bank_->report().note.empty()) notes_.push_back(bank_->report().note);
  cache::CacheOptions options = plan.cache;
  options.cpu = needs_cpu(options_, *bank_);
  options.cpu_options.isa = exl3::isa_named(options_.isa);
  cache_ = std::make_unique<cache::ExpertCache>(*device_, *bank_, cache_shape(checkpoint_, *bank_),
                                                shape().hidden, shape().expert_inner,
                                                options_.levels, options);
}

// Runs once after the engine is built: first lines, a short prompt as proof that everything fits,
// and the processor's share.
void Session::fill_cache(const Progress& progress) {
  cache::Profile profile;
  if (!options_.profile.empty()) {
    const cache::CacheShape& c = cache_->shape();
    profile = cache::load_profile(options_.profile, fingerprint(checkpoint_), c.layers, c.experts);
    if (!profile.note.empty()) notes_.push_back(profile.note);
    keep_profile_ = profile.note.empty() && options_.keep_profile;
    // The file is the checkpoint's: an MTP head that is not here keeps its place in it.
    profile_rest_ = std::move(profile.rest);
    profile_rest_.resize(static_cast<std::size_t>(shape().layers + shape().mtp_layers - c.layers) *
                         static_cast<std::size_t>(c.experts));
  }
  cache_->fill(options_.policy, profile.uses, progress);
  cache_->bypass(true);  // until forget(): the lines stay as they were filled
  const std::vector<std::int32_t> ids(
      static_cast<std::size_t>(std::min(engine_->options().chunk, kProofRows)), 0);
  {
    const std::optional<LaneLease> lease = engine_->borrow();
    check(lease && engine_->reserve(lease->lane(), static_cast<std::int32_t>(ids.size())),
          "no pages for a first prompt");
    const LaneRows rows{lease->lane(), ids, LaneRows::Logits::kLast, {}};
    engine_->step({&rows, 1}, false);
  }
  share_ = std::make_unique<ShareReport>(choose_share(*engine_, options_));
  cache_->bypass(false);
  cache_->forget();
}

// What became of the experts, a note a fact.
void Session::note_cache() {
  if (!cache_) {
    const std::string idle = idle_options(options_);
    if (!idle.empty()) notes_.push_back("experts are resident: " + idle + " changed nothing");
    return;
  }
  const BankReport bank = held_by_system(bank_->report(), *device_);
  std::string text = "experts in host memory: " + std::to_string(cache_->shape().lines) + " of " +
                     std::to_string(cache_->shape().experts) + " a layer have a line on the device";
  notes_.push_back(text + ", " + std::to_string(cache_->shape().line_bytes) + " bytes each");
  notes_.push_back("experts in host memory: " + std::to_string(bank.pinned_bytes) +
                   " bytes pinned, " + std::to_string(bank.pageable_bytes) + " pageable, " +
                   std::to_string(bank.mapped_bytes) + " left in the files");
  notes_.push_back("experts in host memory: " + share_->text());
}

// On the engine's thread, or before it runs.
void Session::publish() {
  auto s = std::make_shared<SessionStats>();
  s->engine = engine_->counters();
  s->scheduler = scheduler_->counters();
  s->prefixes = scheduler_->prefixes().size();
  s->pages = engine_->state().num_pages();
  s->pages_free = engine_->state().free_pages();
  s->notes = notes_;
  if (cache_) {
    CacheStats& c = s->cache.emplace();
    const cache::Planner& planner = cache_->planner();
    c.shape = cache_->shape();
    c.staging_lines = cache_->staging_lines();
    c.layers = cache_->stats();
    c.totals = cache_->totals();
    c.recording = trace_ != nullptr;
    c.policy = planner.policy_name();
    c.plans = planner.plans();
    c.plan_seconds = planner.plan_seconds();
    c.cpu_of.assign(cache_->cpu_of().begin(), cache_->cpu_of().end());
    if (const cache::ExpertStream* stream = engine_->stream()) c.stream = stream->stats();
    if (cache_->has_cpu()) {
      c.cpu = cache_->cpu()->counters();
      c.cpu_threads = cache_->cpu()->threads();
    }
    if (const auto& fault = planner.fault()) {
      c.fault = fault->message();
      s->notes.push_back(c.fault);
    }
    if (!cache_->stall().empty()) {
      c.stall = cache_->stall();
      s->notes.push_back("the processor computes no misses any more: " + c.stall);
    }
    if (trace_ && !trace_->error().empty()) s->notes.push_back(trace_->error());
  }
  const std::lock_guard lock(stats_mutex_);
  stats_ = std::move(s);
}

std::shared_ptr<const SessionStats> Session::stats() const {
  const std::lock_guard lock(stats_mutex_);
  return stats_;
}

void Session::between_steps(const std::function<void()>& job) {
  if (!thread_ || thread_->stopped()) return job();
  thread_->run(EngineThread::When::kBetweenSteps, job);
}

void Session::record(const std::string& path) {
  if (!cache_) {
    throw InputError("trace " + path + ": the experts are resident, so that nothing is missed; " +
                     "open the session with experts = \"offload\" to record its routing");
  }
  between_steps([&] {
    if (trace_) throw InputError("trace " + path + ": a recording runs already; stop it first");
    const cache::CacheShape& c = cache_->shape();
    trace_ = std::make_unique<cache::TraceWriter>(
        path,
        cache::TraceHead{c.layers, c.experts, c.top_k, c.line_bytes, fingerprint(checkpoint_)});
    cache_->record(trace_.get());
  });
}

std::uint64_t Session::stop_recording() {
  std::unique_ptr<cache::TraceWriter> trace;
  between_steps([&] {
    if (!trace_) throw InputError("no routing is being recorded");
    cache_->record(nullptr);
    trace = std::move(trace_);
  });
  trace->flush();
  if (!trace->error().empty()) throw InputError(trace->error());
  return trace->records();
}

void Session::open_device() {
  if (options_.threads < 0 || options_.threads > 1024) {
    throw InputError("threads = " + std::to_string(options_.threads) +
                     ": must be 0 (one a core) to 1024");
  }
  if (options_.device == "auto") {
    const std::string refusal = cuda_refusal(0, options_.capabilities);
    if (refusal.empty()) return open_cuda(0);
    notes_.push_back("device auto: using the host device, since " + refusal);
    return open_host();
  }
  if (options_.device == "host") return open_host();
  const int ordinal = cuda_ordinal(options_.device);
  if (ordinal < 0) {
    throw InputError("device = \"" + options_.device + "\": choose auto, host, cuda or cuda:N");
  }
  const std::string refusal = cuda_refusal(ordinal, options_.capabilities);
  if (!refusal.empty()) throw InputError("device = \"" + options_.device + "\": " + refusal);
  open_cuda(ordinal);
}

void Session::open_cuda(int ordinal) {
  CudaDeviceOptions cuda;
  if (options_.memory_limit > 0) cuda.memory_budget = options_.memory_limit;
  device_ = make_cuda_device(ordinal, cuda);
  device_name_ = "cuda:" + std::to_string(ordinal);
}

void Session::open_host() {
  HostDeviceOptions host;
  host.threads = options_.threads;
  host.seed = options_.seed;
  host.isa = exl3::isa_named(options_.isa);
  if (options_.memory_limit > 0) host.memory_limit = options_.memory_limit;
  device_ = make_host_device(host);
  device_name_ = "host";
}

}  // namespace flashnext
