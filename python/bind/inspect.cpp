// flashnext._core.inspect: what is in a checkpoint folder, problems included.
#include "cpp/base/errors.h"
#include "cpp/checkpoint/checkpoint.h"
#include "cpp/model/state.h"
#include "python/bind/bind.h"

#include <filesystem>
#include <map>

namespace flashnext::bind {

namespace {

struct Family {
  std::int64_t tensors = 0;
  std::uint64_t bytes = 0;
  std::map<double, std::int64_t> bits;  // K -> linears
};

std::uint64_t linear_bytes(const Exl3Weight& w) {
  const auto in = static_cast<std::uint64_t>(w.in), out = static_cast<std::uint64_t>(w.out);
  return in / 16 * (out / 16) * static_cast<std::uint64_t>(w.words) * 2 + 2 * (in + out) + 4;
}

void describe(const Checkpoint& c, py::dict& d) {
  std::map<std::string, Family> families;
  std::uint64_t experts = 0, exl3_dense = 0, fp16 = 0, embedding = 0, table = 0, mtp = 0,
                parameters = 0;
  for (const TensorRule& rule : c.table()) {
    Family& f = families[rule.family];
    std::uint64_t bytes = 0;
    if (rule.role == Role::kExl3) {
      const Exl3Weight& w = c.linear(rule.name);
      bytes = linear_bytes(w);
      f.tensors += 4;
      ++f.bits[w.words / 16.0];
      parameters += static_cast<std::uint64_t>(w.in) * static_cast<std::uint64_t>(w.out);
    } else if (rule.role == Role::kPlain) {
      const Tensor& t = c.plain(rule.name);
      bytes = t.bytes;
      ++f.tensors;
      parameters += t.bytes / item_bytes(t.dtype);
    } else {
      const NgramTable& n = c.ngram();
      bytes = static_cast<std::uint64_t>(n.rows) * static_cast<std::uint64_t>(n.row_bytes);
      f.tensors += static_cast<std::int64_t>(n.shards.size());
      ++f.bits[n.bits];
      parameters +=
          static_cast<std::uint64_t>(n.rows) * static_cast<std::uint64_t>(c.shape().ngram_width);
    }
    f.bytes += bytes;
    const bool is_expert = rule.name.find(".mlp.experts.") != std::string::npos;
    (rule.name.starts_with("mtp.")                         ? mtp
     : rule.role == Role::kNgramTable                      ? table
     : rule.name.find("embed_tokens") != std::string::npos ? embedding
     : is_expert                                           ? experts
     : rule.role == Role::kExl3                            ? exl3_dense
                                                           : fp16) += bytes;
  }
  py::list list;
  std::uint64_t total = 0;
  for (const auto& [name, f] : families) {
    py::dict e, bits;
    for (const auto& [k, n] : f.bits) bits[py::float_(k)] = n;
    e["family"] = name;
    e["tensors"] = f.tensors;
    e["bytes"] = f.bytes;
    e["bits"] = bits;
    total += f.bytes;
    list.append(e);
  }
  d["families"] = list;
  d["parameters"] = parameters;
  d["bytes"] = total;
  py::dict places;
  places["experts"] = experts;
  places["dense"] = exl3_dense;
  places["fp16"] = fp16;
  places["embedding"] = embedding;
  places["ngram_table"] = table;
  places["mtp"] = mtp;
  places["kv_per_token"] = page_bytes(c.shape(), false) / kPageTokens;
  places["state_per_lane"] =
      static_cast<std::uint64_t>(slot_layout(c.shape(), false).floats) * sizeof(float);
  d["places"] = places;
}

py::dict inspect(const std::string& path) {
  if (!std::filesystem::is_directory(path)) {
    throw InputError("\"" + path +
                     "\" is not a folder; give the folder that holds the *.safetensors files");
  }
  py::dict d;
  py::list problems, files;
  d["folder"] = path;
  d["shape"] = py::none();
  d["families"] = py::list();
  d["parameters"] = 0;
  d["bytes"] = 0;
  d["places"] = py::dict();
  d["notes"] = py::list();
  try {
    const Checkpoint c = Checkpoint::open(path);
    d["shape"] = shape_dict(c.shape());
    d["notes"] = c.notes();
    for (const TensorFiles::File& file : c.files().files()) {
      py::dict f;
      f["name"] = file.name;
      f["bytes"] = file.bytes;
      files.append(f);
    }
    describe(c, d);
  } catch (const CheckpointError& e) {
    problems.append(e.what());
  }
  d["files"] = files;
  d["problems"] = problems;
  return d;
}

}  // namespace

void bind_inspect(py::module_& m) { m.def("inspect", &inspect, py::arg("path")); }

}  // namespace flashnext::bind
