// Cases of the integer path: EXL3 linears of every rate, and whole experts.
#include "cpp/base/half.h"
#include "cpp/gate/cases.h"

#include <algorithm>

namespace flashnext::gate {

namespace {

// Random bits are a valid trellis; scales as trained ones are, one in 64 zero like a padded
// channel.
std::vector<std::byte> trellis(Random& random, std::int32_t in, std::int32_t out,
                               std::int32_t words) {
  return random.bytes(z(in / 16) * z(out / 16) * z(words) * 2);
}

std::vector<std::uint16_t> scales(Random& random, std::int32_t n, float size) {
  std::vector<std::uint16_t> v(z(n));
  for (std::uint16_t& s : v) {
    float value = size * random.uniform(0.5f, 2.0f);
    if (random.below(2) == 0) value = -value;
    if (random.below(64) == 0) value = 0.0f;
    s = f32_to_f16(value);
  }
  return v;
}

}  // namespace

Case exl3_case(std::int32_t in, const std::vector<std::pair<std::int32_t, std::int32_t>>& out_words,
               std::int32_t rows, std::int32_t levels) {
  Random random(31);
  Case c;
  c.op = Op::kExl3Linear;
  c.rows = rows;
  c.name = "exl3_linear " + std::to_string(in) + " to";
  const auto x = c.add("x", random.floats(z(rows) * z(in)), z(in));
  struct Part {
    std::size_t trellis, suh, svh, bias, y;
    std::int32_t out, words;
  };
  std::vector<Part> parts;
  for (const auto& [out, words] : out_words) {
    c.name += " " + std::to_string(out) + " (K = " + std::to_string(words / 16) +
              (words % 16 == 8 ? ".5)" : ")");
    Part p{};
    p.out = out;
    p.words = words;
    p.trellis = c.add("trellis", trellis(random, in, out, words));
    p.suh = c.add("suh", scales(random, in, 0.02f));
    p.svh = c.add("svh", scales(random, out, 1.0f));
    p.bias = c.add("bias", random.floats(z(out)));
    p.y = c.out<float>("y", z(out));
    parts.push_back(p);
  }
  c.name += ", " + std::to_string(levels) + " levels";
  c.launch = [=](const Placed& p) {
    Exl3LinearArgs a{};
    a.rows = p.count();
    a.x = p.at<float>(x);
    a.n = static_cast<std::int32_t>(parts.size());
    a.levels = levels;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const Part& part = parts[i];
      a.w[i] = {p.at<std::byte>(part.trellis),
                p.at<std::byte>(part.suh),
                p.at<std::byte>(part.svh),
                i % 2 == 1 ? p.at<float>(part.bias) : nullptr,
                in,
                part.out,
                part.words,
                0};
      a.y[i] = p.at<float>(part.y);
    }
    enqueue(p, a);
  };
  return c;
}

Case experts_case(const ExpertsShape& s, std::int32_t rows, std::int32_t levels, bool picked) {
  Random random(32);
  Case c;
  c.op = Op::kExperts;
  c.rows = rows;
  c.name = "experts " + std::to_string(s.slots) + " of " + std::to_string(s.experts) + ", " +
           std::to_string(s.dim) + " by " + std::to_string(s.inner) + ", " +
           std::to_string(levels) + " levels";
  if (s.shared_inner > 0) c.name += ", shared by " + std::to_string(s.shared_inner);
  if (s.groups > 0) c.name += ", one of " + std::to_string(s.groups) + " groups";
  const auto x = c.add("x", random.floats(z(rows) * z(s.dim)), z(s.dim));
  std::vector<std::int32_t> ids(z(rows) * z(s.slots));
  for (std::int32_t& id : ids) id = random.below(s.experts);
  const auto ids_at = c.add("ids", ids, z(s.slots));
  constexpr std::int32_t kOnly = 7;  // the group's name; others are next to it
  std::vector<std::int32_t> group(z(s.experts), kOnly);
  std::int32_t max_pairs = 0;
  if (s.groups > 0) {
    for (std::int32_t& g : group) g = kOnly + random.below(s.groups);
    for (std::int32_t id : ids) max_pairs += group[z(id)] == kOnly ? 1 : 0;
  }
  const auto group_at = c.add("group", group);
  // Member m of the distinct expert d: trellis, suh, svh at first + 3 (3 d + m).
  const std::size_t first = c.buffers.size();
  for (std::int32_t d = 0; d < s.distinct; ++d) {
    for (int m = 0; m < 3; ++m) {
      const std::int32_t in = m < 2 ? s.dim : s.inner;
      const std::int32_t out = m < 2 ? s.inner : s.dim;
      c.add("trellis", trellis(random, in, out, s.words[m]));
      c.add("suh", scales(random, in, m < 2 ? 0.02f : 0.05f));
      c.add("svh", scales(random, out, 1.0f));
    }
  }
  const auto refs = c.add("experts", std::vector<ExpertRef>(z(s.experts)));
  const std::int32_t count = s.experts;
  const std::int32_t distinct = s.distinct;
  c.buffers[refs].link = [=](const std::vector<void*>& before, std::vector<std::byte>& data) {
    for (std::int32_t e = 0; e < count; ++e) {
      ExpertRef ref{};
      const std::int32_t from[3] = {e % distinct, e / 3 % distinct, e / 7 % distinct};
      for (int m = 0; m < 3; ++m) {
        const std::size_t at = first + 3 * z(3 * from[m] + m);
        ref.trellis[m] = static_cast<const std::byte*>(before[at]);
        ref.suh[m] = static_cast<const std::byte*>(before[at + 1]);
        ref.svh[m] = static_cast<const std::byte*>(before[at + 2]);
      }
      std::memcpy(data.data() + z(e) * sizeof ref, &ref, sizeof ref);
    }
  };
  const auto y = c.out<float>("y", z(s.slots) * z(s.dim));
  const std::size_t shared_first = c.buffers.size();
  std::size_t shared_ref = 0;
  std::size_t shared_y = 0;
  if (s.shared_inner > 0) {
    for (int m = 0; m < 3; ++m) {
      const std::int32_t in = m < 2 ? s.dim : s.shared_inner;
      const std::int32_t out = m < 2 ? s.shared_inner : s.dim;
      c.add("trellis", trellis(random, in, out, s.shared_words[m]));
      c.add("suh", scales(random, in, m < 2 ? 0.02f : 0.05f));
      c.add("svh", scales(random, out, 1.0f));
    }
    shared_ref = c.add("shared", std::vector<ExpertRef>(1));
    c.buffers[shared_ref].link = [=](const std::vector<void*>& before,
                                     std::vector<std::byte>& data) {
      ExpertRef ref{};
      for (int m = 0; m < 3; ++m) {
        const std::size_t at = shared_first + 3 * z(m);
        ref.trellis[m] = static_cast<const std::byte*>(before[at]);
        ref.suh[m] = static_cast<const std::byte*>(before[at + 1]);
        ref.svh[m] = static_cast<const std::byte*>(before[at + 2]);
      }
      std::memcpy(data.data(), &ref, sizeof ref);
    };
    shared_y = c.out<float>("shared_y", z(s.dim));
  }
  c.launch = [=](const Placed& p) {
    ExpertsArgs a{};
    a.rows = p.count();
    a.x = p.at<float>(x);
    a.ids = picked ? p.at<std::int32_t>(ids_at) : nullptr;
    a.experts = p.at<ExpertRef>(refs);
    a.y = p.at<float>(y);
    a.num_experts = s.experts;
    a.slots = s.slots;
    a.dim = s.dim;
    a.inner = s.inner;
    for (int m = 0; m < 3; ++m) a.words[m] = s.words[m];
    a.levels = levels;
    if (s.shared_inner > 0) {
      a.shared = p.at<ExpertRef>(shared_ref);
      a.shared_y = p.at<float>(shared_y);
      a.shared_inner = s.shared_inner;
      for (int m = 0; m < 3; ++m) a.shared_words[m] = s.shared_words[m];
    }
    if (s.groups > 0) {
      a.group = p.at<std::int32_t>(group_at);
      a.only = kOnly;
      a.max_pairs = std::max(max_pairs, 1);  // 0 would mean all
    }
    enqueue(p, a);
  };
  return c;
}

}  // namespace flashnext::gate
