// Synthetic checkpoints on disk: they open, run, and hold what the form in memory holds.
#include "checkpoint_writer.h"
#include "cpp/checkpoint/synthetic.h"
#include "cpp/session/session.h"

#include <sys/stat.h>

namespace flashnext {
namespace {

using testing_checkpoint::TempFolder;

SyntheticOptions small_pool() { return {1, std::size_t{4} << 20}; }

std::vector<float> logits_of(Checkpoint checkpoint) {
  SessionOptions options;
  options.device = "host";
  options.window = 128;
  const std::vector<std::int32_t> ids = {5, 900, 3, 77, 1493, 12, 12, 800, 41};
  return Session::open(std::move(checkpoint), options)->logits(ids);
}

TEST(SyntheticFiles, TheConfigGivesTheShapeBack) {
  for (const ModelShape& s : {tiny_shape(), flash_next_shape(), flash_next_shape(1)}) {
    const ModelShape r = parse_config(synthetic_config(s), "config.json");
    const auto numbers = [](const ModelShape& m) {
      return std::vector<std::int64_t>{
          m.hidden,        m.layers,           m.vocab,         m.max_positions, m.heads,
          m.kv_heads,      m.head_dim,         m.rotary,        m.gdn_k_heads,   m.gdn_v_heads,
          m.gdn_head_dim,  m.gdn_kernel,       m.gdn_silu_gate, m.experts,       m.top_k,
          m.expert_inner,  m.shared_inner,     m.norm_topk,     m.streams,       m.rank,
          m.ple_layer,     m.ple_dim,          m.ple_kernel,    m.ngram_size,    m.ngram_heads(),
          m.ngram_width,   m.ngram_vocab_base, m.ngram_divisor, m.ngram_seed,    m.separator,
          m.index_heads,   m.index_dim,        m.index_budget,  m.index_block,   m.mtp_layers,
          m.mtp_per_stream};
    };
    EXPECT_EQ(numbers(r), numbers(s));
    EXPECT_EQ(r.layer_kinds, s.layer_kinds);
    EXPECT_EQ(r.eps, s.eps);
    EXPECT_EQ(r.rope_theta, s.rope_theta);
  }
}

TEST(SyntheticFiles, AFolderOpensAndGivesTheLogitsOfTheFormInMemory) {
  const TempFolder folder;
  std::uint64_t written = 0;
  write_synthetic(folder.path(), tiny_shape(), small_pool(),
                  [&](std::string_view, std::uint64_t done, std::uint64_t total) {
                    EXPECT_LE(done, total);
                    written = done;
                  });
  EXPECT_EQ(written, synthetic_disk_bytes(tiny_shape()));
  Checkpoint opened = Checkpoint::open(folder.path());
  EXPECT_EQ(opened.notes().size(), 1u) << "the n-gram file is outside the index, as in the pack";
  EXPECT_TRUE(opened.has_mtp());
  const std::vector<float> from_files = logits_of(std::move(opened));
  EXPECT_EQ(from_files, logits_of(Checkpoint::synthetic(tiny_shape(), small_pool())));
  EXPECT_NE(from_files,
            logits_of(Checkpoint::synthetic(tiny_shape(), {2, small_pool().pool_bytes})));
}

TEST(SyntheticFiles, AFolderThatHoldsSomethingIsLeftAlone) {
  const TempFolder folder;
  folder.write("notes.txt", "mine");
  EXPECT_THROW(write_synthetic(folder.path(), tiny_shape(), small_pool()), InputError);
  EXPECT_EQ(testing_checkpoint::read_file(folder.path() + "/notes.txt"), "mine");
  EXPECT_THROW(write_synthetic(folder.path() + "/notes.txt", tiny_shape(), small_pool()),
               InputError);
}

TEST(SyntheticFiles, AnAbandonedFolderIsEmpty) {
  const TempFolder folder;
  const auto stop = [](std::string_view, std::uint64_t, std::uint64_t) {
    throw std::runtime_error("enough");
  };
  EXPECT_THROW(write_synthetic(folder.path(), tiny_shape(), small_pool(), stop),
               std::runtime_error);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(SyntheticFiles, MoreThanTheDiskHoldsIsRefusedWithTheSum) {
  const TempFolder folder;
  const ModelShape huge = flash_next_shape(256);
  const std::uint64_t needed = synthetic_disk_bytes(huge);
  if (std::filesystem::space(folder.path()).available > needed) {
    GTEST_SKIP() << "this disk holds a quarter of a terabyte";
  }
  try {
    write_synthetic(folder.path(), huge, small_pool());
    FAIL() << "it was written";
  } catch (const OutOfMemory& error) {
    EXPECT_EQ(error.space(), "disk");
    EXPECT_EQ(error.bytes(), needed);
    EXPECT_NE(std::string(error.what()).find(std::to_string(needed)), std::string::npos);
  }
}

// spec/model.md 10: 45.77 GB of experts and 3.7 GB of dense weights, the embedding and the draft
// layer; the table of 32.6 GB is a hole.
TEST(SyntheticFiles, TheFullModelTakesWhatThePackTakes) {
  const double gigabytes = static_cast<double>(synthetic_disk_bytes(flash_next_shape())) * 1e-9;
  EXPECT_NEAR(gigabytes, 51.8, 0.3);
}

}  // namespace
}  // namespace flashnext
