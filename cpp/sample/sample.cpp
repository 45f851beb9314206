#include "cpp/sample/sample.h"

#include <algorithm>

namespace flashnext::sample {

namespace {

bool in_order(const Candidate& a, const Candidate& b) {
  return before(a.logit, a.id, b.logit, b.id);
}

// Index of the largest logit, lowest id; kBadLogits for NaN or no finite maximum.
std::int32_t argmax(const float* logits, std::int32_t limit) {
  std::int32_t best = 0;
  bool nan = false;
  for (std::int32_t i = 0; i < limit; ++i) {
    nan = nan || logits[i] != logits[i];
    if (logits[i] > logits[best]) best = i;
  }
  if (nan || limit <= 0 || logits[best] - logits[best] != 0.0f) return kBadLogits;
  return best;
}

// A list of candidates that is put in order from the front, only as far as it is looked at.
class Ordered {
 public:
  Ordered(Candidate* begin, std::int64_t n) : begin_(begin), n_(n) {}
  std::int64_t size() const { return n_; }
  void cut(std::int64_t n) { n_ = n; }
  const Candidate& at(std::int64_t i) {
    while (i >= sorted_) {
      const std::int64_t end = std::min(n_, std::max<std::int64_t>(64, 4 * sorted_));
      if (end < n_) std::nth_element(begin_ + sorted_, begin_ + end, begin_ + n_, in_order);
      std::sort(begin_ + sorted_, begin_ + end, in_order);
      sorted_ = end;
    }
    return begin_[i];
  }

 private:
  Candidate* begin_;
  std::int64_t n_;
  std::int64_t sorted_ = 0;
};

// The weight of every candidate; those without one are dropped. Returns how many are left.
#if defined(__x86_64__)
__attribute__((target("fma"))) std::int64_t weigh_fma(Candidate* c, std::int64_t n, float largest,
                                                      float temperature) {
  std::int64_t kept = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    c[kept] = c[i];
    c[kept].weight = weight_of(c[i].logit, largest, temperature);
    kept += c[kept].weight != 0;
  }
  return kept;
}
#endif

std::int64_t weigh(Candidate* c, std::int64_t n, float largest, float temperature) {
#if defined(__x86_64__)
  // Same bits: an fma is an fma, by instruction or by library.
  if (__builtin_cpu_supports("fma")) return weigh_fma(c, n, largest, temperature);
#endif
  std::int64_t kept = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    c[kept] = c[i];
    c[kept].weight = weight_of(c[i].logit, largest, temperature);
    kept += c[kept].weight != 0;
  }
  return kept;
}

}  // namespace

std::size_t scratch_bytes(std::int32_t limit) noexcept {
  return static_cast<std::size_t>(limit) * sizeof(Candidate);
}

std::int32_t draw(const float* logits, std::int32_t limit, const Params& params,
                  void* scratch) noexcept {
  const std::int32_t best = argmax(logits, limit);
  if (best == kBadLogits || !(params.temperature > 0.0f)) return best;
  const float largest = logits[best];

  auto* candidates = static_cast<Candidate*>(scratch);
  for (std::int32_t i = 0; i < limit; ++i) candidates[i] = {0, logits[i], i};
  std::int64_t n = limit;
  if (params.top_k > 0 && params.top_k < n) {
    n = params.top_k;
    std::nth_element(candidates, candidates + n, candidates + limit, in_order);
  }
  n = weigh(candidates, n, largest, params.temperature);
  std::uint64_t sum = 0;
  for (std::int64_t i = 0; i < n; ++i) sum += candidates[i].weight;

  Ordered ordered(candidates, n);
  if (params.top_p < 1.0f) {
    const std::uint64_t enough = params.top_p > 0.0f ? top_p_sum(sum, params.top_p) : 0;
    std::int64_t kept = 1;
    sum = ordered.at(0).weight;
    while (kept < ordered.size() && sum < enough) sum += ordered.at(kept++).weight;
    ordered.cut(kept);
  }
  if (params.min_p > 0.0f) {
    const std::uint64_t floor = fixed_point(params.min_p < 1.0f ? params.min_p : 1.0f);
    std::int64_t kept = 1;
    sum = ordered.at(0).weight;
    while (kept < ordered.size() && ordered.at(kept).weight >= floor) {
      sum += ordered.at(kept++).weight;
    }
    ordered.cut(kept);
  }
  const std::uint64_t target = draw_below(random_bits(params.seed, params.position), sum);
  std::uint64_t running = 0;
  std::int64_t i = 0;
  for (;; ++i) {
    running += ordered.at(i).weight;
    if (running > target) return ordered.at(i).id;
  }
}

}  // namespace flashnext::sample
