// Bank: the routed experts in host memory, one line an expert, as the device's cache reads them.
//
// Owns one region a layer (anonymous memory, page-aligned), filled by parallel large reads and then
// pinned: memory that was written first is pinned ten times faster than it is allocated pinned.
// Where RAM or the limit on locked memory ends, the other experts stay in the mapped files; the
// processor computes those. The Checkpoint and the Device must outlive the Bank. Immutable after
// fill(); any thread may read.
#pragma once

#include "cpp/checkpoint/checkpoint.h"
#include "cpp/device/device.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace flashnext {

struct MemberBytes;

struct BankOptions {
  std::uint64_t host_limit = 0;  // bytes of RAM that lines may take; 0: what the machine has free
  int threads = 0;               // readers; 0: one a core
  bool mtp = false;              // the experts of the MTP head too
};

struct BankReport {
  std::uint64_t pinned_bytes = 0;
  std::uint64_t pageable_bytes = 0;  // lines in RAM that the system would not pin
  std::uint64_t mapped_bytes = 0;    // left in the files
  double fill_seconds = 0;           // from the first byte read to the last pinned
  double pin_seconds = 0;  // of them, in pinning: a layer is pinned while the next ones fill
  std::string note;        // why not everything is pinned, and what that means; empty: it is
};

// The same bytes by how the system holds them: what the host device pins is ordinary memory.
BankReport held_by_system(BankReport report, const Device& device);

class Bank {
 public:
  struct Layer {
    LineLayout layout;
    std::int32_t words[3];             // u16 words a tile of gate, up, down
    const std::byte* lines;            // (experts) lines, or null when none is in RAM
    std::vector<ExpertRef> host;       // (experts) where the processor reads it
    std::vector<std::int32_t> pinned;  // (experts) 1: its line is pinned
  };

  // `progress` hears stage "experts" in bytes.
  static Bank fill(const Checkpoint& checkpoint, Device& device, const BankOptions& options,
                   const Progress& progress = {});
  // The same layers without memory; tells `plan` what fill() would pin.
  static Bank plan(const Checkpoint& checkpoint, Device& plan, const BankOptions& options);

  ~Bank();
  Bank(Bank&&) noexcept;
  Bank& operator=(Bank&&) = delete;

  // Layers with experts: those of the trunk, then that of the MTP head when it is wanted.
  const std::vector<Layer>& layers() const noexcept { return layers_; }
  const BankReport& report() const noexcept { return report_; }

 private:
  Bank() = default;
  struct Memory;  // regions, unpinned and unmapped at the end
  void reserve(const Checkpoint& checkpoint, Device& device, const BankOptions& options,
               std::vector<MemberBytes>& bytes);
  bool pin(std::size_t layer, bool may_pin);

  std::unique_ptr<Memory> memory_;
  std::vector<Layer> layers_;
  BankReport report_;
};

// Where the members of an expert of these shapes lie in a line.
LineLayout line_layout(std::int32_t dim, std::int32_t inner, const std::int32_t words[3]);

}  // namespace flashnext
