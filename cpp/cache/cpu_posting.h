// One posting of the mailbox as units of work for several threads (internal to CpuExperts).
//
// Units, in the order of their numbers; jobs of one expert are a segment:
//   prepare   (job, gate or up): the job's row of x, rotated and quantised
//   first     (segment, gate or up, block of 128 columns, part of the inputs); the last unit of a
//             segment also takes silu(gate) * up and prepares it for down
//   second    (segment, block of 128 columns of down, part of the inputs) -> rows of mail.y
// With few blocks a thread, the inputs of a block are divided as well: sums are exact integers, so
// no division changes a bit. A unit waits only for units of lower numbers; when threads claim units
// in order and run theirs in order, the lowest one unfinished is always at work.
#pragma once

#include "cpp/device/mailbox.h"
#include "cpp/device/ops.h"
#include "cpp/exl3/exl3.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace flashnext::cache {

// The routed experts of one layer in host memory; they outlive whoever computes them.
struct LayerExperts {
  std::span<const ExpertRef> experts;
  std::int32_t words[3];  // u16 words a tile of gate, up, down
};

struct CpuShape {
  std::int32_t dim;    // multiple of 128
  std::int32_t inner;  // multiple of 128
  std::int32_t slots;  // a row
  std::int32_t levels;
  std::int32_t max_pairs;  // jobs of one posting; also rows of mail.y
};

class CpuPosting {
 public:
  CpuPosting(const MailView& mail, std::vector<LayerExperts> layers, const CpuShape& shape,
             exl3::Isa isa, int threads);

  // Reads the posting in the mailbox. Returns its number of units; the posting before must have
  // none at work. LogicError for a posting outside the bounds.
  std::uint32_t open();
  // Runs one unit. `next`: the one that the thread runs after it, whose weights are asked of the
  // memory meanwhile; `unit` itself when that is not known. False: it gave up waiting because
  // `abandon` was set.
  bool run(std::uint32_t unit, std::uint32_t next, const std::atomic<bool>& abandon) noexcept;

  std::int32_t jobs() const noexcept { return jobs_; }
  std::int32_t experts() const noexcept { return segments_; }
  std::int64_t bytes() const noexcept { return bytes_; }  // of the posting's weights

 private:
  struct alignas(64) Segment {
    Exl3Weight weights[3];  // gate, up, down
    std::int32_t begin;     // first job
    std::int32_t count;
    alignas(64) std::atomic<std::int32_t> unprepared[2];  // jobs of gate, up
    std::atomic<std::int32_t> products_left;              // blocks of gate and up
    std::atomic<std::int32_t> is_active;                  // 1: ready for down
  };
  struct alignas(64) Count {
    std::atomic<std::int32_t> left;
  };
  // A product whose inputs are divided into `parts`.
  struct Division {
    std::int32_t parts;
    std::unique_ptr<Count[]> unfinished;  // (kUnitsAThread * threads) parts of a block
    std::int64_t* sums;                   // (blocks, parts, rows, 128)
  };
  struct Free {
    void operator()(std::byte* p) const noexcept;
  };

  void divide(Division& d, std::int32_t blocks, std::int32_t inputs) noexcept;
  // One part of one block of a product.
  struct Place {
    Segment* segment;
    int projection;      // gate, up, down
    std::int32_t index;  // of the block in its Division
    std::int32_t block;
    std::int32_t part;
  };
  // Of a unit that is no preparation.
  Place place_of(std::uint32_t unit) noexcept;
  Division& division_of(const Place& at) noexcept { return at.projection == 2 ? down_ : up_; }
  exl3::Upcoming weights_of(const Place& at) noexcept;
  bool is_product(std::uint32_t unit) const noexcept {
    return unit >= static_cast<std::uint32_t>(2 * jobs_);
  }
  void prepare(std::int32_t unit) noexcept;
  // Waits for `count` to be `value`; the weights of `at` come in the meantime.
  bool wait_for(const std::atomic<std::int32_t>& count, std::int32_t value, const Place& at,
                const std::atomic<bool>& abandon) noexcept;
  // True when the block's rows of y are complete.
  bool multiply(const Place& at, const exl3::Prepared& p, const exl3::Upcoming& next, float* y,
                const std::int32_t* rows) noexcept;
  void activate(Segment& s) noexcept;

  const MailView mail_;
  const std::vector<LayerExperts> layers_;
  const CpuShape shape_;
  const exl3::Isa isa_;
  const std::int32_t threads_;
  const std::int32_t inner_blocks_;
  const std::int32_t dim_blocks_;

  std::unique_ptr<std::byte[], Free> memory_;
  exl3::Prepared in_[2];                // (max pairs, dim) for gate and up
  exl3::Prepared middle_;               // (max pairs, inner) for down
  float* product_[2];                   // (max pairs, inner) gate, up; then gate is the activation
  std::unique_ptr<Segment[]> segment_;  // (max pairs)
  std::vector<std::int32_t> pairs_;     // (max pairs) of the jobs
  std::vector<std::int32_t> segment_of_;  // (max pairs) of the jobs
  Division up_, down_;

  std::int32_t jobs_ = 0;
  std::int32_t segments_ = 0;
  std::int32_t most_rows_ = 0;  // of a segment
  std::int64_t bytes_ = 0;
};

// One turn of a wait: the first turns keep the core, later ones offer it to others, so that fewer
// cores than threads still move.
void wait_turn(int turn, int awake_turns = 2000) noexcept;

}  // namespace flashnext::cache
