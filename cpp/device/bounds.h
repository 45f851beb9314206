// What this machine can do at best, measured: the bounds that benches are held against. The CUDA
// part is answered by cuda_absent.cpp in a build without CUDA.
#pragma once

#include "cpp/exl3/exl3.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace flashnext {

// Rates of the processor, in bytes (of packed weights, for EXL3) a second. Best of a few runs over
// more memory than the caches hold, unless said otherwise.
struct HostBounds {
  int threads = 0;
  double core_read = 0;         // one thread reading
  double all_read = 0;          // all threads reading
  double core_exl3 = 0;         // one thread, one-row expert products at K = 3
  double all_exl3 = 0;          // all threads
  double core_read_cached = 0;  // the same with what is read in the caches
  double all_read_cached = 0;
  double core_exl3_cached = 0;
  double all_exl3_cached = 0;
  double core_exl3_macs = 0;  // EXL3 products a second, 128 rows at once
  double all_exl3_macs = 0;
};
// `bytes` of memory are used for the runs beyond the caches.
HostBounds measure_host_bounds(int threads, exl3::Isa isa,
                               std::size_t bytes = std::size_t{256} << 20);

struct CopyRate {
  std::size_t bytes;  // of one copy
  double to_device;   // bytes a second, from pinned memory
  double to_host;
};

struct CudaBounds {
  double read = 0;          // bytes a second that a kernel reads
  double copy = 0;          // bytes a second, read plus written
  double graph_node = 0;    // seconds an empty kernel takes inside a graph of 1,000 in a row
  double graph_launch = 0;  // seconds from launching a graph of one empty kernel to its end
  double int8_ops = 0;      // operations (2 a product) a second, mma m16n8k32
  double half_flops = 0;    // the same of fp16 mma m16n8k16 with fp32 sums
  std::vector<CopyRate> link;
};
// Throws InputError when there is no such device, OutOfMemory, DeviceError.
CudaBounds measure_cuda_bounds(int ordinal);

// The machine as receipts describe it.
struct CudaMachine {
  std::string name;
  std::string uuid;  // 16 bytes as hex
  int major = 0, minor = 0, multiprocessors = 0;
  std::size_t memory_bytes = 0;
  int driver = 0, runtime = 0;  // as 1000 major + 10 minor
  int clock_khz = 0, memory_clock_khz = 0;
  bool ecc = false;
  std::string compiler;  // nvcc, of this build
};
CudaMachine cuda_machine(int ordinal);

}  // namespace flashnext
