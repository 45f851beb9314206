#include "cpp/bank/bank.h"

#include "cpp/bank/host_ram.h"
#include "cpp/bank/line_filler.h"
#include "cpp/device/resolve.h"

#include <algorithm>
#include <chrono>
#include <sys/mman.h>
#include <unistd.h>

namespace flashnext {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr const char* kWhat = "routed experts";

std::size_t round_up(std::size_t n, std::size_t unit) { return (n + unit - 1) / unit * unit; }

// Prefixes of the layers with experts, in the order of Bank::layers().
std::vector<std::string> expert_layers(const Checkpoint& checkpoint, bool mtp) {
  std::vector<std::string> prefixes;
  for (std::int32_t l = 0; l < checkpoint.shape().layers; ++l) {
    prefixes.push_back("model.language_model.layers." + std::to_string(l) + ".mlp.experts.");
  }
  if (mtp && checkpoint.has_mtp()) prefixes.push_back("mtp.layers.0.mlp.experts.");
  return prefixes;
}

// Members as they lie in the checkpoint, every expert in the files yet.
Bank::Layer describe(const Checkpoint& checkpoint, const std::string& prefix, MemberBytes& bytes) {
  static const char* const kNames[3] = {".gate_proj", ".up_proj", ".down_proj"};
  const auto experts = static_cast<std::size_t>(checkpoint.shape().experts);
  Bank::Layer layer{};
  layer.host.resize(experts);
  layer.pinned.assign(experts, 0);
  Exl3Weight gate{};
  for (std::size_t e = 0; e < experts; ++e) {
    for (std::size_t i = 0; i < 3; ++i) {
      const Exl3Weight& w = checkpoint.linear(prefix + std::to_string(e) + kNames[i]);
      layer.host[e].trellis[i] = w.trellis;
      layer.host[e].suh[i] = w.suh;
      layer.host[e].svh[i] = w.svh;
      layer.words[i] = w.words;
      if (i == 0) gate = w;
    }
  }
  layer.layout = line_layout(gate.in, gate.out, layer.words);
  bytes = member_bytes(gate.in, gate.out, layer.words);
  return layer;
}

// How many lines of each layer go to RAM: the same number everywhere, the rest to the first layers.
std::vector<std::int32_t> lines_in_ram(const std::vector<Bank::Layer>& layers,
                                       std::uint64_t limit) {
  std::uint64_t slice = 0;
  for (const Bank::Layer& layer : layers) slice += static_cast<std::uint64_t>(layer.layout.bytes);
  std::vector<std::int32_t> counts;
  for (const Bank::Layer& layer : layers) {
    const auto experts = static_cast<std::uint64_t>(layer.host.size());
    counts.push_back(static_cast<std::int32_t>(std::min(experts, slice == 0 ? 0 : limit / slice)));
  }
  std::uint64_t left = slice == 0 ? 0 : limit % slice;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const auto bytes = static_cast<std::uint64_t>(layers[i].layout.bytes);
    if (counts[i] == static_cast<std::int32_t>(layers[i].host.size()) || left < bytes) continue;
    ++counts[i];
    left -= bytes;
  }
  return counts;
}

std::string bytes_text(std::uint64_t bytes) { return std::to_string(bytes) + " bytes"; }

// Seconds since `start`.
double since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

LineLayout line_layout(std::int32_t dim, std::int32_t inner, const std::int32_t words[3]) {
  const MemberBytes bytes = member_bytes(dim, inner, words);
  LineLayout layout{};
  const auto place = [&](std::size_t size) {
    return std::exchange(layout.bytes,
                         layout.bytes + static_cast<std::int64_t>(round_up(size, 256)));
  };
  for (std::size_t i = 0; i < 3; ++i) layout.trellis[i] = place(bytes.trellis[i]);
  for (std::size_t i = 0; i < 3; ++i) layout.suh[i] = place(bytes.suh[i]);
  for (std::size_t i = 0; i < 3; ++i) layout.svh[i] = place(bytes.svh[i]);
  return layout;
}

// The regions of the layers. Nothing of a region is memory before it is written.
struct Bank::Memory {
  struct Region {
    std::byte* data = nullptr;
    std::size_t bytes = 0;  // whole pages
    void* mapping = nullptr;
    std::size_t mapped = 0;
    std::int32_t lines = 0;
    bool pinned = false;
  };

  explicit Memory(Device& on) : device(on) {}
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() {
    for (const Region& region : regions) {
      if (region.pinned) device.unpin(region.data);
      if (region.mapping != nullptr) ::munmap(region.mapping, region.mapped);
    }
  }

  // False when there is no address space for it.
  bool add(std::size_t bytes, std::int32_t lines) {
    Region& region = regions.emplace_back();
    if (bytes == 0) return true;
    const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    region.bytes = round_up(bytes, page);
    // Huge pages need a start that suits them: fewer faults here, fewer entries to pin.
    region.mapped = region.bytes + kHugePage;
    void* mapping = ::mmap(nullptr, region.mapped, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) {
      region = {};
      return false;
    }
    region.mapping = mapping;
    region.data = reinterpret_cast<std::byte*>(
        round_up(reinterpret_cast<std::uintptr_t>(mapping), kHugePage));
    region.lines = lines;
    const std::size_t huge = region.bytes / kHugePage * kHugePage;
    if (huge > 0) ::madvise(region.data, huge, MADV_HUGEPAGE);  // a hint
    return true;
  }

  Device& device;
  std::vector<Region> regions;  // a layer
};

Bank::~Bank() = default;
Bank::Bank(Bank&&) noexcept = default;

// What fill() and plan() share: the layers, their lines in RAM and the regions for them.
void Bank::reserve(const Checkpoint& checkpoint, Device& device, const BankOptions& options,
                   std::vector<MemberBytes>& bytes) {
  memory_ = std::make_unique<Memory>(device);
  for (const std::string& prefix : expert_layers(checkpoint, options.mtp)) {
    layers_.push_back(describe(checkpoint, prefix, bytes.emplace_back()));
  }
  const std::uint64_t free = free_ram(), kept = ram_reserve();
  const std::uint64_t limit =
      options.host_limit > 0 ? options.host_limit : free - std::min(kept, free);
  const std::vector<std::int32_t> counts = lines_in_ram(layers_, limit);
  std::uint64_t refused = 0;
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    Layer& layer = layers_[i];
    const auto line = static_cast<std::uint64_t>(layer.layout.bytes);
    const auto all = line * layer.host.size();
    std::uint64_t placed = line * static_cast<std::uint64_t>(counts[i]);
    if (!memory_->add(placed, counts[i])) refused += std::exchange(placed, 0);
    layer.lines = memory_->regions[i].data;
    report_.mapped_bytes += all - placed;
  }
  if (report_.mapped_bytes == 0) return;
  report_.note =
      bytes_text(report_.mapped_bytes) +
      " of experts stay in the checkpoint's files, where the processor computes them: " +
      (refused > 0 ? "the system refused " + bytes_text(refused) + " of address space (ulimit -v)"
       : options.host_limit > 0
           ? "RAM for them is limited to " + bytes_text(limit) + " (host_limit)"
           : bytes_text(free) + " of RAM are free, of which " + bytes_text(kept) + " are kept");
}

// A layer's lines are written: pins them and counts them where they are. False when they stay
// pageable.
bool Bank::pin(std::size_t i, bool may_pin) {
  Memory::Region& region = memory_->regions[i];
  if (region.lines == 0) return may_pin;
  const std::uint64_t bytes = static_cast<std::uint64_t>(region.lines) *
                              static_cast<std::uint64_t>(layers_[i].layout.bytes);
  region.pinned = may_pin && memory_->device.pin(region.data, region.bytes, kWhat);
  (region.pinned ? report_.pinned_bytes : report_.pageable_bytes) += bytes;
  if (region.pinned) {
    std::fill_n(layers_[i].pinned.begin(), region.lines, 1);
  }
  return region.pinned;
}

Bank Bank::plan(const Checkpoint& checkpoint, Device& plan, const BankOptions& options) {
  Bank bank;
  std::vector<MemberBytes> bytes;
  bank.reserve(checkpoint, plan, options, bytes);
  bool pinning = true;
  for (std::size_t i = 0; i < bank.layers_.size(); ++i) pinning = bank.pin(i, pinning);
  return bank;
}

Bank Bank::fill(const Checkpoint& checkpoint, Device& device, const BankOptions& options,
                const Progress& progress) {
  Bank bank;
  std::vector<MemberBytes> bytes;
  bank.reserve(checkpoint, device, options, bytes);
  std::vector<LineFiller::Layer> jobs;
  for (std::size_t i = 0; i < bank.layers_.size(); ++i) {
    const Layer& layer = bank.layers_[i];
    const Memory::Region& region = bank.memory_->regions[i];
    jobs.push_back({layer.layout, bytes[i], layer.host.data(), region.data, region.lines});
  }
  const auto start = std::chrono::steady_clock::now();
  bool pinning = true;
  LineFiller(checkpoint, std::move(jobs), options.threads)
      .run(
          [&](std::size_t i) {
            // The layers that follow fill meanwhile.
            const auto before = std::chrono::steady_clock::now();
            pinning = bank.pin(i, pinning);
            bank.report_.pin_seconds += since(before);
          },
          progress);
  bank.report_.fill_seconds = since(start);
  for (std::size_t i = 0; i < bank.layers_.size(); ++i) {
    Layer& layer = bank.layers_[i];
    for (std::int32_t e = 0; e < bank.memory_->regions[i].lines; ++e) {
      layer.host[static_cast<std::size_t>(e)] =
          expert_in_line(layer.layout, layer.lines + e * layer.layout.bytes);
    }
  }
  BankReport& report = bank.report_;
  if (report.pageable_bytes > 0) {
    report.note += (report.note.empty() ? "" : "; ") + bytes_text(report.pageable_bytes) +
                   " of experts are in RAM that the system would not lock, where the processor "
                   "computes them: raise the limit on locked memory (ulimit -l)";
  }
  return bank;
}

BankReport held_by_system(BankReport report, const Device& device) {
  if (device.kind() == "host") report.pageable_bytes += std::exchange(report.pinned_bytes, 0);
  return report;
}

}  // namespace flashnext
