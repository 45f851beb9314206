// A checkpoint whose tensors lie in synthetic memory.
#include "cpp/checkpoint/synthetic.h"

#include "cpp/checkpoint/bind.h"
#include "cpp/checkpoint/bind_synthetic.h"

#include <cstring>

namespace flashnext {
namespace {

Exl3Weight linear_of(const std::vector<SyntheticTensor>& members, const SyntheticMemory& memory) {
  const std::vector<std::int64_t>& trellis = members[0].shape;
  Exl3Weight w{};
  w.in = static_cast<std::int32_t>(16 * trellis[0]);
  w.out = static_cast<std::int32_t>(16 * trellis[1]);
  w.words = static_cast<std::int32_t>(trellis[2]);
  w.trellis = memory.at(members[0]);
  w.suh = memory.at(members[1]);
  w.svh = memory.at(members[2]);
  return w;
}

NgramTable ngram_of(const std::vector<SyntheticTensor>& members, const SyntheticMemory& memory) {
  NgramTable table;
  table.bias.resize(members[0].bytes() / 2);
  std::memcpy(table.bias.data(), memory.at(members[0]), members[0].bytes());
  table.offsets = members[1].fill.integers;
  table.sizes = members[2].fill.integers;
  table.multipliers = members[3].fill.integers;
  for (std::size_t i = 4; i < members.size(); ++i) {
    table.shards.push_back(memory.at(members[i]));
    table.rows += members[i].shape[0];
  }
  table.shard_rows = members[4].shape[0];
  table.row_bytes = static_cast<std::int32_t>(2 * members[4].shape[1]);
  table.bits = static_cast<std::int32_t>(members[4].shape[1] / 10);  // 1 + 10 K words
  return table;
}

}  // namespace

void bind_synthetic(Bound& bound, const SyntheticOptions& options, SyntheticHold& hold) {
  bound.folder = "in memory";
  bound.files = TensorFiles::view({});
  bound.table = tensor_table(bound.shape);
  bound.plain.reserve(bound.table.size());
  bound.linear.reserve(bound.table.size());
  hold.memory = std::make_shared<SyntheticMemory>(synthetic_tensors(bound.shape), options);
  const SyntheticMemory& memory = *hold.memory;
  for (const TensorRule& rule : bound.table) {
    const std::vector<SyntheticTensor> members = synthetic_tensors(bound.shape, rule);
    for (const SyntheticTensor& m : members) bound.family_bytes[rule.family] += m.bytes();
    if (rule.role == Role::kPlain) {
      const SyntheticTensor& t = members[0];
      hold.tensors.push_back({t.name, t.dtype, t.shape, memory.at(t), t.bytes(), 0});
      bound.plain.emplace(rule.name, &hold.tensors.back());
    } else if (rule.role == Role::kExl3) {
      bound.linears.push_back(linear_of(members, memory));
      bound.linear.emplace(rule.name, &bound.linears.back());
    } else {
      bound.ngram = ngram_of(members, memory);
    }
  }
}

}  // namespace flashnext
