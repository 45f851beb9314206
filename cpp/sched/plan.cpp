#include "cpp/sched/plan.h"

#include "cpp/base/errors.h"

#include <algorithm>

namespace flashnext {

std::vector<StepShare> plan_step(std::span<const Waiting> sequences, const StepBudget& budget) {
  std::vector<std::int32_t> rows(sequences.size(), 0);
  std::vector<std::size_t> prompts;
  std::int32_t decoding = 0;
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    if (sequences[i].decoding) {
      rows[i] = 1;
      ++decoding;
    } else if (sequences[i].left > 0) {
      prompts.push_back(i);
    }
  }
  check(decoding <= budget.rows && decoding <= budget.outputs,
        "more sequences decode than a step has rows");
  std::int32_t left = budget.rows - decoding;
  if (decoding > 0) left = std::min(left, budget.prompt_rows);
  std::int32_t outputs = budget.outputs - decoding;

  const auto give = [&](std::size_t i, std::int32_t most) {
    const Waiting& s = sequences[i];
    std::int32_t n = std::min({most, left, std::min(s.until_mark, s.left) - rows[i]});
    // A prompt's last row is an output, and so may every row be.
    if (s.every_logit) {
      n = std::min(n, outputs);
    } else if (rows[i] + n == s.left && outputs < 1) {
      --n;
    }
    if (n <= 0) return;
    rows[i] += n;
    left -= n;
    outputs -= s.every_logit ? n : rows[i] == s.left ? 1 : 0;
  };
  if (!prompts.empty()) {
    give(prompts.front(), prompts.size() == 1 ? left : (left + 1) / 2);
    std::stable_sort(prompts.begin(), prompts.end(), [&](std::size_t a, std::size_t b) {
      return sequences[a].left - rows[a] < sequences[b].left - rows[b];
    });
    for (const std::size_t i : prompts) give(i, left);
  }
  std::vector<StepShare> shares;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (rows[i] > 0) shares.push_back({i, rows[i]});
  }
  return shares;
}

}  // namespace flashnext
