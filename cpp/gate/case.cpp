#include "cpp/gate/case.h"

#include "cpp/base/half.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace flashnext::gate {

namespace {

constexpr std::size_t kAlignment = 256;

// Where each buffer of a case lies in one staging block; the head of the step comes last.
struct Placement {
  std::vector<std::size_t> at, room;  // a buffer each: offset, bytes
  std::size_t total = 0;

  Placement(const Case& c, std::int32_t max_rows) {
    for (const Buffer& b : c.buffers) {
      at.push_back(total);
      room.push_back(b.row_bytes != 0 ? z(max_rows) * b.row_bytes : b.data.size());
      total += (room.back() + kAlignment - 1) / kAlignment * kAlignment;
    }
    total += kAlignment;
  }
};

float value_at(const Buffer& b, const std::vector<std::byte>& data, std::size_t i) {
  if (b.halves) {
    std::uint16_t h;
    std::memcpy(&h, data.data() + 2 * i, 2);
    return f16_to_f32(h);
  }
  float f;
  std::memcpy(&f, data.data() + 4 * i, 4);
  return f;
}

// |got - want| / |want| in the Euclidean norm; infinity when a number is missing. What is a NaN
// pattern on both sides was written by neither.
double relative_error(const Buffer& b, const std::vector<std::byte>& got,
                      const std::vector<std::byte>& want) {
  double error = 0;
  double size = 0;
  const std::size_t n = want.size() / (b.halves ? 2 : 4);
  for (std::size_t i = 0; i < n; ++i) {
    const double g = value_at(b, got, i);
    const double w = value_at(b, want, i);
    if (b.row_bytes == 0 && std::isnan(g) && std::isnan(w)) continue;
    if (!std::isfinite(g) || !std::isfinite(w)) return std::numeric_limits<double>::infinity();
    error += (g - w) * (g - w);
    size += w * w;
  }
  return std::sqrt(error / (size > 0 ? size : 1));
}

}  // namespace

bool Case::by_row() const {
  for (const Buffer& b : buffers) {
    if (b.output && b.row_bytes == 0) return false;
  }
  return segments == 0;
}

Results run(Device& device, const Case& c, const RunOptions& options) {
  const std::int32_t count = options.count < 0 ? c.rows : options.count;
  const std::int32_t max_rows = options.max_rows < 0 ? count : options.max_rows;
  Stream stream(device);
  const Placement place(c, max_rows);
  // One pinned block for all, since pinning takes long; device memory by parts, so that a tool that
  // watches allocations sees a write past the end of one.
  const Block staging(device, Space::kPinned, place.total, "staging");
  std::vector<Block> blocks;
  std::vector<Block> workspaces;
  std::vector<std::shared_ptr<void>> companions;
  Placed placed{&device,  stream.id(), {},    nullptr,    count,
                max_rows, &workspaces, false, &companions};
  const auto upload = [&](const void* data, std::size_t bytes, std::size_t room, std::size_t at) {
    std::byte* to = staging.as<std::byte>() + at;
    if (bytes > 0) std::memcpy(to, data, bytes);
    std::memset(to + bytes, 0xFF, room - bytes);
    blocks.emplace_back(device, Space::kDevice, room, "case");
    device.copy_async(stream.id(), blocks.back().data(), to, room);
    return blocks.back().data();
  };
  for (std::size_t i = 0; i < c.buffers.size(); ++i) {
    const Buffer& b = c.buffers[i];
    const std::byte* data = b.data.data();
    std::size_t bytes = b.data.size();
    std::vector<std::byte> linked;
    if (b.link) {
      linked = b.data;
      b.link(placed.pointers, linked);
      data = linked.data();
    } else if (b.row_bytes != 0) {
      data += z(options.first) * b.row_bytes;
      bytes = z(count) * b.row_bytes;
    }
    placed.pointers.push_back(upload(data, bytes, place.room[i], place.at[i]));
  }
  const StepHead head{count, c.segments, c.outputs >= 0 ? c.outputs : count, 0};
  placed.head =
      static_cast<StepHead*>(upload(&head, sizeof head, sizeof head, place.total - kAlignment));
  device.synchronize(stream.id());
  if (options.graph) {
    placed.prepare_only = true;
    c.launch(placed);
    placed.prepare_only = false;
    Capture capture(device, stream.id());
    c.launch(placed);
    const Graph graph = capture.finish();
    graph.replay(stream.id());
    device.synchronize(stream.id());
  } else {
    c.launch(placed);
    device.synchronize(stream.id());
  }
  Results results;
  for (std::size_t i = 0; i < c.buffers.size(); ++i) {
    if (!c.buffers[i].output) continue;
    const std::byte* from = staging.as<std::byte>() + place.at[i];
    device.copy_async(stream.id(), staging.as<std::byte>() + place.at[i], placed.pointers[i],
                      place.room[i]);
    device.synchronize(stream.id());
    const std::size_t bytes =
        c.buffers[i].row_bytes != 0 ? z(count) * c.buffers[i].row_bytes : place.room[i];
    results.emplace_back(from, from + bytes);
  }
  return results;
}

Comparison compare(const Case& c, const Results& got, const Results& want) {
  Comparison result;
  std::size_t at = 0;
  for (const Buffer& b : c.buffers) {
    if (!b.output) continue;
    const std::vector<std::byte>& g = got[at];
    const std::vector<std::byte>& w = want[at++];
    result.tolerance = std::max(result.tolerance, b.tolerance);
    std::string detail;
    if (g.size() != w.size()) {
      detail = b.name + " has another size";
    } else if (b.tolerance == 0) {
      std::size_t i = 0;
      while (i < w.size() && g[i] == w[i]) ++i;
      if (i < w.size()) {
        detail =
            b.name + " differs at byte " + std::to_string(i) + " of " + std::to_string(w.size());
      }
    } else {
      const double error = relative_error(b, g, w);
      result.max_error = std::max(result.max_error, error);
      if (!(error <= b.tolerance)) detail = b.name + " is too far off: " + std::to_string(error);
    }
    if (detail.empty()) continue;
    result.passed = false;
    if (result.detail.empty()) result.detail = detail;
  }
  return result;
}

std::string differs(const Case& c, const Results& part, const Results& whole, std::int32_t first) {
  std::size_t at = 0;
  for (const Buffer& b : c.buffers) {
    if (!b.output) continue;
    const std::size_t begin = z(first) * b.row_bytes;
    const std::vector<std::byte>& p = part[at];
    const std::vector<std::byte>& w = whole[at++];
    if (begin + p.size() > w.size()) return b.name + " has another size";
    if (!std::equal(p.begin(), p.end(), w.begin() + static_cast<std::ptrdiff_t>(begin))) {
      return b.name + " differs";
    }
  }
  return {};
}

const std::vector<float>& Random::pool() {
  if (pool_.empty()) {
    for (int i = 0; i < 65536; ++i) pool_.push_back(normal());
  }
  return pool_;
}

std::vector<float> Random::floats(std::size_t n, float scale, float shift) {
  std::vector<float> v(n);
  if (n < 65536) {
    for (float& x : v) x = shift + normal(scale);
  } else {
    const std::vector<float>& from = pool();
    for (float& x : v) x = shift + scale * from[engine_() & 65535u];
  }
  return v;
}

std::vector<std::uint16_t> Random::halves(std::size_t n, float scale) {
  const std::vector<float>& from = pool();
  std::vector<std::uint16_t> v(n);
  for (std::uint16_t& x : v) x = f32_to_f16(scale * from[engine_() & 65535u]);
  return v;
}

std::vector<std::byte> Random::bytes(std::size_t n) {
  std::vector<std::byte> v(n);
  for (std::size_t i = 0; i + 4 <= n; i += 4) {
    const auto word = static_cast<std::uint32_t>(engine_());
    std::memcpy(v.data() + i, &word, 4);
  }
  for (std::size_t i = n / 4 * 4; i < n; ++i) v[i] = static_cast<std::byte>(engine_() & 255u);
  return v;
}

}  // namespace flashnext::gate
