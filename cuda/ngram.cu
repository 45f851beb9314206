// The n-gram table: row ids, gather and decode (spec/model.md 6, spec/exl3.md 5). Bit-equal to the
// host.
#include "cpp/base/errors.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/rows.h"

#include <cuda_fp16.h>

namespace flashnext::cuda {

namespace {

constexpr int kMaxRowBytes = 1024;

// A thread a (row, head).
__global__ void __launch_bounds__(128) hash_kernel(const NgramHashArgs args) {
  pdl_trigger();
  pdl_wait();
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const int r = i / args.heads;
  const int h = i % args.heads;
  if (r >= args.step.head->rows) return;
  const Row row = args.step.rows[r];
  const auto product = [&](std::int32_t id, int m) {
    return static_cast<std::uint64_t>(static_cast<std::int64_t>(id)) *
           static_cast<std::uint64_t>(args.multipliers[m]);
  };
  std::uint64_t hash = product(row.token, 0) ^ product(row.prev1, 1);
  if (h >= args.heads / 2) {
    // Nothing before a separator is seen.
    hash ^= product(row.prev1 == args.separator ? args.separator : row.prev2, 2);
  }
  const std::int64_t size = args.sizes[h];
  std::int64_t id = static_cast<std::int64_t>(hash) % size;
  if (id < 0) id += size;
  args.ids[i] = args.offsets[h] + id;
}

// A warp a (row, head): rows of the table lie at any alignment, mostly of two bytes.
__global__ void __launch_bounds__(128) gather_kernel(const NgramGatherArgs args) {
  pdl_trigger();
  pdl_wait();
  const int i = static_cast<int>(blockIdx.x * 4 + threadIdx.x / 32);
  const int lane = static_cast<int>(threadIdx.x % 32);
  if (i >= rows_now(args.rows) * args.heads) return;
  const std::int64_t id = args.ids[i];
  std::byte* to = args.packed + static_cast<std::size_t>(i) * args.row_bytes;
  if (id < 0 || id >= args.table_rows) {  // cannot come from the hash: NaN scales will tell
    for (int b = lane; b < args.row_bytes; b += 32) to[b] = std::byte{0xFF};
    return;
  }
  const std::byte* from = args.shards[id / args.shard_rows] +
                          static_cast<std::size_t>(id % args.shard_rows) * args.row_bytes;
  if ((reinterpret_cast<std::uintptr_t>(from) | reinterpret_cast<std::uintptr_t>(to) |
       static_cast<std::uintptr_t>(args.row_bytes)) %
          2 ==
      0) {
    const auto* from16 = reinterpret_cast<const std::uint16_t*>(from);
    auto* to16 = reinterpret_cast<std::uint16_t*>(to);
    for (int b = lane; b < args.row_bytes / 2; b += 32) to16[b] = from16[b];
  } else {
    for (int b = lane; b < args.row_bytes; b += 32) to[b] = from[b];
  }
}

// Block (row, head), a thread a value.
__global__ void __launch_bounds__(256) decode_kernel(const NgramDecodeArgs args) {
  __shared__ std::uint8_t bytes[kMaxRowBytes];
  pdl_trigger();
  pdl_wait();
  const int i = static_cast<int>(blockIdx.x);
  if (i >= rows_now(args.rows) * args.heads) return;
  const auto* packed = reinterpret_cast<const std::uint8_t*>(args.packed) +
                       static_cast<std::size_t>(i) * args.row_bytes;
  for (int b = static_cast<int>(threadIdx.x); b < args.row_bytes;
       b += static_cast<int>(blockDim.x)) {
    bytes[b] = packed[b];
  }
  __syncthreads();
  const auto word = [&](int w) {
    return static_cast<std::uint32_t>(bytes[2 * w]) |
           (static_cast<std::uint32_t>(bytes[2 * w + 1]) << 8);
  };
  const auto half = [](std::uint32_t bits) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  };
  const int bits = args.bits;
  for (int v = static_cast<int>(threadIdx.x); v < args.width; v += static_cast<int>(blockDim.x)) {
    const float bias =
        args.bias != nullptr ? half(args.bias[(i % args.heads) * args.width + v]) : 0.0f;
    float value;
    if (bits == 0) {
      value = half(word(v));
    } else {
      // The newest symbol is lowest; older ones follow until 16 bits are full, around the ring.
      std::uint32_t state = 0;
      int at = v;
      for (int shift = 0; shift < 16; shift += bits) {
        const int bit = at * bits;
        const int w = 1 + bit / 16;
        std::uint32_t pair = word(w);
        if (bit % 16 + bits > 16) pair |= word(w + 1) << 16;
        const std::uint32_t symbol = (pair >> (bit % 16)) & ((1u << bits) - 1u);
        state |= symbol << shift;
        at = at == 0 ? args.width - 1 : at - 1;
      }
      const std::uint32_t product = (state & 0xFFFFu) * 0x83DCD12Du;
      const int sum = static_cast<int>((product & 255u) + ((product >> 8) & 255u) +
                                       ((product >> 16) & 255u) + (product >> 24));
      const float code = __half2float(
          __float2half_rn(static_cast<float>(887 * sum - 452608) * (1.0f / 131072.0f)));
      value = code * half(word(0));
    }
    if (bits != 0 || args.bias != nullptr) value = value + bias;
    args.e[static_cast<std::size_t>(i) * args.width + v] = __half2float(__float2half_rn(value));
  }
}

}  // namespace

void ngram_hash(cudaStream_t stream, const NgramHashArgs& args) {
  check(args.heads >= 2 && args.heads % 2 == 0 && args.heads <= kMaxNgramHeads,
        "ngram_hash: number of heads");
  if (args.step.max_rows <= 0) return;
  launch_pdl(stream, hash_kernel,
             dim3(static_cast<unsigned>(ceil_div(args.step.max_rows * args.heads, 128))), dim3(128),
             0, args);
}

void ngram_gather(cudaStream_t stream, const NgramGatherArgs& args) {
  if (args.rows.max <= 0) return;
  launch_pdl(stream, gather_kernel,
             dim3(static_cast<unsigned>(ceil_div(args.rows.max * args.heads, 4))), dim3(128), 0,
             args);
}

void ngram_decode(cudaStream_t stream, const NgramDecodeArgs& args) {
  check(args.bits >= 0 && args.bits <= 8, "ngram_decode: bits");
  check(args.row_bytes <= kMaxRowBytes, "ngram_decode: row too long");
  if (args.rows.max <= 0) return;
  launch_pdl(stream, decode_kernel, dim3(static_cast<unsigned>(args.rows.max * args.heads)),
             dim3(static_cast<unsigned>(args.width <= 128   ? 128
                                        : args.width <= 160 ? 160
                                                            : 256)),
             0, args);
}

}  // namespace flashnext::cuda
