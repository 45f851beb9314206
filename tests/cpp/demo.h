// The demo checkpoint and sessions on it, for tests of the whole engine.
#pragma once

#include "cpp/session/session.h"

#include <memory>
#include <string>
#include <vector>

namespace flashnext::test {

inline std::string demo_path() {
  return std::string(FN_SOURCE_DIR) + "/python/flashnext/demo/tiny-3.05bpw-h5-ng5";
}

inline SessionOptions demo_options() {
  SessionOptions o;
  o.device = "host";
  o.window = 2048;
  o.threads = 2;
  return o;
}

inline std::unique_ptr<Session> open_demo(const SessionOptions& options = demo_options()) {
  return Session::open(demo_path(), options);
}

// The engine of a session that answers no requests any more, for a test that drives it itself.
inline Engine& engine_of(Session& session) {
  session.thread().stop();
  return session.engine();
}

// The same for a session that goes on afterwards.
template <class Job>
void with_engine(Session& session, Job&& job) {
  session.thread().run(EngineThread::When::kAlone, [&] { job(session.engine()); });
}

// Ids that look like a text to the engine: every expert and both kinds of context occur; a
// separator now and then.
inline std::vector<std::int32_t> sample_ids(std::size_t n, std::uint32_t seed,
                                            std::int32_t separator = 1493) {
  std::vector<std::int32_t> ids;
  std::uint32_t state = seed * 2654435761u + 12345u;
  for (std::size_t i = 0; i < n; ++i) {
    state = state * 1664525u + 1013904223u;
    ids.push_back(i % 37 == 19 ? separator : static_cast<std::int32_t>((state >> 8) % 1490u));
  }
  return ids;
}

}  // namespace flashnext::test
