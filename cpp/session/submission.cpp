#include "cpp/session/submission.h"

#include "cpp/base/errors.h"

#include <algorithm>
#include <cmath>
#include <sys/eventfd.h>
#include <unistd.h>

namespace flashnext {

namespace {

// A row's log-probability of the id that follows it.
float score(const float* logits, std::size_t vocab, std::int32_t next) {
  const float top = *std::max_element(logits, logits + vocab);
  double sum = 0;
  for (std::size_t i = 0; i < vocab; ++i) {
    sum += std::exp(static_cast<double>(logits[i]) - static_cast<double>(top));
  }
  return static_cast<float>(static_cast<double>(logits[next]) - static_cast<double>(top) -
                            std::log(sum));
}

}  // namespace

Submission::Submission(std::size_t requests)
    : completions_(requests), logits_(requests), running_(requests) {}

Submission::~Submission() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

std::vector<Update> Submission::wait(std::chrono::nanoseconds timeout) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, timeout, [&] { return !updates_.empty() || running_ == 0; });
  std::vector<Update> taken;
  taken.swap(updates_);
  if (descriptor_ >= 0 && running_ > 0) {
    std::uint64_t count = 0;
    // Nothing to read is fine: there was no signal since.
    [[maybe_unused]] const ssize_t n = ::read(descriptor_, &count, sizeof count);
  }
  return taken;
}

bool Submission::ended() const {
  const std::lock_guard lock(mutex_);
  return running_ == 0;
}

bool Submission::ended(std::size_t request) const {
  const std::lock_guard lock(mutex_);
  return completions_.at(request).has_value();
}

Completion Submission::completion(std::size_t request) const {
  const std::lock_guard lock(mutex_);
  const std::optional<Completion>& c = completions_.at(request);
  check(c.has_value(), "the request has not ended");
  if (c->finish == Finish::kFailed && error_) std::rethrow_exception(error_);
  return *c;
}

std::vector<float> Submission::take_logits(std::size_t request) {
  const std::lock_guard lock(mutex_);
  return std::move(logits_.at(request).values);
}

int Submission::descriptor() {
  const std::lock_guard lock(mutex_);
  if (descriptor_ < 0) {
    const auto pending = static_cast<unsigned>(!updates_.empty() || running_ == 0);
    descriptor_ = ::eventfd(pending, EFD_CLOEXEC | EFD_NONBLOCK);
    if (descriptor_ < 0) {
      throw Error(
          "no event descriptor is to be had: too many files are open; raise the limit "
          "(ulimit -n) or wait for fewer requests at once");
    }
  }
  return descriptor_;
}

void Submission::expect_logits(std::size_t request, const std::vector<std::int32_t>& ids,
                               std::size_t vocab, bool scores) {
  Logits& l = logits_.at(request);
  l.scores = scores;
  l.vocab = vocab;
  l.ids = ids;
  const std::size_t floats = scores ? ids.size() - 1 : ids.size() * vocab;
  try {
    l.values.reserve(floats);
  } catch (const std::exception&) {  // bad_alloc, length_error
    throw OutOfMemory("host", floats * sizeof(float),
                      "the logits of " + std::to_string(ids.size()) + " tokens take " +
                          std::to_string(floats * sizeof(float)) +
                          " bytes of host memory, which are not to be had; ask for fewer tokens at "
                          "a time, or for their scores");
  }
}

// Called with the lock.
void Submission::signal() {
  changed_.notify_all();
  if (descriptor_ < 0) return;
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = ::write(descriptor_, &one, sizeof one);
}

void Submission::deliver(std::size_t request, const RequestEvent& event) {
  if (event.kind == RequestEvent::Kind::kLogits) {
    // Nobody reads them before the end, so that no lock is held meanwhile.
    Logits& to = logits_[request];
    for (const StepOutput& row : event.logits) {
      const auto next = static_cast<std::size_t>(row.pos) + 1;
      if (!to.scores) {
        to.values.insert(to.values.end(), row.logits, row.logits + to.vocab);
      } else if (next < to.ids.size()) {
        to.values.push_back(score(row.logits, to.vocab, to.ids[next]));
      }
    }
    return;
  }
  const std::lock_guard lock(mutex_);
  Update u;
  u.request = request;
  switch (event.kind) {
    case RequestEvent::Kind::kPrefill:
      u.kind = Update::Kind::kPrefill;
      u.done = event.done;
      u.total = event.total;
      break;
    case RequestEvent::Kind::kToken:
      u.kind = Update::Kind::kToken;
      u.token = event.token;
      break;
    case RequestEvent::Kind::kLogits:
    case RequestEvent::Kind::kEnd:
      completions_[request] = *event.completion;
      --running_;
      break;
  }
  updates_.push_back(u);
  signal();
}

void Submission::fail(std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  error_ = std::move(error);
  for (std::size_t i = 0; i < completions_.size(); ++i) {
    if (completions_[i]) continue;
    completions_[i].emplace();
    completions_[i]->finish = Finish::kFailed;
    updates_.push_back({i, Update::Kind::kEnd, -1, 0, 0});
    --running_;
  }
  signal();
}

}  // namespace flashnext
