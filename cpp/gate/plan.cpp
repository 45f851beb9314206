#include "cpp/gate/plan.h"

#include "cpp/exl3/exl3.h"
#include "cpp/gate/cases.h"
#include "cpp/gate/cases_offload.h"

namespace flashnext::gate {

namespace {

// Buckets of decode steps, full or not, and prompts.
constexpr std::int32_t kRows[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 24, 31, 32, 64, 200};
constexpr std::int32_t kSomeRows[] = {1, 3, 8, 12, 32, 64};

class Plan {
 public:
  std::vector<Planned> take() { return std::move(list_); }

  template <class Make, class... Args>
  void add(const char* gate, Make make, Args... args) {
    list_.push_back({gate, [=] { return make(args...); }});
  }

 private:
  std::vector<Planned> list_;
};

// Every rate, every number of decode rows, both sides of the switch to the many-row kernels.
void integer_path(Plan& plan) {
  using Outs = std::vector<std::pair<std::int32_t, std::int32_t>>;
  for (const std::int32_t words : kAllWords) {
    for (const std::int32_t rows : kRows) {
      plan.add("integer", exl3_case, 384, Outs{{256, words}}, rows, exl3::kLevels);
    }
    for (const std::int32_t rows : {1, 8, 12, 31, 64}) {
      plan.add("integer", exl3_case, 384, Outs{{256, words}}, rows, exl3::kLevelsOneDigit);
    }
  }
  for (const std::int32_t rows : {1, 5, 9, 32, 40}) {
    const Outs four{{384, 80}, {128, 48}, {512, 80}, {128, 56}};
    plan.add("integer", exl3_case, 256, four, rows, exl3::kLevels);
  }
  plan.add("integer", exl3_case, 2560, Outs{{10240, 80}, {6144, 80}}, 1, exl3::kLevels);
  for (const std::int32_t rows : {7, 9, 16, 32}) {
    plan.add("integer", exl3_case, 6144, Outs{{2560, 80}}, rows, exl3::kLevels);
  }
  // More strips than blocks fit on a card at once.
  for (const std::int32_t words : {24, 80}) {
    for (const std::int32_t rows : {1, 3, 8, 17}) {
      plan.add("integer", exl3_case, 128, Outs{{256000, words}}, rows, exl3::kLevels);
    }
  }
  for (const std::int32_t words : {40, 48, 80}) {
    const ExpertsShape s{16, 5, 384, 256, {words, words, words}, 4};
    for (const std::int32_t rows : kRows) {
      plan.add("integer", experts_case, s, rows, exl3::kLevels, true);
    }
    for (const std::int32_t rows : {8, 9, 32, 64}) {
      plan.add("integer", experts_case, s, rows, exl3::kLevelsOneDigit, true);
    }
  }
  for (const std::int32_t rows : kSomeRows) {
    const ExpertsShape mixed{6, 6, 256, 128, {48, 64, 80}, 3};
    const ExpertsShape shared{1, 1, 640, 256, {80, 80, 80}, 1};
    plan.add("integer", experts_case, mixed, rows, exl3::kLevels, true);
    plan.add("integer", experts_case, shared, rows, exl3::kLevels, false);
  }
  const ExpertsShape real{512, 5, 2560, 640, {48, 48, 48}, 10};
  const ExpertsShape real_joint{512, 5, 2560, 640, {48, 48, 48}, 10, 640, {80, 80, 80}};
  for (const std::int32_t rows : {1, 8, 9, 16, 32}) {
    plan.add("integer", experts_case, real, rows, exl3::kLevels, true);
    plan.add("integer", experts_case, real_joint, rows, exl3::kLevels, true);
  }
  // The shared expert along with routed ones: of their width, of another, at other rates.
  const ExpertsShape joint{16, 5, 384, 256, {48, 48, 48}, 4, 256, {80, 64, 40}};
  const ExpertsShape apart{16, 5, 384, 256, {48, 64, 80}, 4, 128, {80, 80, 80}};
  for (const std::int32_t rows : kRows) {
    plan.add("integer", experts_case, joint, rows, exl3::kLevels, true);
    plan.add("integer", experts_case, joint, rows, exl3::kLevelsOneDigit, true);
    plan.add("integer", experts_case, apart, rows, exl3::kLevels, true);
  }
  // Only the pairs of a group of experts, which may be a few or none; the shared expert always.
  for (const std::int32_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 17, 32, 64, 200, 1000}) {
    for (const std::int32_t groups : {1, 2, 20}) {
      ExpertsShape part{16, 5, 384, 256, {48, 48, 48}, 4, 256, {80, 64, 40}};
      part.groups = groups;
      plan.add("integer", experts_case, part, rows, exl3::kLevels, true);
    }
  }
}

void choices(Plan& plan) {
  for (const std::int32_t rows : kRows) {
    for (const Dims& d : {kTiny, kReal}) {
      plan.add("choice", route_case, d, rows, true, RouteKind::kFine);
      plan.add("choice", route_case, d, rows, false, RouteKind::kTies);
      plan.add("choice", route_case, d, rows, true, RouteKind::kForced);
    }
  }
  for (const std::int32_t pos0 : {0, 40, 230, 1000}) {
    plan.add("choice", index_select_case, kTinyAttention, pos0, 20);
  }
  for (const std::int32_t pos0 : {2040, 4000}) {
    plan.add("choice", index_select_case, kRealAttention, pos0, 1);
    plan.add("choice", index_select_case, kRealAttention, pos0, 40);
  }
  plan.add("choice", sample_case, kTiny, 100, 1500, false);
  plan.add("choice", sample_case, kTiny, 100, 1536, true);
  plan.add("choice", sample_case, kReal, 8, 248000, false);
  plan.add("choice", sample_case, kReal, 4, 248320, true);
}

void streams_and_products(Plan& plan) {
  const auto name = [](const char* text) { return std::string(text); };
  const auto each = [&](const Dims& d, std::int32_t rows) {
    plan.add("ops", embed_case, d, rows);
    plan.add("ops", residual_case, d, rows);
    plan.add("ops", mix_case, d, rows, MixKind::kPending);
    plan.add("ops", combine_case, d, rows);
    plan.add("ops", ple_gate_case, d, rows);
    plan.add("ops", mtp_norm_case, d, rows, true);
    plan.add("ops", mtp_join_case, d, rows);
  };
  for (const std::int32_t rows : kRows) {
    each(kTiny, rows);
    plan.add("ops", mix_case, kTiny, rows, MixKind::kPlain);
    plan.add("ops", mix_case, kTiny, rows, MixKind::kPicked);
    plan.add("ops", mtp_norm_case, kTiny, rows, false);
    plan.add("ops", dense_case, name("tiny"), 256, std::vector<std::int32_t>{32, 1, 6, 6}, rows);
    plan.add("ops", ngram_hash_case, rows);
  }
  for (const std::int32_t rows : kSomeRows) {
    each(kReal, rows);
    plan.add("ops", dense_case, name("router"), 2560, std::vector<std::int32_t>{512, 1}, rows);
  }
  plan.add("ops", dense_case, name("key"), 2560, std::vector<std::int32_t>{10240, 2560}, 3);
}

void sequences(Plan& plan) {
  using Lengths = std::vector<std::int32_t>;
  for (const Lengths& lengths : {Lengths{1}, Lengths{1, 1, 1, 1, 1, 1, 1, 1}, Lengths(32, 1),
                                 Lengths{8, 8, 1, 7}, Lengths{4, 1, 8, 2, 20, 3}, Lengths{130}}) {
    for (const std::int32_t k_heads : {2, 16}) {
      for (const bool in_place : {false, true}) {
        plan.add("ops", gdn_conv_case, k_heads, 3 * k_heads, 160 * k_heads, lengths, in_place);
      }
      plan.add("ops", gdn_recur_case, k_heads, 3 * k_heads, lengths);
    }
    plan.add("ops", window_push_case, kTiny, 9, lengths);
    plan.add("ops", ple_conv_case, kTiny, lengths);
  }
  // One kernel for a decode step, however its rows are dealt out, and several for more.
  for (const Lengths& lengths :
       {Lengths{2}, Lengths{1, 2}, Lengths{4}, Lengths{1, 1, 3}, Lengths{2, 4}, Lengths{1, 2, 4},
        Lengths{8}, Lengths{1, 5, 2}, Lengths{9}, Lengths(12, 1), Lengths{8, 8}, Lengths(17, 1),
        Lengths{8, 8, 8}, Lengths(31, 1), Lengths(32, 1), Lengths{1, 2, 61}}) {
    for (const bool in_place : {false, true}) {
      plan.add("ops", gdn_conv_case, 16, 48, 2560, lengths, in_place);
    }
  }
  plan.add("ops", gdn_conv_case, 1, 4, 1288, Lengths{3, 2}, false);  // a ragged chunk of k
  plan.add("ops", gdn_conv_case, 1, 4, 2720, Lengths{3, 2}, true);   // more than one slice of k
  plan.add("ops", gdn_conv_case, 1, 4, 2720, Lengths{40, 3}, false);
  plan.add("ops", window_push_case, kReal, 3, Lengths{1, 2, 3, 4, 5});
  plan.add("ops", ple_conv_case, kReal, Lengths{1, 5, 2});
  for (const std::int32_t rows : kSomeRows) {
    plan.add("ops", gdn_gate_case, 48, rows, rows % 2 == 0);
    plan.add("ops", gdn_gate_case, 6, rows, rows % 2 == 1);
  }
  for (const std::int32_t bits : {0, 1, 2, 3, 4, 5, 6, 7, 8}) {
    plan.add("ops", ngram_decode_case, 5, bits, bits % 2 == 1);
  }
  for (const std::int32_t row_bytes : {102, 61, 320}) {
    plan.add("ops", ngram_gather_case, 33, row_bytes, std::size_t{0});
    plan.add("ops", ngram_gather_case, 5, row_bytes, std::size_t{1});
  }
}

void attention(Plan& plan) {
  // Every place in a block, and as many rows as leave one open, end one or begin another.
  for (const std::int32_t pos0 : {0, 61, 62, 63, 64, 130}) {
    for (const std::int32_t rows : {1, 2, 3, 5, 70}) {
      plan.add("ops", attn_prepare_case, kTinyAttention, pos0, rows);
    }
    plan.add("ops", attn_prepare_case, kRealAttention, pos0, 4);
  }
  for (const std::int32_t rows : {1, 9, 16}) {
    for (const std::int32_t pos0 : {0, 60, 1000}) {
      plan.add("ops", attention_case, kTinyAttention, pos0, rows);
    }
    plan.add("ops", attention_case, kRealAttention, 2044, rows);
    plan.add("ops", attention_case, kRealAttention, 4000, rows);
  }
  plan.add("ops", attention_case, kTinyAttention, 0, 130);
}

// Where experts come from when not all are on the device.
void offload(Plan& plan) {
  const auto resolve = [&](const ResolveShape& s) { plan.add("choice", resolve_case, s); };
  for (const std::int32_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 17, 24, 32}) {
    for (const Ask ask : {Ask::kHeld, Ask::kAbsent, Ask::kAny}) {
      resolve({rows, rows, 10, 512, 115, ask});
      resolve({rows, 32, 4, 32, 20, ask, 1, true, rows % 2 == 0, rows % 3 == 0});
    }
    resolve({rows, rows, 10, 512, 7});                              // fewer lines than misses
    resolve({rows, rows, 10, 512, 0});                              // none at all
    resolve({rows, rows, 10, 512, 115, Ask::kAny, 0, true, true});  // through staging
    resolve({rows, rows, 10, 512, 115, Ask::kAbsent, 1, false, true, true});
    resolve({rows, rows, 10, 512, 400, Ask::kAny, 1, true});
    resolve({rows, rows <= 8 ? 8 : 32, 10, 512, 300, Ask::kAbsent, 1, true, true});
    resolve({rows, rows, 10, 512, 512, Ask::kAny, 1, false});
    resolve({rows, rows, 16, 4096, 513, Ask::kAbsent, 1, true, true, true});
  }
  resolve({8, 8, 16, 4096, 4095, Ask::kAny, 1, true, true, true});
  resolve({8, 8, 16, 4096, 3000, Ask::kAbsent});
  resolve({32, 32, 16, 4096, 4095, Ask::kAny, 1, true, true, true});
  resolve({32, 32, 16, 4096, 3000, Ask::kAbsent});
  for (const std::int32_t lines : {127, 128, 129, 256, 257, 320, 511}) {
    resolve({8, 8, 10, 512, lines, Ask::kAbsent, 1, true});
    resolve({32, 32, 10, 512, lines, Ask::kAbsent, 1, true});
  }
  for (const std::int32_t lines : {0, 1, 2, 10}) {
    plan.add("ops", fetch_case, lines, std::int64_t{18176});
  }
  plan.add("ops", fetch_case, 63, std::int64_t{4352});
  plan.add("ops", fetch_case, 255, std::int64_t{256});
  plan.add("ops", fetch_case, 3, std::int64_t{1862400});
  for (const std::int32_t rows : {1, 2, 5, 8, 9, 17, 32}) {
    plan.add("ops", mail_case, Op::kCpuPost, rows, 4, 256);
    plan.add("ops", mail_case, Op::kCpuJoin, rows, 10, 2560);
  }
  plan.add("ops", stall_case, 3, 4, 256);
  plan.add("ops", pace_case);
}

}  // namespace

std::vector<Planned> op_plan() {
  Plan plan;
  integer_path(plan);
  choices(plan);
  plan.add("functions", sigmoid_case);
  plan.add("functions", silu_exp_softplus_case);
  streams_and_products(plan);
  sequences(plan);
  attention(plan);
  offload(plan);
  return plan.take();
}

}  // namespace flashnext::gate
