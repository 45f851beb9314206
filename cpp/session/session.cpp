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

constexpr std::int32_t kProofRows = 64;  // of the prompt that proves that all fits

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

}  // namespace

Session::Session(Checkpoint checkpoint, SessionOptions options)
    : checkpoint_(std::move(checkpoint)), options_(std::move(options)) {}

Session::~Session() {
  if (!keep_profile_ || !cache_) return;
  const cache::CacheShape& c = cache_->shape();
  // What goes wrong here is lost: nobody is left to be told, and the old file is still whole.
  cache::save_profile(options_.profile, fingerprint(checkpoint_), c.layers, c.experts,
                      cache_->planner().total());
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
  o.window = resolve_window(s->shape(), o.window);
  s->open_device();
  const MemoryPlan plan = plan_memory(s->checkpoint_, o, *s->device_);
  s->weights_ =
      std::make_unique<Weights>(Weights::load(s->checkpoint_, *s->device_, plan.weights, progress));
  if (plan.offload) s->open_cache(plan, progress);
  s->engine_ = std::make_unique<Engine>(*s->device_, s->checkpoint_, *s->weights_, plan.engine,
                                        s->cache_.get());
  s->scheduler_ = std::make_unique<Scheduler>(*s->engine_);
  if (s->cache_) s->fill_cache(progress);
  s->device_->seal();
  return s;
}

// The experts in host memory, and the room for their lines on the device.
void Session::open_cache(const MemoryPlan& plan, const Progress& progress) {
  bank_ = std::make_unique<Bank>(Bank::fill(checkpoint_, *device_, {plan.bank_limit, 0}, progress));
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
    keep_profile_ = profile.note.empty();
  }
  cache_->fill(options_.policy, profile.uses, progress);
  const std::vector<std::int32_t> ids(
      static_cast<std::size_t>(std::min(engine_->options().chunk, kProofRows)), 0);
  check(engine_->reserve(0, static_cast<std::int32_t>(ids.size())), "no pages for a first prompt");
  const LaneRows rows{0, ids, LaneRows::Logits::kLast, {}};
  engine_->step({&rows, 1}, false);
  engine_->reset(0);
  share_ = std::make_unique<ShareReport>(choose_share(*engine_, options_));
  cache_->forget();
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

// Runs a call; the first DeviceError poisons the session.
template <class Call>
auto Session::guarded(Call&& call) {
  if (!failure_.empty()) {
    throw DeviceError(
        "the session failed before and cannot go on; open a new one. First failure: " + failure_);
  }
  try {
    return call();
  } catch (const DeviceError& e) {
    failure_ = e.what();
    throw;
  }
}

void Session::check_cache() {
  if (cache_) guarded([&] { engine_->check_cache(); });
}

std::vector<Completion> Session::generate(std::span<const Request> requests,
                                          const GenerateHooks& hooks) {
  return guarded([&] { return scheduler_->generate(requests, hooks); });
}

std::vector<float> Session::logits(std::span<const std::int32_t> ids, std::int32_t chunk) {
  return guarded([&] {
    std::vector<float> all;
    all.reserve(ids.size() * static_cast<std::size_t>(shape().vocab));
    scheduler_->every_logit(ids, chunk, [&](const std::vector<StepOutput>& rows) {
      for (const StepOutput& row : rows) {
        all.insert(all.end(), row.logits, row.logits + shape().vocab);
      }
    });
    return all;
  });
}

std::vector<float> Session::score(std::span<const std::int32_t> ids) {
  return guarded([&] {
    std::vector<float> scores;
    scheduler_->every_logit(ids, 0, [&](const std::vector<StepOutput>& rows) {
      for (const StepOutput& row : rows) {
        const auto next = static_cast<std::size_t>(row.pos) + 1;
        if (next >= ids.size()) continue;
        const float* logits = row.logits;
        const float top = *std::max_element(logits, logits + shape().vocab);
        double sum = 0;
        for (std::int32_t i = 0; i < shape().vocab; ++i) {
          sum += std::exp(static_cast<double>(logits[i]) - static_cast<double>(top));
        }
        scores.push_back(static_cast<float>(static_cast<double>(logits[ids[next]]) -
                                            static_cast<double>(top) - std::log(sum)));
      }
    });
    return scores;
  });
}

std::vector<float> Session::mtp_logits(std::span<const std::int32_t> ids) {
  if (!engine_->has_mtp()) {
    throw InputError(
        "this checkpoint has no MTP head; only checkpoints with mtp.* tensors have MTP logits");
  }
  return guarded([&] {
    std::vector<float> all;
    scheduler_->every_logit(ids, 0, [&](const std::vector<StepOutput>& rows) {
      const auto next = static_cast<std::size_t>(rows.back().pos) + 1;
      const std::vector<float> part = engine_->mtp_step(0, next < ids.size() ? ids[next] : -1);
      all.insert(all.end(), part.begin(), part.end());
    });
    return all;
  });
}

std::vector<float> Session::streams(std::span<const std::int32_t> ids) {
  if (!options_.taps) {
    throw InputError("streams() needs a session opened with taps = true");
  }
  return guarded([&] {
    std::vector<float> last;
    scheduler_->every_logit(ids, 0,
                            [&](const std::vector<StepOutput>&) { last = engine_->taps(); });
    return last;
  });
}

}  // namespace flashnext
