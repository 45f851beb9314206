// The EXL3 linear on the GPU against the host, bit for bit: every rate, both activation widths,
// every row count class, rows without numbers.
#include "exl3_gpu_case.h"

#include <limits>
#include <string>

namespace flashnext {
namespace {

using namespace exl3_case;

constexpr std::int32_t kRates[] = {16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128};
constexpr std::int32_t kLevels[] = {exl3::kLevels, exl3::kLevelsOneDigit};

class Exl3Gpu : public ::testing::Test {
 protected:
  void SetUp() override {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0)
      GTEST_SKIP() << "no CUDA device";
  }
  std::vector<float> rows_of(std::int32_t rows, std::int32_t in) {
    std::vector<float> x(static_cast<std::size_t>(rows) * static_cast<std::size_t>(in));
    fill_normal(x, random);
    return x;
  }
  std::mt19937 random{20240611};
};

TEST_F(Exl3Gpu, EveryRateAndWidth) {
  const std::vector<float> x = rows_of(150, 384);
  for (std::int32_t words : kRates) {
    const Weight w(384, 256, words, random);
    for (std::int32_t levels : kLevels) {
      for (std::int32_t rows : {1, 3, 8, 9, 12, 17, 32, 33, 150}) {
        const std::string what = "words " + std::to_string(words) + " levels " +
                                 std::to_string(levels) + " rows " + std::to_string(rows);
        check_linear({&w}, x, rows, rows, levels, what.c_str());
      }
    }
  }
}

TEST_F(Exl3Gpu, EveryDecodeRowCount) {
  const std::vector<float> x = rows_of(kDecodeRows, 1280);
  for (std::int32_t words : {48, 80}) {
    const Weight w(1280, 640, words, random, true);
    for (std::int32_t levels : kLevels) {
      for (std::int32_t bucket : {4, 8, 12, 16, 24, 32}) {
        for (std::int32_t rows = 0; rows <= bucket; ++rows) {
          check_linear({&w}, x, rows, bucket, levels,
                       (std::to_string(rows) + " rows of " + std::to_string(bucket)).c_str());
        }
      }
    }
  }
}

TEST_F(Exl3Gpu, PrefillRowCounts) {
  const std::vector<float> x = rows_of(1000, 640);
  const Weight a(640, 256, 48, random);
  const Weight b(640, 128, 80, random, true);
  for (std::int32_t levels : kLevels) {
    for (std::int32_t rows : {0, 1, 15, 64, 127, 128, 129, 200, 1000}) {
      check_linear({&a, &b}, x, rows, 1000, levels, ("rows " + std::to_string(rows)).c_str());
    }
  }
}

TEST_F(Exl3Gpu, LinearsOfOneInputWithDifferentRates) {
  const Weight a(256, 384, 80, random, true);
  const Weight b(256, 128, 48, random);
  const Weight c(256, 512, 80, random);
  const Weight d(256, 128, 56, random, true);
  const std::vector<float> x = rows_of(300, 256);
  for (std::int32_t levels : kLevels) {
    for (std::int32_t rows : {1, 5, 8, 9, 16, 31, 40, 300}) {
      check_linear({&a, &b, &c, &d}, x, rows, rows, levels, "four linears");
    }
  }
}

TEST_F(Exl3Gpu, ModelShapes) {
  const std::vector<float> x = rows_of(70, 2560);
  const Weight qkv(2560, 10240, 80, random);
  const Weight z(2560, 6144, 80, random);
  check_linear({&qkv, &z}, x, 1, 1, exl3::kLevels, "in_proj, one row");
  check_linear({&z}, x, 4, 8, exl3::kLevels, "in_proj_z, four rows of eight");
  const Weight index(2560, 640, 48, random);
  const Weight k(2560, 512, 80, random);
  const Weight fc(2560, 2560, 64, random);
  check_linear({&index, &k, &fc}, x, 2, 2, exl3::kLevels, "index, k, fc");
  check_linear({&index, &k}, x, 70, 70, exl3::kLevels, "index and k, 70 rows");
  const Weight out(6144, 2560, 80, random);
  const std::vector<float> wide = rows_of(40, 6144);
  check_linear({&out}, wide, 1, 1, exl3::kLevels, "out_proj, one row");
  check_linear({&out}, wide, 7, 7, exl3::kLevelsOneDigit, "out_proj, seven rows, one digit");
  for (std::int32_t rows : {9, 12, 16, 24, 32, 40}) {
    check_linear({&out}, wide, rows, rows, exl3::kLevels, "out_proj");
    check_linear({&qkv, &z}, x, rows, rows, exl3::kLevels, "in_proj");
  }
}

// Blocks take several strips, and not all as many.
TEST_F(Exl3Gpu, MoreStripsThanFitAtOnce) {
  for (std::int32_t words : {24, 48, 64, 80}) {
    const Weight w(256, 128 * 2001, words, random, words == 80);
    for (std::int32_t rows : {0, 1, 2, 3, 5, 8}) {
      check_linear({&w}, rows_of(8, 256), rows, 8, exl3::kLevels, "many strips, bucket of 8");
      if (rows == 0) continue;
      check_linear({&w}, rows_of(8, 256), rows, rows, exl3::kLevels, "many strips");
    }
    check_linear({&w}, rows_of(8, 256), 2, 2, exl3::kLevelsOneDigit, "many strips, one digit");
    // Two tiles a strip, of which a step may have one alone.
    for (std::int32_t rows : {0, 1, 16, 17, 32}) {
      check_linear({&w}, rows_of(32, 256), rows, 32, exl3::kLevels, "many strips, bucket of 32");
    }
    check_linear({&w}, rows_of(9, 256), 9, 9, exl3::kLevels, "many strips, nine rows");
  }
  const Weight head(2560, 128 * 1000, 80, random);
  check_linear({&head}, rows_of(1, 2560), 1, 1, exl3::kLevels, "most of the head");
}

// More rows than one chunk of the workspace holds.
TEST_F(Exl3Gpu, RowsInSeveralChunks) {
  const Weight w(6144, 128, 48, random);
  const std::vector<float> x = rows_of(2700, 6144);
  check_linear({&w}, x, 2700, 2700, exl3::kLevels, "2700 rows");
}

TEST_F(Exl3Gpu, InputsAtTheLimits) {
  const Weight small(128, 128, 48, random);
  check_linear({&small}, rows_of(20, 128), 3, 3, exl3::kLevels, "one block, three rows");
  check_linear({&small}, rows_of(20, 128), 20, 20, exl3::kLevels, "one block, 20 rows");
  // The largest sums: every state the best of those that repeat a byte, every V at its limit.
  Weight extreme(16384, 128, 128, random);
  int best = 0;
  for (int b = 0; b < 256; ++b) {
    const auto sum = [](int byte) {
      return exl3::byte_sum(static_cast<std::uint16_t>(257 * byte));
    };
    if (sum(b) > sum(best)) best = b;
  }
  std::fill(extreme.trellis.host.begin(), extreme.trellis.host.end(), static_cast<std::byte>(best));
  extreme.trellis.upload();
  std::vector<float> x(16384 * 9, 0.0f);
  for (std::size_t i = 0; i < x.size(); i += 128) x[i] = 1.0f;
  for (std::size_t i = 0; i < extreme.suh.host.size(); i += 2) {
    const std::uint16_t one = f32_to_f16(1.0f);
    std::memcpy(extreme.suh.host.data() + i, &one, 2);
  }
  extreme.suh.upload();
  check_linear({&extreme}, x, 2, 2, exl3::kLevels, "largest sums, GEMV");
  check_linear({&extreme}, x, 9, 9, exl3::kLevels, "largest sums, units");
  check_linear({&extreme}, x, 9, 64, exl3::kLevels, "largest sums, GEMM");
}

TEST_F(Exl3Gpu, RowsWithoutNumbers) {
  const Weight plain(256, 256, 48, random);
  const Weight biased(256, 256, 80, random, true);
  for (std::int32_t rows : {7, 20, 40}) {
    std::vector<float> x = rows_of(rows, 256);
    std::fill_n(x.begin(), 256, 0.0f);
    x[256 + 3] = std::numeric_limits<float>::quiet_NaN();
    x[512 + 200] = std::numeric_limits<float>::infinity();
    for (std::size_t i = 768; i < 1024; ++i) x[i] *= 1e-37f;  // counts as zero
    for (std::size_t i = 1024; i < 1280; ++i) x[i] *= 1e-20f;
    for (std::size_t i = 1280; i < 1536; ++i) x[i] = i == 1300 ? -0.0f : 0.0f;
    for (std::int32_t levels : kLevels) {
      check_linear({&plain, &biased}, x, rows, rows, levels, "rows without numbers");
    }
  }
}

// The promise behind the choice of kernel: the same rows in a GEMV, in units and in a GEMM.
TEST_F(Exl3Gpu, DecodeEqualsPrefill) {
  const Weight w(1280, 384, 48, random);
  const std::vector<float> x = rows_of(8, 1280);
  const auto decode = check_linear({&w}, x, 8, 8, exl3::kLevels, "decode");
  for (std::int32_t bucket : {9, 16, 24, 32}) {
    auto units = check_linear({&w}, x, 8, bucket, exl3::kLevels, "units");
    units[0].resize(decode[0].size());
    expect_same_bits(units[0], decode[0], w.out, "units against decode");
  }
  auto prefill = check_linear({&w}, x, 8, 500, exl3::kLevels, "GEMM");
  prefill[0].resize(decode[0].size());
  expect_same_bits(prefill[0], decode[0], w.out, "GEMM against GEMV");
}

}  // namespace
}  // namespace flashnext
