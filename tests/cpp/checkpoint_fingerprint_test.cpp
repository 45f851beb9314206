// The fingerprint: the same for the same checkpoint wherever it lies, another for another.
#include "cpp/base/hash.h"
#include "cpp/checkpoint/fingerprint.h"
#include "cpp/checkpoint/synthetic.h"
#include "tests/cpp/demo.h"

#include <filesystem>
#include <gtest/gtest.h>
#include <set>

namespace flashnext {
namespace {

TEST(Fnv64, HasTheValuesOfItsDefinition) {
  EXPECT_EQ(fnv64_text(""), 0xCBF29CE484222325u);
  EXPECT_EQ(fnv64_text("a"), 0xAF63DC4C8601EC8Cu);
  EXPECT_EQ(fnv64_text("foobar"), 0x85944171F73967E8u);
  EXPECT_EQ(fnv64_text("bar", fnv64_text("foo")), fnv64_text("foobar"));
}

TEST(Fingerprint, IsThatOfTheContent) {
  const std::uint64_t demo = fingerprint(Checkpoint::open(test::demo_path()));
  EXPECT_EQ(fingerprint(Checkpoint::open(test::demo_path())), demo);
  const std::filesystem::path copy =
      std::filesystem::path(::testing::TempDir()) / ("copy_" + std::to_string(::getpid()));
  std::filesystem::copy(test::demo_path(), copy);
  EXPECT_EQ(fingerprint(Checkpoint::open(copy.string())), demo);
  std::filesystem::remove_all(copy);
}

TEST(Fingerprint, TellsCheckpointsApart) {
  std::set<std::uint64_t> seen = {fingerprint(Checkpoint::open(test::demo_path()))};
  const auto add = [&](const ModelShape& shape, std::uint64_t seed) {
    SyntheticOptions options;
    options.seed = seed;
    options.pool_bytes = std::size_t{1} << 20;
    const std::uint64_t f = fingerprint(Checkpoint::synthetic(shape, options));
    EXPECT_EQ(fingerprint(Checkpoint::synthetic(shape, options)), f);
    EXPECT_TRUE(seen.insert(f).second);
  };
  add(tiny_shape(3), 1);
  add(tiny_shape(3), 2);  // the same shape, other weights
  add(tiny_shape(4), 1);
  ModelShape fewer = tiny_shape(3);
  --fewer.top_k;
  add(fewer, 1);
}

}  // namespace
}  // namespace flashnext
