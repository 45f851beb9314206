// Cases of experts in host memory: resolve, fetch, cpu_post, cpu_join, pace.
#include "cpp/gate/cases_offload.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <numeric>
#include <thread>

namespace flashnext::gate {

namespace {

constexpr std::int32_t kSteps = 5;

template <class T>
T* step_part(const Placed& p, std::size_t buffer, std::int32_t step, std::int64_t part) {
  return p.at<T>(buffer) + step * part;
}

void copy(const Placed& p, void* to, const void* from, std::size_t bytes) {
  p.device->copy_async(p.stream, to, from, bytes);
}

// The tables of a layer, full but for gaps. Few values of order, stamp and seen, so that many tie.
struct Tables {
  std::vector<std::int32_t> line_of, expert_of, stamp, seen, order, cpu_of, reachable;
  std::vector<std::int32_t> held, absent;  // experts

  Tables(const ResolveShape& s, Random& random)
      : line_of(z(s.experts), -1), expert_of(z(s.lines), kFreeLine), stamp(z(s.lines), 0) {
    std::vector<std::int32_t> ids(z(s.experts));
    std::iota(ids.begin(), ids.end(), 0);
    for (std::int32_t i = s.experts - 1; i > 0; --i) {
      std::swap(ids[z(i)], ids[z(random.below(i + 1))]);
    }
    for (std::int32_t line = 0; line < s.lines; ++line) {
      const std::int32_t gap = s.gaps ? random.below(8) : 7;
      stamp[z(line)] = random.below(6);
      if (gap < 2) expert_of[z(line)] = gap == 0 ? kFreeLine : kFillingLine;
      if (gap < 2 || held.size() == ids.size()) continue;
      const std::int32_t expert = ids[held.size()];
      held.push_back(expert);
      expert_of[z(line)] = expert;
      line_of[z(expert)] = line;
    }
    absent.assign(ids.begin() + static_cast<std::ptrdiff_t>(held.size()), ids.end());
    for (std::int32_t e = 0; e < s.experts; ++e) {
      seen.push_back(random.below(6));
      order.push_back(random.below(3) == 0 ? random.below(20) : kUnordered);
      reachable.push_back(e % 3 == 1 ? 0 : 1);
    }
    for (std::int32_t misses = 0; misses <= s.max_rows * s.slots; ++misses) {
      cpu_of.push_back(random.below(misses + 2));
    }
  }

  // Rows of distinct experts as far as there are enough; rows may share some.
  std::vector<std::int32_t> ask(const ResolveShape& s, Random& random) const {
    std::vector<std::int32_t> from = held;
    if (s.ask == Ask::kAbsent) from = absent;
    if (s.ask == Ask::kAny) from.insert(from.end(), absent.begin(), absent.end());
    const auto n = static_cast<std::int32_t>(from.size());
    std::vector<std::int32_t> ids;
    for (std::int32_t row = 0; row < s.max_rows; ++row) {
      for (std::int32_t slot = 0; slot < s.slots; ++slot) {
        std::swap(from[z(slot % n)], from[z(slot % n + random.below(n - slot % n))]);
        const bool shared = row > 0 && random.below(4) == 0;
        ids.push_back(shared ? ids[z((row - 1) * s.slots + slot)] : from[z(slot % n)]);
      }
    }
    return ids;
  }
};

std::string describe(const ResolveShape& s) {
  const char* asks[] = {" held", " absent", ""};
  return "resolve " + std::to_string(s.lines) + " of " + std::to_string(s.experts) +
         asks[static_cast<int>(s.ask)] + (s.rule == 0 ? " staged" : "") + (s.gaps ? " gaps" : "") +
         (s.cpu ? " processor" : "") + (s.unreachable ? " unreachable" : "");
}

// Plays the processor: y[pair] = (expert + 1) * x[row] in fp32.
class Processor {
 public:
  Processor(const MailView& mail, std::int32_t slots, std::int32_t dim)
      : mail_(mail), slots_(slots), dim_(dim), thread_([this] { run(); }) {}
  ~Processor() {
    stop_ = true;
    thread_.join();
  }

 private:
  void run() {
    const std::atomic_ref<std::uint32_t> posted(mail_.head->posted);
    const std::atomic_ref<std::uint32_t> done(mail_.head->done);
    for (std::uint32_t seen = 0; !stop_;) {
      const std::uint32_t sequence = posted.load(std::memory_order_acquire);
      if (sequence == seen) {
        std::this_thread::sleep_for(std::chrono::microseconds(10));
        continue;
      }
      for (std::int32_t i = 0; i < mail_.head->num_jobs; ++i) {
        const MailJob& job = mail_.jobs[i];
        const float* x = mail_.x + std::int64_t{job.pair / slots_} * dim_;
        float* y = mail_.y + std::int64_t{job.pair} * dim_;
        for (std::int32_t c = 0; c < dim_; ++c) y[c] = static_cast<float>(job.expert + 1) * x[c];
      }
      done.store(sequence, std::memory_order_release);
      seen = sequence;
    }
  }

  MailView mail_;
  std::int32_t slots_, dim_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

constexpr std::size_t rounded(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

struct MailShape {
  std::int32_t rows, slots, dim;
  std::size_t pairs() const { return z(rows) * z(slots); }
  std::size_t jobs_at() const { return rounded(sizeof(MailboxHead)); }
  std::size_t x_at() const { return jobs_at() + rounded(pairs() * sizeof(MailJob)); }
  std::size_t y_at() const { return x_at() + rounded(z(rows) * z(dim) * 4); }
  std::size_t bytes() const { return y_at() + rounded(pairs() * z(dim) * 4); }
  MailView on(std::byte* memory) const {
    return {reinterpret_cast<MailboxHead*>(memory), reinterpret_cast<MailJob*>(memory + jobs_at()),
            reinterpret_cast<float*>(memory + x_at()), reinterpret_cast<float*>(memory + y_at())};
  }
};

// The mailbox in pinned memory, zeroed, made by the first launch of a run.
MailView mailbox(const Placed& p, const MailShape& s, bool answered) {
  if (p.workspaces->empty()) {
    p.workspaces->emplace_back(*p.device, Space::kPinned, s.bytes(), "mailbox");
    auto* memory = p.workspaces->back().as<std::byte>();
    std::memset(memory, 0, s.bytes());
    if (answered) {
      p.companions->push_back(std::make_shared<Processor>(s.on(memory), s.slots, s.dim));
    }
  }
  return s.on(p.workspaces->back().as<std::byte>());
}

// Experts for the processor: of the distinct ones in order some, none, all, or one.
std::vector<std::int32_t> share_of(const std::vector<std::int32_t>& ids, std::int32_t step) {
  std::vector<std::int32_t> distinct, share;
  for (const std::int32_t id : ids) {
    if (std::find(distinct.begin(), distinct.end(), id) == distinct.end()) distinct.push_back(id);
  }
  for (std::size_t i = 0; i < distinct.size(); ++i) {
    const bool takes[] = {i % 2 == 0, false, true, i + 1 == distinct.size()};
    if (takes[step % 4]) share.push_back(distinct[i]);
  }
  return share;
}

Case posting_case(Op op, const MailShape& s, bool answered) {
  Random random(31);
  Case c;
  c.op = op;
  c.name = std::string(answered ? "mail" : "stalled mail") + " dim " + std::to_string(s.dim);
  c.rows = s.rows;
  std::vector<std::int32_t> ids, cpu, num_cpu;
  for (std::int32_t step = 0; step < kSteps; ++step) {
    std::vector<std::int32_t> asked(s.pairs());
    for (std::int32_t& id : asked) id = random.below(3 * s.slots);
    std::vector<std::int32_t> share = share_of(asked, answered ? step : 2);
    num_cpu.push_back(static_cast<std::int32_t>(share.size()));
    share.resize(s.pairs(), -1);
    ids.insert(ids.end(), asked.begin(), asked.end());
    cpu.insert(cpu.end(), share.begin(), share.end());
  }
  const StepHead head{s.rows, 0, 0, 0};
  const auto head_at = c.add("head", std::vector<StepHead>{head});
  const auto x = c.add("x", random.floats(z(kSteps) * z(s.rows) * z(s.dim)));
  const auto ids_at = c.add("ids", ids);
  const auto cpu_at = c.add("cpu", cpu);
  const auto num_cpu_at = c.add("num_cpu", num_cpu);
  const auto counters = c.add("counters", std::vector<CacheCounters>(1));
  const std::size_t steps = z(kSteps);
  const auto sequence = c.add_output("sequence", std::vector<MailSequence>(1), 0, 0);
  const auto heads =
      c.add_output("mailbox", std::vector<std::byte>(steps * sizeof(MailboxHead)), 0, 0);
  const auto jobs =
      c.add_output("jobs", std::vector<std::byte>(steps * s.pairs() * sizeof(MailJob)), 0, 0);
  // Without an answer y is undefined.
  const std::vector<float> no_y(answered ? steps * s.pairs() * z(s.dim) : s.pairs() * z(s.dim));
  const auto y = answered ? c.add_output("y", no_y, 0, 0) : c.add("y", no_y);
  c.launch = [=](const Placed& p) {
    const MailView mail = mailbox(p, s, answered);
    if (p.prepare_only) return;
    const auto pairs = static_cast<std::int64_t>(s.pairs());
    for (std::int32_t step = 0; step < kSteps; ++step) {
      CpuPostArgs post{};
      post.rows = {&p.at<StepHead>(head_at)->rows, 1, s.rows};
      post.x = step_part<float>(p, x, step, std::int64_t{s.rows} * s.dim);
      post.ids = step_part<std::int32_t>(p, ids_at, step, pairs);
      post.cpu = step_part<std::int32_t>(p, cpu_at, step, pairs);
      post.num_cpu = step_part<std::int32_t>(p, num_cpu_at, step, 1);
      post.sequence = p.at<MailSequence>(sequence);
      post.mail = mail;
      post.layer = 7 + step;
      post.slots = s.slots;
      post.dim = s.dim;
      enqueue(p, post);
      CpuJoinArgs join{};
      join.num_cpu = post.num_cpu;
      join.sequence = post.sequence;
      join.mail = mail;
      join.y = step_part<float>(p, y, answered ? step : 0, pairs * s.dim);
      join.counters = p.at<CacheCounters>(counters);
      join.deadline_ns = answered ? 20'000'000'000 : 3'000'000;
      join.layer = post.layer;
      join.dim = s.dim;
      enqueue(p, join);
      copy(p, step_part<MailboxHead>(p, heads, step, 1), mail.head, sizeof(MailboxHead));
      copy(p, step_part<MailJob>(p, jobs, step, pairs), mail.jobs, s.pairs() * sizeof(MailJob));
    }
  };
  return c;
}

}  // namespace

Case resolve_case(const ResolveShape& s) {
  Random random(29);
  const Tables t(s, random);
  const std::size_t steps = z(kSteps);
  const std::size_t pairs = z(s.max_rows) * z(s.slots);
  std::vector<StepHead> heads;
  std::vector<std::int32_t> ids;
  for (std::int32_t step = 0; step < kSteps; ++step) {
    heads.push_back({s.rows, 0, 0, 6 + step});
    const std::vector<std::int32_t> asked = t.ask(s, random);
    ids.insert(ids.end(), asked.begin(), asked.end());
  }
  Case c;
  c.op = Op::kResolve;
  c.name = describe(s);
  c.rows = s.rows;
  const auto heads_at = c.add("heads", heads);
  const auto ids_at = c.add("ids", ids);
  const auto order = c.add("order", t.order);
  const auto rule = c.add("rule", std::vector<std::int32_t>{s.rule});
  const auto cpu_of = c.add("cpu_of", t.cpu_of);
  const auto reachable = c.add("reachable", t.reachable);
  const auto counters = c.add("counters", std::vector<CacheCounters>(steps));
  const auto line_of = c.add_output("line_of", t.line_of, 0, 0);
  const auto expert_of = c.add_output("expert_of", t.expert_of, 0, 0);
  const auto stamp = c.add_output("stamp", t.stamp, 0, 0);
  const auto seen = c.add_output("seen", t.seen, 0, 0);
  const auto experts = c.add_output("experts", std::vector<ExpertRef>(z(s.experts)), 0, 0);
  const auto group = c.add_output("group", std::vector<std::int32_t>(z(s.experts), -1), 0, 0);
  const auto fetches = c.add_output("fetches", std::vector<Fetch>(steps * pairs), 0, 0);
  const auto num_fetches = c.add_output("num_fetches", std::vector<std::int32_t>(steps), 0, 0);
  const auto cpu = c.add_output("cpu", std::vector<std::int32_t>(steps * pairs), 0, 0);
  const auto num_cpu = c.add_output("num_cpu", std::vector<std::int32_t>(steps), 0, 0);
  const auto counts = c.add_output("counts", std::vector<std::int32_t>(steps * 4), 0, 0);
  c.launch = [=](const Placed& p) {
    if (p.prepare_only) return;
    for (std::int32_t step = 0; step < kSteps; ++step) {
      const auto part = static_cast<std::int64_t>(pairs);
      ResolveArgs a{};
      a.head = step_part<StepHead>(p, heads_at, step, 1);
      a.rows = {&a.head->rows, 1, s.max_rows};
      a.ids = step_part<std::int32_t>(p, ids_at, step, part);
      a.tables = {p.at<std::int32_t>(line_of),
                  p.at<std::int32_t>(expert_of),
                  p.at<std::int32_t>(stamp),
                  p.at<std::int32_t>(seen),
                  p.at<std::int32_t>(order),
                  p.at<std::int32_t>(rule),
                  s.cpu ? p.at<std::int32_t>(cpu_of) : nullptr,
                  s.unreachable ? p.at<std::int32_t>(reachable) : nullptr,
                  s.experts,
                  s.lines};
      a.layout = {{0, 512, 1024}, {1536, 1792, 2048}, {2304, 2560, 2816}, 3072};
      // Addresses are computed, not followed, and the same on every device.
      a.pool = reinterpret_cast<std::byte*>(std::uintptr_t{1} << 40);
      a.staging = reinterpret_cast<std::byte*>(std::uintptr_t{3} << 40);
      a.experts = p.at<ExpertRef>(experts);
      a.group = p.at<std::int32_t>(group);
      a.fetches = step_part<Fetch>(p, fetches, step, part);
      a.num_fetches = step_part<std::int32_t>(p, num_fetches, step, 1);
      a.cpu = step_part<std::int32_t>(p, cpu, step, part);
      a.num_cpu = step_part<std::int32_t>(p, num_cpu, step, 1);
      a.counters = step_part<CacheCounters>(p, counters, step, 1);
      a.slots = s.slots;
      enqueue(p, a);
      // The rest of the counters are times.
      copy(p, step_part<std::int32_t>(p, counts, step, 4), a.counters, 16);
    }
  };
  return c;
}

Case fetch_case(std::int32_t count, std::int64_t line_bytes) {
  constexpr std::int32_t kExperts = 3;
  const std::int32_t max_fetches = 2 * count + 2;
  Random random(30);
  const std::vector<std::byte> bank = random.bytes(z(kExperts * line_bytes));
  Case c;
  c.op = Op::kFetch;
  c.name = "fetch " + std::to_string(count) + " lines of " + std::to_string(line_bytes);
  c.rows = 1;
  // In reverse order, a line apart from what stays as it is.
  const auto lines =
      c.add_output("lines", std::vector<std::byte>(z(count + 1) * z(line_bytes)), 0, 0);
  std::vector<std::int32_t> experts;
  for (std::int32_t i = 0; i < count; ++i) experts.push_back(random.below(kExperts));
  const auto fetches = c.add("fetches", std::vector<Fetch>(z(max_fetches)));
  c.buffers[fetches].link = [=](const std::vector<void*>& before, std::vector<std::byte>& data) {
    for (std::int32_t i = 0; i < count; ++i) {
      const Fetch f{static_cast<std::byte*>(before[lines]) + (count - i) * line_bytes,
                    experts[z(i)], 0};
      std::memcpy(data.data() + z(i) * sizeof f, &f, sizeof f);
    }
  };
  const auto count_at = c.add("count", std::vector<std::int32_t>{count});
  const auto counters = c.add("counters", std::vector<CacheCounters>(1));
  c.launch = [=](const Placed& p) {
    if (p.workspaces->empty()) {
      p.workspaces->emplace_back(*p.device, Space::kPinned, bank.size(), "bank");
      std::memcpy(p.workspaces->back().data(), bank.data(), bank.size());
    }
    FetchArgs a{};
    a.fetches = p.at<Fetch>(fetches);
    a.count = p.at<std::int32_t>(count_at);
    a.bank = p.workspaces->back().as<std::byte>();
    a.counters = p.at<CacheCounters>(counters);
    a.line_bytes = line_bytes;
    a.max_fetches = max_fetches;
    enqueue(p, a);
  };
  return c;
}

Case mail_case(Op op, std::int32_t rows, std::int32_t slots, std::int32_t dim) {
  return posting_case(op, {rows, slots, dim}, true);
}

Case stall_case(std::int32_t rows, std::int32_t slots, std::int32_t dim) {
  return posting_case(Op::kCpuJoin, {rows, slots, dim}, false);
}

Case pace_case() {
  Case c;
  c.op = Op::kPace;
  c.name = "pace";
  c.rows = 1;
  const auto clock = c.add("clock", std::vector<std::int64_t>{11, 12, 13});
  const auto beside = c.add_output("beside", std::vector<std::int64_t>(2), 0, 0);
  c.launch = [=](const Placed& p) {
    if (p.prepare_only) return;
    enqueue(p, PaceArgs{p.at<std::int64_t>(clock) + 1, 0});
    enqueue(p, PaceArgs{p.at<std::int64_t>(clock) + 1, 1'000'000});
    copy(p, p.at<std::int64_t>(beside), p.at<std::int64_t>(clock), 8);
    copy(p, p.at<std::int64_t>(beside) + 1, p.at<std::int64_t>(clock) + 2, 8);
  };
  return c;
}

}  // namespace flashnext::gate
