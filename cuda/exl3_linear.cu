// The op kExl3Linear: one GEMV for few rows; for the most of a decode step a transform and a
// product in units; else a transform and a GEMM over chunks of rows. Which of them runs cannot
// change a bit.
#include "cuda/check.h"
#include "cuda/exl3_jobs.h"
#include "cuda/exl3_trellis.cuh"
#include "cuda/exl3_workspace.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"

#include <algorithm>

namespace flashnext::cuda {

namespace {

constexpr std::size_t kDigitBytes = std::size_t{104} << 20;  // of a chunk of rows

struct Parts {
  std::int32_t capacity;  // rows of a chunk
  std::int8_t* planes;    // (n, digits, capacity, in)
  RowScale* scales;       // (n, capacity)
};

int digits_of(std::int32_t levels) { return levels > 127 ? 2 : 1; }

bool is_gemv(const Exl3LinearArgs& args) {
  return args.rows.max * digits_of(args.levels) <= kGroupColumns;
}
bool is_units(const Exl3LinearArgs& args) { return !is_gemv(args) && args.rows.max <= kDecodeRows; }

Parts place(const Exl3LinearArgs& args, Scratch& scratch) {
  if (is_gemv(args)) return {args.rows.max, nullptr, nullptr};
  const std::size_t in = static_cast<std::size_t>(args.w[0].in);
  const std::size_t planes = static_cast<std::size_t>(args.n * digits_of(args.levels));
  const std::int32_t fit = static_cast<std::int32_t>(kDigitBytes / (planes * in)) / 512 * 512;
  Parts p{};
  p.capacity = std::min(args.rows.max, std::max(512, fit));
  const std::size_t capacity = static_cast<std::size_t>(p.capacity);
  p.planes = scratch.take<std::int8_t>(planes * capacity * in);
  p.scales = scratch.take<RowScale>(static_cast<std::size_t>(args.n) * capacity);
  return p;
}

bool valid(const Exl3LinearArgs& args) {
  if (args.n < 1 || args.n > kMaxLinears || args.rows.max < 0) return false;
  for (std::int32_t i = 0; i < args.n; ++i) {
    const Exl3Weight& w = args.w[i];
    if (w.in != args.w[0].in || w.in % 128 != 0 || w.out % 128 != 0 || w.out <= 0) return false;
  }
  return args.levels == 32258 || args.levels == 127;
}

}  // namespace

std::size_t workspace_bytes(const Exl3LinearArgs& args) {
  Scratch scratch(nullptr);
  place(args, scratch);
  return scratch.used();
}

void exl3_linear(cudaStream_t stream, const Exl3LinearArgs& args) {
  check(valid(args), "exl3 linear: shapes or levels");
  if (args.rows.max == 0) return;
  Scratch scratch(args.workspace.data);
  const Parts parts = place(args, scratch);
  check(scratch.used() <= args.workspace.bytes, "exl3 linear: workspace");

  Jobs all{};
  all.rows = args.rows;
  all.slots = 1;
  all.capacity = parts.capacity;
  all.in = args.w[0].in;
  all.levels = args.levels;
  all.digits = digits_of(args.levels);
  all.x = args.x;
  all.planes = parts.planes;
  all.scales = parts.scales;
  const auto add = [&](Jobs& jobs, int i, int first) {
    const Exl3Weight& w = args.w[i];
    Projection& p = jobs.projection[jobs.n++];
    p.trellis = w.trellis;
    p.suh = reinterpret_cast<const __half*>(w.suh);
    p.svh = reinterpret_cast<const __half*>(w.svh);
    p.bias = w.bias;
    p.y = args.y[i] + static_cast<std::int64_t>(first) * w.out;
    p.out = w.out;
    p.words = w.words;
    p.plane = i;
    p.strip0 = jobs.strips;
    jobs.strips += w.out / 128;
  };
  if (is_gemv(args)) {
    for (int i = 0; i < args.n; ++i) add(all, i, 0);
    return exl3_gemv(stream, all, 1);
  }

  TransformJobs transform{};
  transform.rows = args.rows;
  transform.slots = 1;
  transform.capacity = parts.capacity;
  transform.in = all.in;
  transform.levels = args.levels;
  transform.n = args.n;
  transform.x = args.x;
  for (int i = 0; i < args.n; ++i) {
    transform.suh[i] = reinterpret_cast<const __half*>(args.w[i].suh);
  }
  transform.planes = parts.planes;
  transform.scales = parts.scales;
  for (int first = 0; first < args.rows.max; first += parts.capacity) {
    transform.first = first;
    exl3_transform(stream, transform);
    if (is_units(args)) {
      for (int i = 0; i < args.n; ++i) add(all, i, 0);
      return exl3_units(stream, all, 0);
    }
    // Linears of one rate share a launch.
    bool done[kMaxLinears] = {};
    for (int i = 0; i < args.n; ++i) {
      if (done[i]) continue;
      Jobs jobs = all;
      jobs.first = first;
      for (int j = i; j < args.n; ++j) {
        if (args.w[j].words != args.w[i].words) continue;
        done[j] = true;
        add(jobs, j, first);
      }
      exl3_gemm(stream, jobs, ceil_div(parts.capacity, kTileRows));
    }
  }
}

}  // namespace flashnext::cuda
