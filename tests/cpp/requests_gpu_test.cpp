// Requests that come and go on a CUDA device.
#include "tests/cpp/cuda_demo.h"
#include "tests/cpp/random_configs.h"

namespace flashnext {
namespace {

using namespace test;

SessionOptions options(std::int32_t lanes) {
  SessionOptions o = cuda_options();
  o.lanes = lanes;
  return o;
}

TEST(RequestsGpu, ManyFromManyThreads) { check_stress(options(5), 200, 8); }
TEST(RequestsGpu, MoreLanesThanOneKernelHasRows) { check_stress(options(20), 200, 24); }

TEST(RequestsGpu, ManyFromManyThreadsWithExpertsInHostMemory) {
  SessionOptions o = offloaded(options(3), kDemoExperts / 4);
  o.policy = std::make_shared<WildPolicy>();
  o.cpu_misses = "2";
  o.plan_every = 2;
  check_stress(o, 200, 8);
}

TEST(RequestsGpu, WhatIsNoNumberEndsOneRequest) { check_not_a_number(options(2)); }
TEST(RequestsGpu, RandomConfigurations) { check_random_configs(cuda_options(), {"auto"}, 200); }

}  // namespace
}  // namespace flashnext
