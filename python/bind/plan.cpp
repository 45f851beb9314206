// flashnext._core.plan: the memory of a session on a card that need not be here.
#include "cpp/checkpoint/synthetic.h"
#include "cpp/device/cuda_device.h"
#include "cpp/device/host_device.h"
#include "cpp/device/plan_device.h"
#include "cpp/model/state.h"
#include "cpp/session/memory_plan.h"
#include "python/bind/outside.h"
#include "python/bind/py_session.h"

namespace flashnext::bind {

namespace {

// "synthetic:LIKE" or "synthetic:LIKE:LAYERS", or a folder.
Checkpoint open_checkpoint(const std::string& path, const Progress& progress) {
  constexpr std::string_view kPrefix = "synthetic:";
  if (!path.starts_with(kPrefix)) return Checkpoint::open(path, progress);
  std::string like = path.substr(kPrefix.size());
  std::int32_t layers = 0;
  if (const std::size_t colon = like.find(':'); colon != std::string::npos) {
    const std::string count = like.substr(colon + 1);
    if (count.empty() || count.size() > 4 ||
        count.find_first_not_of("0123456789") != std::string::npos) {
      throw InputError("\"" + path + "\": after the second colon stands a number of layers");
    }
    layers = std::stoi(count);
    like.resize(colon);
  }
  // Values are never looked at.
  return Checkpoint::synthetic(synthetic_shape(like, layers), {1, std::size_t{1} << 20});
}

// Bytes of the weights that every token reads, whatever its experts: all of the trunk and the head,
// but no routed expert, and of tables a few rows only.
std::uint64_t dense_bytes(const Checkpoint& c) {
  std::uint64_t bytes = 0;
  for (const TensorRule& rule : c.table()) {
    if (rule.name.starts_with("mtp.") || rule.family == "experts" || rule.family == "embedding") {
      continue;
    }
    if (rule.role == Role::kPlain) {
      bytes += c.plain(rule.name).bytes;
    } else if (rule.role == Role::kExl3) {
      const Exl3Weight& w = c.linear(rule.name);
      const auto in = static_cast<std::uint64_t>(w.in), out = static_cast<std::uint64_t>(w.out);
      bytes += in / 16 * (out / 16) * static_cast<std::uint64_t>(w.words) * 2 + 2 * (in + out);
    }
  }
  return bytes;
}

py::dict token_facts(const Checkpoint& c, const SessionOptions& o) {
  const ModelShape& s = c.shape();
  std::uint64_t lines = 0;  // one of every layer of the trunk
  std::int32_t attention = 0;
  for (std::int32_t l = 0; l < s.layers; ++l) {
    const std::string expert =
        "model.language_model.layers." + std::to_string(l) + ".mlp.experts.0.";
    const Exl3Weight& gate = c.linear(expert + "gate_proj");
    const std::int32_t words[3] = {gate.words, c.linear(expert + "up_proj").words,
                                   c.linear(expert + "down_proj").words};
    lines += static_cast<std::uint64_t>(line_layout(gate.in, gate.out, words).bytes);
    if (s.layer_kinds[static_cast<std::size_t>(l)] == LayerKind::kAttention) ++attention;
  }
  py::dict d;
  d["dense_bytes"] = dense_bytes(c);
  d["expert_bytes"] = lines * static_cast<std::uint64_t>(s.top_k);
  // Recurrent state is read and written.
  d["state_bytes"] = 2 * static_cast<std::uint64_t>(slot_layout(s, false).floats) * sizeof(float);
  // Keys and values of the selected tokens, fp16, and a pooled index key, fp32, of every block.
  const auto read = static_cast<std::uint64_t>(std::min(o.window, s.index_budget));
  const auto blocks = static_cast<std::uint64_t>(o.window / s.index_block);
  const std::uint64_t keys = read * 2 * static_cast<std::uint64_t>(s.kv_dim()) * 2;
  const std::uint64_t index = blocks * static_cast<std::uint64_t>(s.index_dim) * sizeof(float);
  d["attention_bytes"] = static_cast<std::uint64_t>(attention) * (keys + index);
  return d;
}

py::dict plan_dict(const Checkpoint& c, const SessionOptions& o, const MemoryPlan& plan) {
  py::dict d;
  py::list parts;
  for (const MemoryPart& part : plan.parts) {
    py::dict e;
    e["space"] = to_string(part.space);
    e["what"] = part.what;
    e["bytes"] = part.bytes;
    parts.append(e);
  }
  d["parts"] = parts;
  d["experts"] = plan.offload ? "offload" : "resident";
  d["lines"] = plan.offload ? plan.lines : c.shape().experts;
  d["experts_per_layer"] = c.shape().experts;
  d["top_k"] = c.shape().top_k;
  d["layers"] = c.shape().layers;
  d["line_bytes_all_layers"] = plan.slice;
  d["device_bytes"] = plan.device_bytes;
  d["device_limit"] = plan.device_limit;
  d["host_bytes"] = plan.host_bytes;
  d["bank_pinned_bytes"] = plan.bank.pinned_bytes;
  d["bank_mapped_bytes"] = plan.bank.mapped_bytes;
  d["bank_note"] = plan.bank.note;
  d["ngram_mapped_bytes"] = plan.ngram_bytes;
  d["window"] = o.window;
  d["lanes"] = o.lanes;
  d["kv_pages"] = plan.kv_pages;
  d["kv_page_tokens"] = kPageTokens;
  d["kv_page_bytes"] = plan.kv_page_bytes;
  d["token"] = token_facts(c, o);
  d["exact_scratch"] = cuda_built();
  d["notes"] = c.notes();
  return d;
}

py::dict plan(const std::string& path, std::uint64_t vram, std::uint64_t ram, std::uint64_t reserve,
              std::int32_t window, std::int32_t lanes, std::int32_t chunk, std::int32_t snapshots,
              const std::string& experts, std::int32_t cache_lines, std::uint64_t host_limit,
              std::uint64_t kv_bytes, bool mtp, const py::object& progress) {
  SessionOptions o;
  o.lanes = lanes;
  o.chunk = chunk;
  o.snapshots = snapshots;
  o.experts = experts;
  o.cache_lines = cache_lines;
  o.host_limit = host_limit;
  o.kv_bytes = kv_bytes;
  o.mtp = mtp;
  const Progress hook = progress_hook(progress);
  std::optional<Checkpoint> checkpoint;
  MemoryPlan planned;
  {
    const Outside outside;
    checkpoint.emplace(open_checkpoint(path, hook));
    o.window = resolve_window(checkpoint->shape(), window);
    // Without CUDA in this build the host device's sizes stand in for the card's.
    const std::unique_ptr<Device> host = make_host_device({});
    const PlanDevice card("cuda", "a card that is not here", vram, [&](Op op, const void* args) {
      return cuda_built() ? cuda_workspace_bytes(op, args) : host->workspace_bytes(op, args);
    });
    planned = plan_memory(*checkpoint, o, card, {ram, reserve});
  }
  return plan_dict(*checkpoint, o, planned);
}

}  // namespace

void bind_plan(py::module_& m) {
  m.def("plan", &plan, py::arg("path"), py::kw_only(), py::arg("vram"), py::arg("ram"),
        py::arg("reserve") = 0, py::arg("window") = 0, py::arg("lanes") = 1,
        py::arg("chunk") = SessionOptions{}.chunk,
        py::arg("snapshots") = SessionOptions{}.snapshots, py::arg("experts") = "auto",
        py::arg("cache_lines") = 0, py::arg("host_limit") = 0, py::arg("kv_bytes") = 0,
        py::arg("mtp") = false, py::arg("progress") = py::none());
}

}  // namespace flashnext::bind
