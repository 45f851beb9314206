// The memory of a session before any of it is taken: everything that open() builds is built once on
// a device that only counts. What does not fit is refused with every part and the sum; where the
// experts do not fit on the device, the plan says how many of them a layer do.
#pragma once

#include "cpp/bank/bank.h"
#include "cpp/cache/expert_cache.h"
#include "cpp/session/session.h"

#include <cstdint>
#include <string>
#include <vector>

namespace flashnext {

// All allocations of one name in one space.
struct MemoryPart {
  Space space;
  std::string what;
  std::uint64_t bytes;
};

struct MemoryPlan {
  WeightOptions weights;  // what open() builds with
  EngineOptions engine;
  cache::CacheOptions cache;     // with offload
  bool offload = false;          // the routed experts live in a Bank
  std::int32_t lines = 0;        // with offload: experts a layer on the device
  std::uint64_t slice = 0;       // bytes of one line in every layer
  std::uint64_t bank_limit = 0;  // BankOptions::host_limit
  BankReport bank;               // what Bank::fill() will say, but for times and refused pins

  std::vector<MemoryPart> parts;  // in order of allocation
  std::uint64_t device_bytes = 0;
  std::uint64_t host_bytes = 0;  // pinned and pageable, the bank's included
  std::uint64_t bank_bytes = 0;  // of them, the bank's whole pages
  std::uint64_t device_limit = 0;
  std::uint64_t ngram_bytes = 0;  // of the n-gram table that stays in mapped files
  std::int32_t kv_pages = 0;      // of kPageTokens positions, for all lanes together
  std::uint64_t kv_page_bytes = 0;
};

// RAM that a session may take.
struct HostRoom {
  std::uint64_t free;
  std::uint64_t reserve;  // of it, left alone where host_limit does not say how much experts take
};
HostRoom this_host();

// Positions a sequence may hold: `window`, or for 0 the smaller of 32768 and the model's limit.
// Throws InputError.
std::int32_t resolve_window(const ModelShape& shape, std::int32_t window);

// What a cache of the bank's experts is about.
cache::CacheShape cache_shape(const Checkpoint& checkpoint, const Bank& bank);

// `sizes` is the device that will run the session, or one that stands for it: its kind, its sizes
// of scratch and its free memory are asked for, nothing is allocated on it. Throws OutOfMemory, and
// InputError for options that contradict each other.
MemoryPlan plan_memory(const Checkpoint& checkpoint, const SessionOptions& options,
                       const Device& sizes, const HostRoom& host = this_host());

}  // namespace flashnext
