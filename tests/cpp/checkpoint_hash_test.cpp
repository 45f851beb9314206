// The n-gram hash constants against the published values of the full-size model.
#include "cpp/checkpoint/ngram_hash.h"

#include <gtest/gtest.h>

namespace flashnext {
namespace {

ModelShape full_size() {
  ModelShape shape;
  shape.vocab = 248320;
  return shape;  // the other hash keys default to the model's values
}

TEST(NgramHash, ConstantsOfTheFullModel) {
  const NgramHash hash = derive_ngram_hash(full_size());
  EXPECT_EQ(hash.multipliers,
            (std::vector<std::int64_t>{23703573157769, 20109073645365, 8052911324071}));
  EXPECT_EQ(hash.sizes,
            (std::vector<std::int64_t>{20000003, 20000023, 20000033, 20000047, 20000059, 20000063,
                                       20000069, 20000077, 20000081, 20000093, 20000107, 20000147,
                                       20000153, 20000159, 20000161, 20000171}));
  EXPECT_EQ(hash.offsets,
            (std::vector<std::int64_t>{0, 20000003, 40000026, 60000059, 80000106, 100000165,
                                       120000228, 140000297, 160000374, 180000455, 200000548,
                                       220000655, 240000802, 260000955, 280001114, 300001275}));
  EXPECT_EQ(hash.rows, 320001536);
}

// The derived constants give the published row ids (ids 9707, 11, 1879 of a fresh sequence).
TEST(NgramHash, RowIdsOfTheFullModel) {
  const NgramHash hash = derive_ngram_hash(full_size());
  const std::int64_t eos = 248044;
  const std::int64_t ids[3][3] = {{9707, eos, eos}, {11, 9707, eos}, {1879, 11, 9707}};
  const std::int64_t first_and_last[3][4] = {
      {16410909, 152932897, 169641436, 300984276},
      {18158303, 159566246, 175132467, 307699687},
      {6380558, 148942556, 164226950, 312121804},
  };
  for (int p = 0; p < 3; ++p) {
    const std::int64_t two = (ids[p][0] * hash.multipliers[0]) ^ (ids[p][1] * hash.multipliers[1]);
    const std::int64_t three = two ^ (ids[p][2] * hash.multipliers[2]);
    const auto row = [&](std::size_t head, std::int64_t h) {
      return hash.offsets[head] + h % hash.sizes[head];
    };
    EXPECT_EQ(row(0, two), first_and_last[p][0]);
    EXPECT_EQ(row(7, two), first_and_last[p][1]);
    EXPECT_EQ(row(8, three), first_and_last[p][2]);
    EXPECT_EQ(row(15, three), first_and_last[p][3]);
  }
}

TEST(NgramHash, PrimesAgreeWithTrialDivision) {
  for (std::uint64_t n = 0; n < 5000; ++n) {
    bool prime = n >= 2;
    for (std::uint64_t d = 2; d * d <= n; ++d) prime = prime && n % d != 0;
    EXPECT_EQ(is_prime(n), prime) << n;
  }
  EXPECT_TRUE(is_prime(18446744073709551557u));   // the largest below 2^64
  EXPECT_FALSE(is_prime(3215031751u));            // strong pseudoprime to 2, 3, 5, 7
  EXPECT_FALSE(is_prime(3825123056546413051u));   // and to the first nine primes
  EXPECT_FALSE(is_prime(18446744065119617025u));  // the square of 2^32 - 1, far from small factors
  EXPECT_FALSE(is_prime(18446743927680663841u));  // 4294967279^2, a square of a prime
}

TEST(NgramHash, TakesTheVocabularyAndTheSeed) {
  ModelShape shape = full_size();
  shape.ngram_seed = -1;
  EXPECT_NE(derive_ngram_hash(shape).multipliers, derive_ngram_hash(full_size()).multipliers);
  shape = full_size();
  shape.vocab = 1 << 24;
  for (const std::int64_t m : derive_ngram_hash(shape).multipliers) {
    EXPECT_EQ(m % 2, 1);
    EXPECT_LE(m, INT64_MAX >> 24);  // the product with any id stays positive
  }
}

}  // namespace
}  // namespace flashnext
