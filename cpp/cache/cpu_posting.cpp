#include "cpp/cache/cpu_posting.h"

#include "cpp/base/errors.h"
#include "cpp/exl3/activation.h"

#include <algorithm>
#include <cstdlib>
#include <new>
#include <thread>
#include <utility>

namespace flashnext::cache {

namespace {

constexpr std::int32_t kBlock = 128;
// Fewer units a thread than this leave threads without work at the end of a phase.
constexpr std::int32_t kUnitsAThread = 4;
constexpr std::int32_t kDividedRows = 8;  // more rows a segment: enough work in a block

std::int32_t first_input(std::int32_t inputs, std::int32_t part, std::int32_t parts) {
  return part * (inputs / kBlock) / parts * kBlock;
}

std::size_t padded(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace

void wait_turn(int turn, int awake_turns) noexcept {
  if (turn >= awake_turns) return std::this_thread::yield();
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

void CpuPosting::Free::operator()(std::byte* p) const noexcept { std::free(p); }

CpuPosting::CpuPosting(const MailView& mail, std::vector<LayerExperts> layers,
                       const CpuShape& shape, exl3::Isa isa, int threads)
    : mail_(mail),
      layers_(std::move(layers)),
      shape_(shape),
      isa_(isa),
      threads_(threads),
      inner_blocks_(shape.inner / kBlock),
      dim_blocks_(shape.dim / kBlock) {
  check(shape.dim > 0 && shape.dim % kBlock == 0 && shape.inner > 0 && shape.inner % kBlock == 0,
        "cpu experts: sizes must be multiples of 128");
  check(shape.slots > 0 && shape.max_pairs > 0 && threads > 0, "cpu experts: empty shape");
  const std::size_t pairs = static_cast<std::size_t>(shape.max_pairs);
  const std::size_t most_blocks = static_cast<std::size_t>(kUnitsAThread * threads);
  const std::size_t in = padded(exl3::prepared_bytes(shape.max_pairs, shape.dim));
  const std::size_t middle = padded(exl3::prepared_bytes(shape.max_pairs, shape.inner));
  const std::size_t product = padded(pairs * static_cast<std::size_t>(shape.inner) * sizeof(float));
  // Parts of all blocks are fewer than twice the units wanted.
  const std::size_t sums = 2 * most_blocks * kDividedRows * kBlock * sizeof(std::int64_t);
  const std::size_t bytes = 2 * in + middle + 2 * product + 2 * sums;
  memory_.reset(static_cast<std::byte*>(std::aligned_alloc(256, bytes)));
  if (memory_ == nullptr) throw std::bad_alloc();
  std::fill_n(memory_.get(), bytes, std::byte{});  // no page is touched for the first time later
  std::byte* at = memory_.get();
  const auto take = [&at](std::size_t n) { return std::exchange(at, at + n); };
  for (exl3::Prepared& p : in_) p = exl3::place_prepared(take(in), shape.max_pairs, shape.dim);
  middle_ = exl3::place_prepared(take(middle), shape.max_pairs, shape.inner);
  for (float*& p : product_) p = reinterpret_cast<float*>(take(product));
  for (Division* d : {&up_, &down_}) {
    d->parts = 1;
    d->unfinished = std::make_unique<Count[]>(most_blocks);
    d->sums = reinterpret_cast<std::int64_t*>(take(sums));
  }
  segment_ = std::make_unique<Segment[]>(pairs);
  pairs_.resize(pairs);
  segment_of_.resize(pairs);
}

std::uint32_t CpuPosting::open() {
  const std::int32_t layer = mail_.head->layer;
  const std::int32_t jobs = mail_.head->num_jobs;
  check(layer >= 0 && static_cast<std::size_t>(layer) < layers_.size(),
        "cpu experts: a posting names a layer that does not exist");
  check(jobs >= 0 && jobs <= shape_.max_pairs, "cpu experts: a posting has too many jobs");
  const LayerExperts& from = layers_[static_cast<std::size_t>(layer)];
  jobs_ = jobs;
  segments_ = most_rows_ = 0;
  bytes_ = 0;
  std::int32_t last = -1;
  for (std::int32_t i = 0; i < jobs; ++i) {
    const MailJob job = mail_.jobs[i];
    check(job.expert >= 0 && static_cast<std::size_t>(job.expert) < from.experts.size(),
          "cpu experts: a posting names an expert that does not exist");
    check(job.pair >= 0 && job.pair < shape_.max_pairs,
          "cpu experts: a posting names a pair that does not exist");
    if (job.expert != last || segment_.get()[segments_ - 1].count == exl3::kRowGroup) {
      const ExpertRef& ref = from.experts[static_cast<std::size_t>(job.expert)];
      Segment& s = segment_.get()[segments_++];
      for (int p = 0; p < 3; ++p) {
        check(ref.trellis[p] != nullptr, "cpu experts: an expert is not in host memory");
        const std::int32_t in = p == 2 ? shape_.inner : shape_.dim;
        const std::int32_t out = p == 2 ? shape_.dim : shape_.inner;
        s.weights[p] = {ref.trellis[p], ref.suh[p], ref.svh[p], nullptr, in, out, from.words[p], 0};
        bytes_ += std::int64_t{in / 16} * (out / 16) * from.words[p] * 2 + 2 * (in + out);
      }
      s.begin = i;
      s.count = 0;
      s.products_left.store(2 * inner_blocks_, std::memory_order_relaxed);
      s.is_active.store(0, std::memory_order_relaxed);
      last = job.expert;
    }
    Segment& s = segment_.get()[segments_ - 1];
    ++s.count;
    for (auto& n : s.unprepared) n.store(s.count, std::memory_order_relaxed);
    most_rows_ = std::max(most_rows_, s.count);
    pairs_.data()[i] = job.pair;
    segment_of_.data()[i] = segments_ - 1;
  }
  divide(up_, segments_ * 2 * inner_blocks_, shape_.dim);
  divide(down_, segments_ * dim_blocks_, shape_.inner);
  return static_cast<std::uint32_t>(2 * jobs_ + segments_ * 2 * inner_blocks_ * up_.parts +
                                    segments_ * dim_blocks_ * down_.parts);
}

void CpuPosting::divide(Division& d, std::int32_t blocks, std::int32_t inputs) noexcept {
  d.parts = 1;
  const std::int32_t wanted = kUnitsAThread * threads_;
  if (threads_ == 1 || blocks == 0 || blocks >= wanted || most_rows_ > kDividedRows) return;
  d.parts = std::min((wanted + blocks - 1) / blocks, inputs / kBlock);
  for (std::int32_t i = 0; i < blocks; ++i) {
    d.unfinished.get()[i].left.store(d.parts, std::memory_order_relaxed);
  }
}

bool CpuPosting::run(std::uint32_t unit, std::uint32_t next,
                     const std::atomic<bool>& abandon) noexcept {
  if (!is_product(unit)) {
    if (is_product(next)) {
      const Place then = place_of(next);
      exl3::prefetch(then.segment->weights[then.projection], weights_of(then));
    }
    prepare(static_cast<std::int32_t>(unit));
    return true;
  }
  const Place at = place_of(unit);
  Segment& s = *at.segment;
  const exl3::Upcoming then = next != unit ? weights_of(place_of(next)) : exl3::Upcoming{};
  if (at.projection == 2) {
    if (!wait_for(s.is_active, 1, at, abandon)) return false;
    multiply(at, exl3::rows_of(middle_, s.begin, s.count), then, mail_.y, pairs_.data() + s.begin);
    return true;
  }
  if (!wait_for(s.unprepared[at.projection], 0, at, abandon)) return false;
  float* y = product_[at.projection] + std::int64_t{s.begin} * shape_.inner;
  const bool is_whole =
      multiply(at, exl3::rows_of(in_[at.projection], s.begin, s.count), then, y, nullptr);
  if (is_whole && s.products_left.fetch_sub(1, std::memory_order_acq_rel) == 1) activate(s);
  return true;
}

CpuPosting::Place CpuPosting::place_of(std::uint32_t unit) noexcept {
  std::int32_t i = static_cast<std::int32_t>(unit) - 2 * jobs_;
  const std::int32_t blocks = 2 * inner_blocks_;  // of a segment's gate and up
  const std::int32_t firsts = segments_ * blocks * up_.parts;
  if (i < firsts) {
    const std::int32_t index = i / up_.parts;
    const std::int32_t local = index % blocks;
    return {&segment_.get()[index / blocks], local / inner_blocks_, index, local % inner_blocks_,
            i % up_.parts};
  }
  i -= firsts;
  const std::int32_t index = i / down_.parts;
  return {&segment_.get()[index / dim_blocks_], 2, index, index % dim_blocks_, i % down_.parts};
}

exl3::Upcoming CpuPosting::weights_of(const Place& at) noexcept {
  const Exl3Weight& w = at.segment->weights[at.projection];
  return exl3::upcoming(w, at.block, first_input(w.in, at.part, division_of(at).parts));
}

bool CpuPosting::wait_for(const std::atomic<std::int32_t>& count, std::int32_t value,
                          const Place& at, const std::atomic<bool>& abandon) noexcept {
  if (count.load(std::memory_order_acquire) == value) return true;
  exl3::prefetch(at.segment->weights[at.projection], weights_of(at));
  for (int turn = 0; count.load(std::memory_order_acquire) != value; ++turn) {
    if (abandon.load(std::memory_order_relaxed)) return false;
    wait_turn(turn);
  }
  return true;
}

void CpuPosting::prepare(std::int32_t unit) noexcept {
  const std::int32_t job = unit / 2;
  const int projection = unit % 2;
  Segment& s = segment_.get()[segment_of_.data()[job]];
  const std::int64_t row = pairs_.data()[job] / shape_.slots;
  exl3::prepare(s.weights[projection], mail_.x + row * shape_.dim, shape_.dim, shape_.levels, isa_,
                0, 1, exl3::rows_of(in_[projection], job, 1));
  s.unprepared[projection].fetch_sub(1, std::memory_order_acq_rel);
}

void CpuPosting::activate(Segment& s) noexcept {
  for (std::int32_t job = s.begin; job < s.begin + s.count; ++job) {
    const std::int64_t at = std::int64_t{job} * shape_.inner;
    exl3::silu_times(isa_, product_[0] + at, product_[1] + at, shape_.inner);
    exl3::prepare(s.weights[2], product_[0] + at, shape_.inner, shape_.levels, isa_, 0, 1,
                  exl3::rows_of(middle_, job, 1));
  }
  s.is_active.store(1, std::memory_order_release);
}

bool CpuPosting::multiply(const Place& at, const exl3::Prepared& p, const exl3::Upcoming& next,
                          float* y, const std::int32_t* rows) noexcept {
  const Exl3Weight& w = at.segment->weights[at.projection];
  Division& d = division_of(at);
  if (d.parts == 1) {
    exl3::multiply(w, p, isa_, at.block, at.block + 1, y, w.out, rows, next);
    return true;
  }
  const std::int64_t size = std::int64_t{most_rows_} * kBlock;
  std::int64_t* all = d.sums + at.index * d.parts * size;
  exl3::part_sums(w, p, isa_, at.block, first_input(w.in, at.part, d.parts),
                  first_input(w.in, at.part + 1, d.parts), all + at.part * size, next);
  if (d.unfinished.get()[at.index].left.fetch_sub(1, std::memory_order_acq_rel) != 1) return false;
  const std::int64_t n = std::int64_t{p.rows} * kBlock;
  for (std::int32_t other = 1; other < d.parts; ++other) {
    for (std::int64_t i = 0; i < n; ++i) all[i] += all[other * size + i];
  }
  exl3::finish_sums(w, p, isa_, at.block, all, y, w.out, rows);
  return true;
}

}  // namespace flashnext::cache
