// The promise under configurations drawn at random, on the host device.
#include "tests/cpp/random_configs.h"

#include "cpp/exl3/exl3.h"
#include "tests/cpp/exl3_case.h"

namespace flashnext {
namespace {

using namespace test;

TEST(RandomConfigs, OneAnswer) {
  std::vector<std::string> isas;
  for (const exl3::Isa isa : exl3_test::isas()) {
    if (isa != exl3::Isa::kScalar) isas.emplace_back(exl3::to_string(isa));
  }
  if (isas.empty()) isas.emplace_back("scalar");
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  check_random_configs(demo_options(), isas, 8);
#else
  check_random_configs(demo_options(), isas, 100);
#endif
}

}  // namespace
}  // namespace flashnext
