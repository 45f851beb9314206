// Cases of guessed experts: guess, and fetch from what was copied ahead.
#include "cpp/gate/cases_offload.h"

#include <algorithm>
#include <cstddef>
#include <numeric>

namespace flashnext::gate {

namespace {

// Counters but for the last, which is a time.
constexpr std::size_t kCountBytes = offsetof(CacheCounters, resolved_at);
constexpr std::size_t kNumberBytes = offsetof(CacheCounters, fetch_ns);

std::vector<std::int32_t> shuffled(std::int32_t n, Random& random) {
  std::vector<std::int32_t> v(z(n));
  std::iota(v.begin(), v.end(), 0);
  for (std::int32_t i = n - 1; i > 0; --i) std::swap(v[z(i)], v[z(random.below(i + 1))]);
  return v;
}

}  // namespace

Case guess_case(const GuessShape& s) {
  Random random(37);
  const std::size_t steps = z(kGuessSteps);
  const std::int64_t pairs = std::int64_t{s.max_rows} * s.slots;
  std::vector<std::int32_t> ids, line_of, reachable;
  // A row's ids are distinct where there are enough.
  for (std::int32_t row = 0; row < kGuessSteps * s.max_rows; ++row) {
    const std::vector<std::int32_t> order = shuffled(s.experts, random);
    for (std::int32_t slot = 0; slot < s.slots; ++slot) {
      ids.push_back(order[z(slot % s.experts)]);
    }
  }
  for (std::int32_t e = 0; e < s.experts; ++e) {
    line_of.push_back(random.below(100) < s.held ? random.below(3) : -1);
    reachable.push_back(e % 3 == 1 ? 0 : 1);
  }
  CacheCounters old;
  std::memset(&old, 0xFF, sizeof old);
  Case c;
  c.op = Op::kGuess;
  c.name = "guess " + std::to_string(s.slots) + " of " + std::to_string(s.experts) + ", " +
           std::to_string(s.held) + "% held" + (s.unreachable ? " unreachable" : "");
  c.rows = s.rows;
  const auto head = c.add("head", std::vector<StepHead>{{s.rows, 0, 0, 0}});
  const auto ids_at = c.add("ids", ids);
  const auto line_of_at = c.add("line_of", line_of);
  const auto reachable_at = c.add("reachable", reachable);
  const auto most =
      c.add("most", std::vector<std::int32_t>{kMaxGuesses, 0, 1, 3, kMaxGuesses - 1, kMaxGuesses});
  const auto counters = c.add("counters", std::vector<CacheCounters>(steps, old));
  const auto fetches =
      c.add_output("fetches", std::vector<Fetch>(steps * kMaxGuesses, {nullptr, -9, 0}), 0, 0);
  const auto num_fetches = c.add_output("num_fetches", std::vector<std::int32_t>(steps), 0, 0);
  const auto counts = c.add_output("counts", std::vector<std::byte>(steps * kCountBytes), 0, 0);
  c.launch = [=](const Placed& p) {
    if (p.prepare_only) return;
    for (std::int32_t step = 0; step < kGuessSteps; ++step) {
      GuessArgs a{};
      a.rows = {&p.at<StepHead>(head)->rows, 1, s.max_rows};
      a.ids = p.at<std::int32_t>(ids_at) + step * pairs;
      a.line_of = p.at<std::int32_t>(line_of_at);
      a.reachable = s.unreachable ? p.at<std::int32_t>(reachable_at) : nullptr;
      a.most = p.at<std::int32_t>(most) + step;
      // Addresses are computed, not followed, and the same on every device.
      a.lines = reinterpret_cast<std::byte*>(std::uintptr_t{5} << 40);
      a.fetches = p.at<Fetch>(fetches) + step * kMaxGuesses;
      a.num_fetches = p.at<std::int32_t>(num_fetches) + step;
      a.counters = p.at<CacheCounters>(counters) + step;
      a.line_bytes = 1862400;
      a.experts = s.experts;
      a.slots = s.slots;
      enqueue(p, a);
      p.device->copy_async(p.stream, p.at<std::byte>(counts) + z(step) * kCountBytes, a.counters,
                           kCountBytes);
    }
  };
  return c;
}

Case fetch_ahead_case(std::int32_t count, std::int32_t ahead, std::int32_t found,
                      std::int64_t line_bytes) {
  Random random(38);
  const std::int32_t experts = count + ahead - found;
  const std::vector<std::byte> bank = random.bytes(z(experts) * z(line_bytes));
  // The first `count` are fetched; `found` of them were guessed, and all others.
  const std::vector<std::int32_t> ids = shuffled(experts, random);
  std::vector<std::int32_t> guessed(ids.begin() + (count - found), ids.end());
  std::vector<std::int32_t> wanted(ids.begin(), ids.begin() + count);
  for (std::vector<std::int32_t>* list : {&guessed, &wanted}) {
    const std::vector<std::int32_t> old = *list;
    const auto order = shuffled(static_cast<std::int32_t>(old.size()), random);
    for (std::size_t i = 0; i < old.size(); ++i) (*list)[i] = old[z(order[i])];
  }
  Case c;
  c.op = Op::kFetch;
  c.name = "fetch " + std::to_string(count) + " lines of " + std::to_string(line_bytes) + ", " +
           std::to_string(found) + " of " + std::to_string(ahead) + " ahead";
  c.rows = 1;
  const auto lines =
      c.add_output("lines", std::vector<std::byte>(z(count + 1) * z(line_bytes)), 0, 0);
  const auto there = c.add_output("there", random.bytes(z(ahead) * z(line_bytes)), 0, 0);
  const auto add_list = [&](const char* name, std::size_t in, std::size_t room,
                            const std::vector<std::int32_t>& list, bool reversed) {
    const auto at = c.add(name, std::vector<Fetch>(room, {nullptr, -9, 0}));
    c.buffers[at].link = [=](const std::vector<void*>& before, std::vector<std::byte>& data) {
      for (std::size_t i = 0; i < list.size(); ++i) {
        const std::size_t line = reversed ? list.size() - i : i;
        const Fetch f{static_cast<std::byte*>(before[in]) + line * z(line_bytes), list[i], 0};
        std::memcpy(data.data() + i * sizeof f, &f, sizeof f);
      }
    };
    return at;
  };
  // Those that are fetched in reverse order, behind a line that stays as it is.
  const auto fetches = add_list("fetches", lines, z(count) + 2, wanted, true);
  const auto list_ahead = add_list("ahead", there, kMaxGuesses, guessed, false);
  const auto numbers = c.add("numbers", std::vector<std::int32_t>{count, ahead});
  CacheCounters old{};
  old.guessed = old.guessed_in = 77;
  const auto counters = c.add("counters", std::vector<CacheCounters>{old, CacheCounters{}});
  const auto counts = c.add_output("counts", std::vector<std::byte>(kNumberBytes), 0, 0);
  c.launch = [=](const Placed& p) {
    if (p.workspaces->empty()) {
      p.workspaces->emplace_back(*p.device, Space::kPinned, std::max<std::size_t>(bank.size(), 256),
                                 "bank");
      if (!bank.empty()) std::memcpy(p.workspaces->back().data(), bank.data(), bank.size());
    }
    if (p.prepare_only) return;
    FetchArgs a{};
    a.fetches = p.at<Fetch>(fetches);
    a.count = p.at<std::int32_t>(numbers);
    a.bank = p.workspaces->back().as<std::byte>();
    a.counters = p.at<CacheCounters>(counters);
    a.line_bytes = line_bytes;
    a.max_fetches = count + 2;
    a.ahead = p.at<Fetch>(list_ahead);
    a.num_ahead = a.count + 1;
    a.ahead_counters = a.counters + 1;
    enqueue(p, a);
    p.device->copy_async(p.stream, p.at<std::byte>(counts), a.counters, kNumberBytes);
  };
  return c;
}

}  // namespace flashnext::gate
