// The policies that come with the engine.
#include "cpp/base/errors.h"
#include "cpp/cache/order.h"
#include "cpp/cache/policy.h"

#include <algorithm>
#include <array>
#include <tuple>
#include <utility>

namespace flashnext::cache {

namespace {

std::size_t index(std::int32_t i) noexcept { return static_cast<std::size_t>(i); }

template <class T>
std::span<const T> row(std::span<const T> table, std::int32_t layer, std::int32_t width) {
  return table.subspan(index(layer) * index(width), index(width));
}

// The lines start with the experts that earlier runs used most; without a profile with the first
// ones. Evicts the longest unused; what a miss needs stays.
class Recency : public Policy {
 public:
  std::string name() const override { return "recency"; }

  std::vector<std::vector<std::int32_t>> initial(const CacheShape& shape,
                                                 std::span<const std::uint64_t> profile) override {
    const std::vector<std::uint64_t> equal(profile.empty() ? index(shape.experts) : 0, 0);
    std::vector<std::vector<std::int32_t>> out;
    for (std::int32_t layer = 0; layer < shape.layers; ++layer) {
      out.push_back(
          most_first(profile.empty() ? std::span(equal) : row(profile, layer, shape.experts)));
      out.back().resize(std::min(out.back().size(), index(shape.lines)));
    }
    return out;
  }

  PlanOutput plan(const PolicyInput&) override { return {}; }
};

// The lines never change.
class Static : public Recency {
 public:
  std::string name() const override { return "static"; }
  PlanOutput plan(const PolicyInput&) override {
    PlanOutput out;
    out.install = false;
    return out;
  }
};

// Evicts the least used, where uses fade: they halve with every kHalfLife steps since the last one.
// Copies in what is clearly used more than something that has a line.
class Frequency : public Recency {
 public:
  std::string name() const override { return "frequency"; }

  PlanOutput plan(const PolicyInput& in) override {
    const CacheShape& s = in.shape;
    PlanOutput out;
    std::vector<std::pair<std::uint64_t, Promotion>> gains;
    for (std::int32_t layer = 0; layer < s.layers; ++layer) {
      const std::vector<std::uint64_t> uses =
          faded(in.sequence, row(in.total, layer, s.experts), row(in.last, layer, s.experts));
      const std::vector<std::int32_t> best = most_first(std::span(uses));
      std::vector<bool> resident(index(s.experts), false);
      for (const std::int32_t expert : row(in.expert_of, layer, s.lines)) {
        if (expert >= 0) resident[index(expert)] = true;
      }
      // Those without a line are in the order too: one that a miss brings in has its place.
      out.evict.emplace_back(best.rbegin(), best.rend());
      auto worst = best.rbegin();
      int taken = 0;
      for (const std::int32_t expert : best) {
        if (resident[index(expert)]) continue;
        while (worst != best.rend() && !resident[index(*worst)]) ++worst;
        if (worst == best.rend() || taken == kMaxPromotions) break;
        const std::uint64_t gain = uses[index(expert)], loss = uses[index(*worst)];
        if (gain <= loss + loss / 4 + kOneUse) break;
        gains.push_back({gain - loss, {layer, expert}});
        ++worst;
        ++taken;
      }
    }
    std::stable_sort(gains.begin(), gains.end(),
                     [](const auto& a, const auto& b) { return a.first > b.first; });
    gains.resize(std::min(gains.size(), std::size_t{kMaxPromotions}));
    for (const auto& [gain, promotion] : gains) out.promote.push_back(promotion);
    return out;
  }

 private:
  static constexpr int kMaxPromotions = 8;  // a plan
  static constexpr std::int32_t kHalfLife = 1024;
  static constexpr std::uint64_t kOneUse = 256;
  static constexpr std::uint64_t kMostUses = std::uint64_t{1} << 54;

  static std::vector<std::uint64_t> faded(std::int32_t sequence,
                                          std::span<const std::uint64_t> total,
                                          std::span<const std::int32_t> last) {
    std::vector<std::uint64_t> uses(total.size());
    for (std::size_t i = 0; i < total.size(); ++i) {
      const std::int32_t halvings = std::clamp((sequence - last[i]) / kHalfLife, 0, 63);
      uses[i] = (std::min(total[i], kMostUses) * kOneUse) >> halvings;
    }
    return uses;
  }
};

// Evicts at random among the eighth that is unused longest. It depends on the counters, the seed
// and the step alone.
class Random : public Recency {
 public:
  explicit Random(std::uint64_t seed) : seed_(seed) {}
  std::string name() const override { return "random"; }

  PlanOutput plan(const PolicyInput& in) override {
    const CacheShape& s = in.shape;
    PlanOutput out;
    for (std::int32_t layer = 0; layer < s.layers; ++layer) {
      const std::span<const std::int32_t> last = row(in.last, layer, s.experts);
      std::vector<std::int32_t> resident;
      for (const std::int32_t expert : row(in.expert_of, layer, s.lines)) {
        if (expert >= 0) resident.push_back(expert);
      }
      std::sort(resident.begin(), resident.end(), [last](std::int32_t a, std::int32_t b) {
        return std::tuple(last[index(a)], a) < std::tuple(last[index(b)], b);
      });
      resident.resize((resident.size() + 7) / 8);
      shuffle(resident, in.sequence, layer);
      out.evict.push_back(std::move(resident));
    }
    return out;
  }

 private:
  void shuffle(std::vector<std::int32_t>& ids, std::int32_t sequence, std::int32_t layer) const {
    const std::uint64_t stream = mix64(seed_ ^ mix64(static_cast<std::uint64_t>(sequence) << 32 |
                                                     static_cast<std::uint32_t>(layer)));
    for (std::size_t i = ids.size(); i > 1; --i) {
      const auto n = static_cast<std::uint32_t>(i);
      std::swap(ids[i - 1], ids[draw_below(random_at(stream, i), n)]);
    }
  }

  std::uint64_t seed_;
};

constexpr std::array<const char*, 4> kNames = {"recency", "frequency", "static", "random"};

}  // namespace

std::vector<std::string> policy_names() { return {kNames.begin(), kNames.end()}; }

std::unique_ptr<Policy> make_policy(std::string_view name, std::uint64_t seed) {
  if (name == kNames[0]) return std::make_unique<Recency>();
  if (name == kNames[1]) return std::make_unique<Frequency>();
  if (name == kNames[2]) return std::make_unique<Static>();
  if (name == kNames[3]) return std::make_unique<Random>(seed);
  std::string known;
  for (const char* one : kNames) known += std::string(known.empty() ? "" : ", ") + one;
  throw InputError("there is no policy \"" + std::string(name) + "\"; known: " + known);
}

}  // namespace flashnext::cache
