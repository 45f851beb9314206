// Times of the DeltaNet and attention ops at the real dimensions, by replays of captured graphs:
// one row (every layer its own state, as in a token) and a prompt. Prints a table.
#include "cpp/base/half.h"
#include "cpp/device/cuda_device.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <vector>

namespace flashnext {
namespace {

constexpr int kLayers = 36;  // of DeltaNet; one state each

class Memory {
 public:
  Memory() : device_(make_cuda_device(0, {})), stream_(*device_) {}
  template <class T>
  T* put(const std::vector<T>& values) {
    T* at = room<T>(values.size());
    device_->copy_async(stream_.id(), at, values.data(), values.size() * sizeof(T));
    device_->synchronize(stream_.id());
    return at;
  }
  template <class T>
  T* room(std::size_t n) {
    blocks_.emplace_back(*device_, Space::kDevice, n * sizeof(T), "bench");
    return blocks_.back().template as<T>();
  }
  float* random(std::size_t n, float low, float high) {
    std::vector<float> values(n);
    for (float& v : values) {
      seed_ = seed_ * 6364136223846793005u + 1442695040888963407u;
      v = low + (high - low) * static_cast<float>(seed_ >> 40) * 0x1p-24f;
    }
    return put(values);
  }
  std::uint16_t* random_halves(std::size_t n) {
    std::vector<std::uint16_t> bits(n);
    for (std::uint16_t& b : bits) {
      seed_ = seed_ * 6364136223846793005u + 1442695040888963407u;
      b = f32_to_f16(static_cast<float>(seed_ >> 40) * 0x1p-23f - 1.0f);
    }
    return put(bits);
  }
  template <class Args>
  void with_workspace(Args& args) {
    const std::size_t bytes = device_->workspace_bytes(Args::kOp, &args);
    args.workspace = {bytes > 0 ? room<char>(bytes) : nullptr, bytes};
  }
  // Best of five timings of `replays` replays of what `enqueue` enqueues, in us a replay.
  double time(int replays, const std::function<void(Device&, StreamId)>& enqueue) {
    Capture capture(*device_, stream_.id());
    enqueue(*device_, stream_.id());
    const Graph graph = capture.finish();
    double best = 1e30;
    for (int i = 0; i < 5; ++i) {
      const auto start = std::chrono::steady_clock::now();
      for (int k = 0; k < replays; ++k) graph.replay(stream_.id());
      device_->synchronize(stream_.id());
      const std::chrono::duration<double, std::micro> spent =
          std::chrono::steady_clock::now() - start;
      best = std::min(best, spent.count() / replays);
    }
    return best;
  }

 private:
  std::unique_ptr<Device> device_;
  Stream stream_;
  std::vector<Block> blocks_;
  std::uint64_t seed_ = 1;
};

StepView one_segment(Memory& memory, int rows, int pos0, int pages) {
  std::vector<Row> of_step(static_cast<std::size_t>(rows));
  for (int r = 0; r < rows; ++r) of_step[static_cast<std::size_t>(r)] = {0, 0, 0, pos0 + r, 0, 0};
  std::vector<std::int32_t> order(static_cast<std::size_t>(pages));
  for (int i = 0; i < pages; ++i) order[static_cast<std::size_t>(i)] = i;
  std::shuffle(order.begin(), order.end(), std::mt19937(1));
  StepView view{};
  view.head = memory.put(std::vector<StepHead>{{rows, 1, 0, 0}});
  view.rows = memory.put(of_step);
  view.segments = memory.put(std::vector<Segment>{{0, rows, pos0, 0, 0, 0}});
  view.pages = memory.put(order);
  view.max_pages = pages;
  view.max_rows = rows;
  view.max_segments = 1;
  return view;
}

void report(const char* what, double us, double bytes) {
  std::printf("%-44s %10.2f us %9.1f GB/s\n", what, us, bytes / us * 1e-3);
}

void gdn(int rows) {
  Memory memory;
  const std::size_t n = static_cast<std::size_t>(rows);
  const GdnDims dims{16, 48, 128, 4, 0};
  const std::size_t channels = 80 * 128;
  const std::size_t state = 48 * 128 * 128;
  const int layers = rows == 1 ? kLayers : 1;
  const StepView step = one_segment(memory, rows, 5, 1);
  GdnConvArgs conv{};
  conv.step = step;
  conv.dims = dims;
  conv.u = memory.random(n * channels, -1, 1);
  conv.x = memory.random(n * 2560, -1, 1);
  conv.a = {memory.random_halves(48 * 2560), 2560, 48};
  conv.b = {memory.random_halves(48 * 2560), 2560, 48};
  conv.conv = memory.random(channels * 4, -1, 1);
  conv.rate = memory.random(48, 0.01f, 0.5f);
  conv.dt_bias = memory.random(48, -1, 1);
  conv.window = memory.random(channels * 3, -1, 1);
  conv.qkv = memory.room<float>(n * channels);
  conv.decay = memory.room<float>(n * 48);
  conv.beta = memory.room<float>(n * 48);
  memory.with_workspace(conv);
  GdnRecurArgs recur{};
  recur.step = step;
  recur.dims = dims;
  recur.qkv = conv.qkv;
  recur.decay = conv.decay;
  recur.beta = conv.beta;
  recur.o = memory.room<float>(n * 48 * 128);
  float* states = memory.random(state * static_cast<std::size_t>(layers), -0.1f, 0.1f);
  GdnGateArgs gate{};
  gate.rows = {&step.head->rows, 1, rows};
  gate.o = recur.o;
  gate.z = memory.random(n * 48 * 128, -3, 3);
  gate.w = memory.random(128, 0.5f, 1.5f);
  gate.y = memory.room<float>(n * 48 * 128);
  gate.eps = 1e-6f;
  gate.v_heads = 48;
  const int replays = rows == 1 ? 20 : 5;
  auto each = [&](auto enqueue) {
    return memory.time(replays, [&](Device& device, StreamId stream) {
      for (int l = 0; l < layers; ++l) enqueue(device, stream, l);
    }) / layers;
  };
  const std::string tag = " rows " + std::to_string(rows);
  const double row_bytes = 4.0 * static_cast<double>(n * channels);
  report(("gdn_conv" + tag).c_str(),
         each([&](Device& device, StreamId stream, int) { launch(device, stream, conv); }),
         2 * row_bytes);
  report(("gdn_recur" + tag).c_str(), each([&](Device& device, StreamId stream, int l) {
           recur.state = states + state * static_cast<std::size_t>(l);
           launch(device, stream, recur);
         }),
         row_bytes + 4.0 * static_cast<double>(n * 48 * 128) + 8.0 * static_cast<double>(state));
  report(("gdn_gate" + tag).c_str(),
         each([&](Device& device, StreamId stream, int) { launch(device, stream, gate); }),
         12.0 * static_cast<double>(n * 48 * 128));
  report(("the three, one after another," + tag).c_str(),
         each([&](Device& device, StreamId stream, int l) {
           launch(device, stream, conv);
           recur.state = states + state * static_cast<std::size_t>(l);
           launch(device, stream, recur);
           launch(device, stream, gate);
         }),
         0);
}

// Rows pos0 .. pos0 + rows - 1 of one sequence.
void attend(int rows, int pos0) {
  Memory memory;
  const std::size_t n = static_cast<std::size_t>(rows);
  const int context = pos0 + rows;
  const int pages = (context + kPageTokens - 1) / kPageTokens;
  const AttnDims dims{24, 2, 256, 64, 4, 128, 4, 512, 1e-6f};
  const std::size_t plane = static_cast<std::size_t>(pages) * 2 * kPageTokens * 256;
  AttnPrepareArgs prepare{};
  prepare.step = one_segment(memory, rows, pos0, pages);
  prepare.dims = dims;
  prepare.qg = memory.random(n * 24 * 512, -2, 2);
  prepare.k = memory.random(n * 512, -2, 2);
  prepare.v = memory.random(n * 512, -2, 2);
  prepare.index = memory.random(n * 640, -2, 2);
  prepare.q_norm = memory.random(256, 0.5f, 1.5f);
  prepare.k_norm = memory.random(256, 0.5f, 1.5f);
  prepare.iq_norm = memory.random(128, 0.5f, 1.5f);
  prepare.ik_norm = memory.random(128, 0.5f, 1.5f);
  prepare.rope = memory.random(static_cast<std::size_t>(context) * 64, -0.7f, 0.7f);
  prepare.planes.k = memory.random_halves(plane);
  prepare.planes.v = memory.random_halves(plane);
  prepare.planes.index_pooled = memory.random(static_cast<std::size_t>(pages) * 16 * 128, -2, 2);
  prepare.window = memory.random(3 * 128, -2, 2);
  prepare.slot_stride = 3 * 128;
  prepare.q = memory.room<float>(n * 24 * 256);
  prepare.iq = memory.room<float>(n * 512);
  IndexSelectArgs select{};
  select.step = prepare.step;
  select.dims = dims;
  select.iq = prepare.iq;
  select.planes = prepare.planes;
  select.blocks = memory.room<std::int32_t>(n * 512);
  select.count = memory.room<std::int32_t>(n);
  select.max_context = context;
  memory.with_workspace(select);
  AttentionArgs attention{};
  attention.step = prepare.step;
  attention.dims = dims;
  attention.q = prepare.q;
  attention.qg = prepare.qg;
  attention.blocks = select.blocks;
  attention.count = select.count;
  attention.planes = prepare.planes;
  attention.y = memory.room<float>(n * 24 * 256);
  attention.max_context = context;
  memory.with_workspace(attention);
  const int replays = rows <= 16 ? 50 : 3;
  const std::string tag = " rows " + std::to_string(rows) + " from " + std::to_string(pos0);
  double read = 0;
  double scanned = 0;
  for (int r = 0; r < rows; ++r) {
    read += 2048.0 * std::min(pos0 + r + 1, 2048 + (pos0 + r + 1) % 4);
    scanned += pos0 + r + 1 >= 2052 ? 128.0 * (pos0 + r + 1) : 0.0;
  }
  report(("attn_prepare" + tag).c_str(),
         memory.time(replays, [&](Device& d, StreamId s) { launch(d, s, prepare); }),
         static_cast<double>(n) * (24 * 768 + 1024 + 640) * 4.0);
  report(("index_select" + tag).c_str(),
         memory.time(replays, [&](Device& d, StreamId s) { launch(d, s, select); }), scanned);
  report(("attention" + tag).c_str(),
         memory.time(replays, [&](Device& d, StreamId s) { launch(d, s, attention); }), read);
  report(("the three, one after another," + tag).c_str(),
         memory.time(replays,
                     [&](Device& d, StreamId s) {
                       launch(d, s, prepare);
                       launch(d, s, select);
                       launch(d, s, attention);
                     }),
         0);
}

int run(bool only_prompts) {
  if (cuda_device_count() == 0) {
    std::fprintf(stderr, "attention_gpu_bench: no CUDA device\n");
    return 1;
  }
  if (!only_prompts) {
    gdn(1);
    gdn(8);
    attend(1, 2047);
    attend(1, 30000);
    attend(1, 262143);
    attend(4, 30000);
  }
  gdn(2048);
  gdn(8192);
  attend(512, 30000);
  attend(2048, 0);
  attend(8192, 0);
  return 0;
}

}  // namespace
}  // namespace flashnext

// `attention_gpu_bench prompts` leaves the short steps out.
int main(int argc, char** argv) {
  try {
    return flashnext::run(argc > 1 && std::string(argv[1]) == "prompts");
  } catch (const flashnext::Error& error) {
    std::fprintf(stderr, "attention_gpu_bench: %s\n", error.what());
    return 1;
  }
}
