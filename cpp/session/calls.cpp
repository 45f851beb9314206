// What a session is asked: each call is a submission and a loop over its updates, or a job of the
// engine's thread.
#include "cpp/session/session.h"

#include <algorithm>
#include <exception>

namespace flashnext {

namespace {

constexpr auto kPollEvery = std::chrono::milliseconds(5);

}  // namespace

void Session::check_cache() {
  if (cache_) between_steps([&] { engine_->check_cache(); });
}

std::vector<Completion> Session::generate(std::span<const Request> requests,
                                          const GenerateHooks& hooks) {
  const auto submission = submit({requests.begin(), requests.end()});
  struct Cut {
    std::size_t tokens = 0;  // told to the hook
    bool ended = false;      // by the hook
    std::string reason;      // what it threw
  };
  std::vector<Cut> cuts(requests.size());
  std::exception_ptr abandoned;
  const auto tell = [&](const Update& u) {
    Cut& cut = cuts[u.request];
    if (cut.ended || abandoned) return;
    try {
      if (u.kind == Update::Kind::kPrefill) {
        if (hooks.on_prefill) hooks.on_prefill(u.request, u.done, u.total);
      } else if (u.kind == Update::Kind::kToken) {
        ++cut.tokens;
        cut.ended = hooks.on_token && hooks.on_token(u.request, u.token);
      }
    } catch (const std::exception& e) {
      cut.ended = true;
      cut.reason = e.what();
    }
    if (cut.ended) thread_->cancel(submission, u.request);
  };
  while (!submission->ended()) {
    try {
      if (hooks.poll && !abandoned) hooks.poll();
    } catch (...) {
      abandoned = std::current_exception();
      thread_->cancel(submission);
    }
    for (const Update& u : submission->wait(kPollEvery)) tell(u);
  }
  for (const Update& u : submission->wait({})) tell(u);
  if (abandoned) std::rethrow_exception(abandoned);
  std::vector<Completion> done;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    done.push_back(submission->completion(i));
    const Cut& cut = cuts[i];
    if (!cut.ended) continue;
    done[i].tokens.resize(cut.tokens);
    done[i].finish = cut.reason.empty() ? Finish::kCancelled : Finish::kFailed;
    done[i].reason = cut.reason;
  }
  return done;
}

std::vector<float> Session::every_logit(std::span<const std::int32_t> ids, std::int32_t chunk,
                                        bool scores) {
  Request r;
  r.prompt.assign(ids.begin(), ids.end());
  r.every_logit = true;
  r.chunk = chunk;
  const auto submission = thread_->submit({std::move(r)}, scores);
  while (!submission->ended()) submission->wait(std::chrono::seconds(1));
  if (submission->completion(0).finish == Finish::kCancelled) {
    throw InputError("the computation of logits was cancelled");
  }
  return submission->take_logits(0);
}

std::vector<float> Session::logits(std::span<const std::int32_t> ids, std::int32_t chunk) {
  return every_logit(ids, chunk, false);
}

std::vector<float> Session::score(std::span<const std::int32_t> ids) {
  return every_logit(ids, 0, true);
}

// Steps over the whole sequence in a lane of its own, while nothing else runs. `next`: the position
// after the step's last row.
void Session::walk(std::span<const std::int32_t> ids,
                   const std::function<void(std::int32_t lane, std::int32_t next)>& visit) {
  Request checked;
  checked.prompt.assign(ids.begin(), ids.end());
  checked.every_logit = true;
  scheduler_->validate(checked);
  thread_->run(EngineThread::When::kAlone, [&] {
    const std::optional<LaneLease> lease = engine_->borrow();
    check(lease.has_value(), "no lane is free while nothing runs");
    const auto most =
        static_cast<std::size_t>(std::min(engine_->max_outputs(), engine_->options().chunk));
    for (std::size_t at = 0; at < ids.size();) {
      const std::size_t n = std::min(ids.size() - at, most);
      scheduler_->reserve(lease->lane(), static_cast<std::int32_t>(n));
      const LaneRows rows{lease->lane(), ids.subspan(at, n), LaneRows::Logits::kLast, {}};
      engine_->step({&rows, 1}, false);
      at += n;
      visit(lease->lane(), static_cast<std::int32_t>(at));
    }
  });
}

std::vector<float> Session::mtp_logits(std::span<const std::int32_t> ids) {
  if (!engine_->has_mtp()) {
    throw InputError("mtp_logits() needs a session opened with mtp = true");
  }
  std::vector<float> all;
  walk(ids, [&](std::int32_t lane, std::int32_t next) {
    const auto i = static_cast<std::size_t>(next);
    const std::vector<float> part = engine_->mtp_step(lane, i < ids.size() ? ids[i] : -1);
    all.insert(all.end(), part.begin(), part.end());
  });
  return all;
}

std::vector<float> Session::streams(std::span<const std::int32_t> ids) {
  if (!options_.taps) {
    throw InputError("streams() needs a session opened with taps = true");
  }
  std::vector<float> last;
  walk(ids, [&](std::int32_t, std::int32_t) { last = engine_->taps(); });
  return last;
}

}  // namespace flashnext
