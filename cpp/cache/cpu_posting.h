// One posting of the mailbox as units of work for several threads (internal to CpuExperts).
//
// Units, in the order of their numbers; jobs of one expert are a segment:
//   prepare   (job, gate or up): the job's row of x, rotated and quantised
//   first     (segment, gate or up, group of columns, part of the inputs); the last unit of a
//             segment also takes silu(gate) * up and prepares it for down
//   second    (segment, group of columns of down, part of the inputs) -> rows of mail.y
// By columns, a group is one block of 128 columns, and with few blocks a thread its inputs are
// divided as well. By inputs, when every expert has one row, a group is as wide as a page of
// memory: the weights of a unit are then long runs, and while some are computed, the next ones or
// the head of the thread's next unit are fetched. Sums are exact integers, so no division changes a
// bit.
//
// A unit waits only for units of lower numbers. Units are claimed in order, and a thread runs those
// it owns in order, so the lowest unfinished unit is always at work.
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

enum class CpuDivision { kColumns, kInputs };

class CpuPosting {
 public:
  static constexpr std::uint32_t kNoUnit = 0xFFFFFFFFu;

  CpuPosting(const MailView& mail, std::vector<LayerExperts> layers, const CpuShape& shape,
             exl3::Isa isa, int threads, CpuDivision division);

  // Reads the posting in the mailbox. Returns its number of units; the posting before must have
  // none at work. LogicError for a posting outside the bounds.
  std::uint32_t open();
  // Runs one unit, and fetches the head of unit `next`, or kNoUnit, meanwhile. False: it gave up
  // waiting because `abandon` was set.
  bool run(std::uint32_t unit, std::uint32_t next, const std::atomic<bool>& abandon) noexcept;
  // Whether who owns `unit` may claim another one before running it: when enough units of the phase
  // are left for all.
  bool may_claim_ahead(std::uint32_t unit) const noexcept;

  std::int32_t jobs() const noexcept { return jobs_; }
  std::int32_t experts() const noexcept { return segments_; }
  std::int64_t bytes() const noexcept { return bytes_; }  // of the posting's weights

 private:
  struct alignas(64) Segment {
    Exl3Weight weights[3];  // gate, up, down
    std::int32_t begin;     // first job
    std::int32_t count;
    alignas(64) std::atomic<std::int32_t> unprepared[2];  // jobs of gate, up
    std::atomic<std::int32_t> products_left;              // groups of gate and up
    std::atomic<std::int32_t> is_active;                  // 1: ready for down
  };
  struct alignas(64) Count {
    std::atomic<std::int32_t> left;
  };
  // Products in groups of `width` blocks whose inputs are divided into `parts`.
  struct Division {
    std::int32_t width;
    std::int32_t groups;  // of a product
    std::int32_t parts;
    std::unique_ptr<Count[]> unfinished;  // (groups of all products) parts of a group
    std::int64_t* sums;                   // (groups of all products, parts, width, rows, 128)
  };
  struct Free {
    void operator()(std::byte* p) const noexcept;
  };

  // One part of one group of a product.
  struct Unit {
    Segment* segment;
    std::int32_t projection;
    std::int32_t index;        // of the group among all products
    std::int32_t block, part;  // first block
  };

  std::int32_t firsts() const noexcept { return segments_ * 2 * up_.groups * up_.parts; }
  std::int32_t seconds() const noexcept { return segments_ * down_.groups * down_.parts; }
  Unit unit_of(std::int32_t i) const noexcept;  // 0: the first after the prepare units
  void divide(Division& d, std::int32_t products, std::int32_t blocks,
              std::int32_t inputs) noexcept;
  void prepare(std::int32_t unit) noexcept;
  bool first(const Unit& u, const exl3::Ahead& next, const std::atomic<bool>& abandon) noexcept;
  bool second(const Unit& u, const exl3::Ahead& next, const std::atomic<bool>& abandon) noexcept;
  exl3::Ahead head_of(std::uint32_t unit) const noexcept;
  // One part of one group; true when the group's rows of y are complete.
  bool multiply(const Unit& u, const exl3::Prepared& p, Division& d, const exl3::Ahead& next,
                float* y, const std::int32_t* rows) noexcept;
  void activate(Segment& s) noexcept;

  const MailView mail_;
  const std::vector<LayerExperts> layers_;
  const CpuShape shape_;
  const exl3::Isa isa_;
  const std::int32_t threads_;
  const CpuDivision division_;
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
