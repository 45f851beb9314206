#include "cpp/checkpoint/fingerprint.h"

#include "cpp/base/hash.h"

#include <algorithm>

namespace flashnext {

namespace {

constexpr std::size_t kRouterBytes = 2048;  // of each router: less than a page

template <class T>
std::uint64_t add(std::uint64_t h, T value) noexcept {
  return fnv64(&value, sizeof value, h);
}

}  // namespace

std::uint64_t fingerprint(const Checkpoint& c) {
  const ModelShape& s = c.shape();
  std::uint64_t h = kFnv64Seed;
  for (const std::int32_t n : {s.hidden, s.layers, s.vocab, s.experts, s.top_k, s.mtp_layers}) {
    h = add(h, n);
  }
  for (const LayerKind kind : s.layer_kinds) h = add(h, kind);
  for (const TensorRule& rule : c.table()) {
    h = add(fnv64_text(rule.name, h), rule.role);
    for (const std::int64_t n : rule.shape) h = add(h, n);
    if (rule.role == Role::kExl3) {
      h = add(h, c.linear(rule.name).words);
    } else if (rule.role == Role::kPlain) {
      const Tensor& t = c.plain(rule.name);
      h = add(h, t.dtype);
      if (rule.name.ends_with(".mlp.gate.weight")) {
        h = fnv64(t.data, std::min(t.bytes, kRouterBytes), h);
      }
    }
  }
  return h;
}

}  // namespace flashnext
