// One reference answer, and sessions opened at random: threads, instruction set, order of the host
// device's work, chunk, lanes, KV pages, draft head, snapshots, graphs, lines, policy, the CPU's
// share.
#pragma once

#include "tests/cpp/offload_cases.h"
#include "tests/cpp/request_cases.h"

#include <cstdlib>
#include <sstream>

namespace flashnext::test {

inline SessionOptions random_options(const SessionOptions& base, const ModelShape& shape,
                                     Dice& dice, const std::vector<std::string>& isas,
                                     std::string& name) {
  SessionOptions o = base;
  o.threads = dice.from(1, 3);
  o.seed = static_cast<std::uint64_t>(dice.below(1 << 20));
  o.isa = isas[static_cast<std::size_t>(dice.below(static_cast<std::int32_t>(isas.size())))];
  const std::int32_t chunks[] = {1, 2, 7, 31, 33, 64, 100, 512};
  o.chunk = chunks[dice.below(8)];
  o.lanes = dice.one_in(4) ? dice.from(9, 20) : dice.from(1, 8);
  o.mtp = dice.one_in(4);
  if (dice.one_in(2)) {  // fewer pages than the requests want at once
    o.window = 256;
    const auto pages = static_cast<std::uint64_t>(dice.from(pages_for(o.window) + 1, 12));
    o.kv_bytes = pages * page_bytes(shape, o.mtp);
  }
  o.snapshots = dice.one_in(3) ? 0 : dice.from(1, 6);
  o.graphs = !dice.one_in(4);
  o.token_wait = dice.one_in(3) ? 0.001 : 0.2;
  o.experts = dice.one_in(4) ? "resident" : "offload";
  if (o.experts == "offload") {
    o.cache_lines = dice.from(kDemoTopK, kDemoExperts);
    o.plan_every = dice.from(1, 20);
    const auto policies = cache::policy_names();
    const auto i =
        static_cast<std::size_t>(dice.below(static_cast<std::int32_t>(policies.size()) + 1));
    o.policy = i < policies.size()
                   ? std::shared_ptr<cache::Policy>(cache::make_policy(policies[i], o.seed))
                   : std::make_shared<WildPolicy>();
    o.cpu_misses = dice.one_in(2) ? "off" : std::to_string(dice.from(1, 20));
    o.cpu_threads = dice.from(1, 2);
  }
  std::ostringstream text;
  text << "threads " << o.threads << ", seed " << o.seed << ", isa " << o.isa << ", chunk "
       << o.chunk << ", lanes " << o.lanes << ", window " << o.window << ", kv " << o.kv_bytes
       << ", mtp " << o.mtp << ", snapshots " << o.snapshots << ", graphs " << o.graphs << ", wait "
       << o.token_wait << ", " << o.experts << " " << o.cache_lines << " lines, every "
       << o.plan_every << ", cpu " << o.cpu_misses;
  name = text.str();
  return o;
}

// `count` sessions; FN_CONFIGS=N takes another number of them.
inline void check_random_configs(const SessionOptions& base, const std::vector<std::string>& isas,
                                 int count) {
  if (const char* given = std::getenv("FN_CONFIGS")) count = std::max(1, std::atoi(given));
  Dice dice(2026);
  std::vector<Request> requests;
  for (int i = 0; i < 5; ++i) requests.push_back(random_request(dice, 160, 16));
  const std::vector<std::int32_t> ids = sample_ids(kTokens, 1);
  SessionOptions plain = base;
  plain.graphs = false;
  plain.snapshots = 0;
  const auto reference = open_demo(plain);
  const std::vector<float> logits = reference->logits(ids, 1);
  std::vector<std::vector<std::int32_t>> want;
  for (const Request& r : requests) want.push_back(alone(*reference, r).tokens);
  for (int i = 0; i < count; ++i) {
    std::string name;
    const SessionOptions o = random_options(base, reference->shape(), dice, isas, name);
    SCOPED_TRACE(name);
    const auto session = open_demo(o);
    // Answers beside the logits, and once more where prefixes are known.
    for (int again = 0; again < 2; ++again) {
      const auto run = session->submit(requests);
      if (again == 0) expect_same(session->logits(ids), logits, name);
      finish(*run);
      for (std::size_t r = 0; r < requests.size(); ++r) {
        ASSERT_EQ(run->completion(r).tokens, want[r]) << "request " << r;
      }
    }
    expect_tidy(*session);
    if (testing::Test::HasFailure()) return;
  }
}

}  // namespace flashnext::test
