#include "cpp/bank/weights.h"

#include "cpp/bank/placer.h"

#include <algorithm>
#include <cmath>
#include <string>

namespace flashnext {

namespace {

constexpr const char* kProjections[3] = {"gate_proj", "up_proj", "down_proj"};
const std::string kText = "model.language_model.";

// bf16 (vocab, hidden).
const Tensor& embedding_of(const Checkpoint& checkpoint) {
  const std::string name = kText + "embed_tokens.weight";
  const Tensor& t = checkpoint.plain(name);
  if (t.dtype != Dtype::kBF16) {
    throw CheckpointError(name + ": dtype " + std::string(to_string(t.dtype)) +
                          ", this engine reads a BF16 token embedding; convert it to BF16");
  }
  return t;
}

// The one description of what goes where; run with a counting Placer it sizes the arena, with a
// placing one it fills it.
class Loader {
 public:
  Loader(const Checkpoint& checkpoint, bool in_place, Placer& placer)
      : c_(checkpoint), s_(checkpoint.shape()), in_place_(in_place), p_(placer) {}

  void load(Weights& w, const WeightOptions& options) {
    with_experts_ = options.experts;
    w.embedding = embedding(options);
    w.layers.clear();
    for (std::int32_t l = 0; l < s_.layers; ++l) {
      const LayerKind kind = s_.layer_kinds[static_cast<std::size_t>(l)];
      w.layers.push_back(layer(kText + "layers." + std::to_string(l) + ".", kind));
      if (l == s_.ple_layer) w.ple = ple(kText + "layers." + std::to_string(l) + ".ple.", options);
    }
    w.mixer = mix(kText + "hyper_connection_mixer.", false);
    w.head = linear("lm_head");
    if (options.mtp && c_.has_mtp()) w.mtp = mtp();
    w.rope = rope(options.rope_positions);
  }

 private:
  const float* floats(const std::string& name, float add = 0.0f) {
    const std::size_t n = count(name);
    return reinterpret_cast<const float*>(p_.produce(n * sizeof(float), [&](void* host) {
      const std::vector<float> values = c_.values(name);
      auto* out = static_cast<float*>(host);
      for (std::size_t i = 0; i < n; ++i) out[i] = values[i] + add;
    }));
  }
  const float* one_plus(const std::string& name) { return floats(name, 1.0f); }

  const std::uint16_t* halves(const std::string& name) {
    const std::size_t bytes = count(name) * 2;
    if (c_.plain(name).dtype == Dtype::kF16) {
      return reinterpret_cast<const std::uint16_t*>(p_.put(c_.plain(name).data, bytes));
    }
    return reinterpret_cast<const std::uint16_t*>(p_.produce(bytes, [&](void* host) {
      const std::vector<std::uint16_t> values = c_.half_values(name);
      std::memcpy(host, values.data(), bytes);
    }));
  }

  DenseWeight dense(const std::string& name) {
    const Tensor& t = c_.plain(name);
    return {halves(name), static_cast<std::int32_t>(t.shape[1]),
            static_cast<std::int32_t>(t.shape[0])};
  }

  std::size_t count(const std::string& name) const {
    const Tensor& t = c_.plain(name);
    return t.bytes / item_bytes(t.dtype);
  }

  Exl3Weight linear(const std::string& prefix) {
    Exl3Weight w = c_.linear(prefix);
    if (w.bias != nullptr) {
      w.bias = reinterpret_cast<const float*>(
          p_.put(w.bias, static_cast<std::size_t>(w.out) * sizeof(float)));
    }
    if (in_place_) return w;
    w.trellis = p_.put(w.trellis, trellis_bytes(w));
    w.suh = p_.put(w.suh, static_cast<std::size_t>(w.in) * 2);
    w.svh = p_.put(w.svh, static_cast<std::size_t>(w.out) * 2);
    return w;
  }
  static std::size_t trellis_bytes(const Exl3Weight& w) {
    return static_cast<std::size_t>(w.in / 16) * static_cast<std::size_t>(w.out / 16) *
           static_cast<std::size_t>(w.words) * 2;
  }

  MixWeight mix(const std::string& prefix, bool inject) {
    MixWeight w{};
    w.norm = one_plus(prefix + "hc_norm.weight");
    w.down = halves(prefix + "input_mix_weight_down.weight");
    w.up = halves(prefix + "input_mix_weight_up.weight");
    if (inject) w.inject = halves(prefix + "block_inject_weight.weight");
    return w;
  }

  GdnWeights gdn(const std::string& prefix) {
    GdnWeights w{};
    w.qkv = linear(prefix + "in_proj_qkv");
    w.z = linear(prefix + "in_proj_z");
    w.out = linear(prefix + "out_proj");
    w.a = dense(prefix + "in_proj_a.weight");
    w.b = dense(prefix + "in_proj_b.weight");
    w.conv = floats(prefix + "conv1d.weight");
    const std::string a_log = prefix + "A_log";
    w.rate =
        reinterpret_cast<const float*>(p_.produce(count(a_log) * sizeof(float), [&](void* host) {
          const std::vector<float> values = c_.values(a_log);
          std::transform(values.begin(), values.end(), static_cast<float*>(host), [](float v) {
            return static_cast<float>(std::exp(static_cast<double>(v)));
          });
        }));
    w.dt_bias = floats(prefix + "dt_bias");
    w.norm = floats(prefix + "norm.weight");
    return w;
  }

  AttnWeights attention(const std::string& prefix) {
    AttnWeights w{};
    w.q = linear(prefix + "q_proj");
    w.k = linear(prefix + "k_proj");
    w.v = linear(prefix + "v_proj");
    w.o = linear(prefix + "o_proj");
    w.index = linear(prefix + "indexer.index_qk_proj");
    w.q_norm = one_plus(prefix + "q_norm.weight");
    w.k_norm = one_plus(prefix + "k_norm.weight");
    w.iq_norm = one_plus(prefix + "indexer.q_layernorm.weight");
    w.ik_norm = one_plus(prefix + "indexer.k_layernorm.weight");
    return w;
  }

  // Members of one expert side by side: trellises first, then scales, as a cache line of the card
  // will hold them.
  ExpertRef expert(const std::string& prefix, std::int32_t words[3]) {
    ExpertRef ref{};
    Exl3Weight w[3];
    for (std::size_t i = 0; i < 3; ++i) {
      w[i] = c_.linear(prefix + kProjections[i]);
      words[i] = w[i].words;
      ref.trellis[i] = in_place_ ? w[i].trellis : p_.put(w[i].trellis, trellis_bytes(w[i]));
    }
    for (std::size_t i = 0; i < 3; ++i) {
      ref.suh[i] = in_place_ ? w[i].suh : p_.put(w[i].suh, static_cast<std::size_t>(w[i].in) * 2);
      ref.svh[i] = in_place_ ? w[i].svh : p_.put(w[i].svh, static_cast<std::size_t>(w[i].out) * 2);
    }
    return ref;
  }

  MoeWeights moe(const std::string& prefix) {
    MoeWeights w{};
    w.router = dense(prefix + "gate.weight");
    w.shared_gate = dense(prefix + "shared_expert_gate.weight");
    if (with_experts_) {
      std::vector<ExpertRef> refs;
      refs.reserve(static_cast<std::size_t>(s_.experts));
      for (std::int32_t e = 0; e < s_.experts; ++e) {
        refs.push_back(expert(prefix + "experts." + std::to_string(e) + ".", w.words));
      }
      w.experts =
          reinterpret_cast<const ExpertRef*>(p_.put(refs.data(), refs.size() * sizeof(ExpertRef)));
    } else {
      for (std::size_t i = 0; i < 3; ++i) {
        w.words[i] = c_.linear(prefix + "experts.0." + kProjections[i]).words;
      }
    }
    const ExpertRef shared = expert(prefix + "shared_expert.", w.shared_words);
    w.shared = reinterpret_cast<const ExpertRef*>(p_.put(&shared, sizeof shared));
    return w;
  }

  LayerWeights layer(const std::string& prefix, LayerKind kind) {
    LayerWeights w{};
    w.kind = kind;
    w.attn_mix = mix(prefix + "attn_hyper_connection.", true);
    if (kind == LayerKind::kDeltaNet) {
      w.gdn = gdn(prefix + "linear_attn.");
    } else {
      w.attn = attention(prefix + "self_attn.");
    }
    w.mlp_mix = mix(prefix + "mlp_hyper_connection.", true);
    w.moe = moe(prefix + "mlp.");
    return w;
  }

  PleWeights ple(const std::string& prefix, const WeightOptions& options) {
    PleWeights w{};
    w.key = dense(prefix + "key_proj.weight");
    w.value = dense(prefix + "value_proj.weight");
    w.conv = floats(prefix + "conv1d.weight");
    w.norm_key = one_plus(prefix + "norm_key.weight");
    w.norm_query = one_plus(prefix + "norm_query.weight");
    w.norm_conv = one_plus(prefix + "norm_conv.weight");
    const NgramTable& table = c_.ngram();
    if (!table.bias.empty()) {
      w.bias =
          reinterpret_cast<const std::uint16_t*>(p_.put(table.bias.data(), table.bias.size() * 2));
    }
    const auto row_bytes = static_cast<std::uint64_t>(table.row_bytes);
    const std::uint64_t table_bytes = static_cast<std::uint64_t>(table.rows) * row_bytes;
    w.host_gather = !in_place_ && table_bytes > options.ngram_device_bytes;
    if (w.host_gather) return w;
    std::vector<const std::byte*> shards = table.shards;
    if (!in_place_) {
      std::int64_t left = table.rows;
      for (const std::byte*& shard : shards) {
        const std::int64_t rows = std::min(left, table.shard_rows);
        shard = p_.put(shard, static_cast<std::size_t>(rows) * row_bytes);
        left -= rows;
      }
    }
    w.shards = reinterpret_cast<const std::byte* const*>(
        p_.put(shards.data(), shards.size() * sizeof(shards[0])));
    return w;
  }

  MtpWeights mtp() {
    MtpWeights w{};
    w.fc_embedding = linear("mtp.fc_embedding");
    w.fc_hidden = linear("mtp.fc_hidden");
    w.norm_embed = one_plus("mtp.pre_fc_norm_embedding.weight");
    w.norm_hidden = one_plus("mtp.pre_fc_norm_hidden.weight");
    w.block = layer("mtp.layers.0.", LayerKind::kAttention);
    w.mixer = mix("mtp.hyper_connection_mixer.", false);
    return w;
  }

  // Null where it stays in a block of its own.
  const std::byte* embedding(const WeightOptions& options) {
    const Tensor& t = embedding_of(c_);
    if (in_place_) return t.data;
    return options.embedding ? p_.put(t.data, t.bytes) : nullptr;
  }

  // numerics.md 3: tabulated in fp64, rounded once.
  const float* rope(std::int32_t positions) {
    const std::int32_t half = s_.rotary / 2;
    const std::size_t bytes =
        static_cast<std::size_t>(positions) * static_cast<std::size_t>(s_.rotary) * sizeof(float);
    return reinterpret_cast<const float*>(p_.produce(bytes, [&](void* host) {
      auto* out = static_cast<float*>(host);
      for (std::int32_t i = 0; i < half; ++i) {
        const double inv = std::pow(s_.rope_theta, -2.0 * i / s_.rotary);
        for (std::int32_t p = 0; p < positions; ++p) {
          float* row = out + std::int64_t{p} * s_.rotary;
          row[i] = static_cast<float>(std::cos(p * inv));
          row[half + i] = static_cast<float>(std::sin(p * inv));
        }
      }
    }));
  }

  const Checkpoint& c_;
  const ModelShape& s_;
  const bool in_place_;
  bool with_experts_ = true;
  Placer& p_;
};

// The block of a token embedding that stays in pinned memory; empty where it does not.
Block embedding_block(const Checkpoint& checkpoint, Device& device, const WeightOptions& options) {
  if (device.kind() == "host" || options.embedding) return {};
  return Block(device, Space::kPinned, embedding_of(checkpoint).bytes, "token embedding");
}

// Reads the embedding into `block` in pieces, so that progress is told and may stop it.
void read_embedding(const Checkpoint& checkpoint, const Block& block, const Progress& progress) {
  constexpr std::size_t kPiece = std::size_t{32} << 20;
  const std::byte* from = embedding_of(checkpoint).data;
  for (std::size_t at = 0; at < block.bytes(); at += kPiece) {
    const std::size_t n = std::min(kPiece, block.bytes() - at);
    ReadPiece piece{from + at, n, block.as<std::byte>() + at};
    checkpoint.read({&piece, 1});
    if (progress) progress("embedding", at + n, block.bytes());
  }
}

// Fills `w` without placing anything; returns the bytes of the arena.
std::size_t count(const Checkpoint& checkpoint, bool in_place, const WeightOptions& options,
                  Weights& w) {
  Placer counter;
  Loader(checkpoint, in_place, counter).load(w, options);
  return counter.bytes();
}

}  // namespace

Weights Weights::plan(const Checkpoint& checkpoint, Device& plan, const WeightOptions& options) {
  Weights w;
  const std::size_t bytes = count(checkpoint, plan.kind() == "host", options, w);
  w.arena_ = Block(plan, Space::kDevice, bytes, "weights");
  w.embedding_ = embedding_block(checkpoint, plan, options);
  if (w.embedding_.bytes() > 0) w.embedding = w.embedding_.as<std::byte>();
  return w;
}

Weights Weights::load(const Checkpoint& checkpoint, Device& device, const WeightOptions& options,
                      const Progress& progress) {
  const bool in_place = device.kind() == "host";
  Weights w;
  w.arena_ = Block(device, Space::kDevice, count(checkpoint, in_place, options, w), "weights");
  w.embedding_ = embedding_block(checkpoint, device, options);
  read_embedding(checkpoint, w.embedding_, progress);
  Placer placer(device, w.arena_.as<std::byte>(), w.arena_.bytes(), progress);
  Loader(checkpoint, in_place, placer).load(w, options);
  placer.finish();
  if (w.embedding_.bytes() > 0) w.embedding = w.embedding_.as<std::byte>();
  return w;
}

}  // namespace flashnext
