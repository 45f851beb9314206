// Gated DeltaNet on the host (spec/model.md 3): convolution with gates and window, the token
// recurrence, the gated norm of its output.
#include "cpp/device/host_rows.h"
#include "cpp/device/host_vec.h"

#include <algorithm>

namespace flashnext::host {

namespace {

constexpr int kGdnHead = 128;  // keys and values of a head
constexpr int kGdnStrip = 32;  // columns of the state that one piece of work carries
constexpr int kMaxTaps = 8;    // bounds local arrays
constexpr std::int64_t kRowsAPiece = 16;

// One head over the rows of one segment; strides in floats.
struct GdnRecurSpan {
  const float* q;      // (rows, 128)
  const float* k;      // (rows, 128)
  const float* v;      // (rows, 128)
  const float* decay;  // (rows)
  const float* beta;   // (rows)
  const float* in;     // (128 key, 128 value) or null: zero
  float* out;          // (128 key, 128 value)
  float* o;            // (rows, 128)
  std::int64_t qkv_stride;
  std::int64_t gate_stride;
  std::int64_t o_stride;
  int rows;
};

constexpr float kZeros[kGdnHead] = {};

}  // namespace
}  // namespace flashnext::host

// clang-format off
#include "cpp/device/host_vec_begin_4.inc"
#include "cpp/device/host_gdn_kernels.inc"
#include "cpp/device/host_vec_end.inc"

#include "cpp/device/host_vec_begin_8.inc"
#include "cpp/device/host_gdn_kernels.inc"
#include "cpp/device/host_vec_end.inc"

#include "cpp/device/host_vec_begin_16.inc"
#include "cpp/device/host_gdn_kernels.inc"
#include "cpp/device/host_vec_end.inc"
// clang-format on

namespace flashnext::host {

namespace {

void check_dims(const GdnDims& dims) {
  check(dims.head_dim == kGdnHead, "DeltaNet heads have 128 keys and values");
  check(dims.k_heads > 0 && dims.v_heads % dims.k_heads == 0,
        "DeltaNet value heads are a multiple of the key heads");
  check(dims.kernel >= 1 && dims.kernel <= kMaxTaps, "DeltaNet convolution has 1 to 8 taps");
}

}  // namespace

void gdn_conv(const GdnConvArgs& args, Context& context) {
  const GdnDims& dims = args.dims;
  check_dims(dims);
  check(args.a.out == dims.v_heads && args.b.out == dims.v_heads,
        "DeltaNet gates have one output a value head");
  const StepView& step = args.step;
  const std::int32_t rows = checked_rows({&step.head->rows, 1, step.max_rows}, "gdn_conv");
  const int kernel = dims.kernel;
  const std::int64_t heads = 2 * dims.k_heads + dims.v_heads;
  const std::int64_t channels = heads * kGdnHead;
  const std::int64_t chunks = (rows + kRowsAPiece - 1) / kRowsAPiece;
  const auto conv_head =
      pick(context.isa, lanes4::gdn_conv_head, lanes8::gdn_conv_head, lanes16::gdn_conv_head);
  const auto l2_norm =
      pick(context.isa, lanes4::gdn_l2_norm, lanes8::gdn_l2_norm, lanes16::gdn_l2_norm);

  // A piece is one head over some rows, so that its taps are laid out once.
  context.pool.parallel_for(heads * chunks, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t piece = begin; piece < end; ++piece) {
      const std::int64_t head = piece / chunks;
      const std::int64_t channel = head * kGdnHead;
      float w[kMaxTaps * kGdnHead];  // (kernel, 128)
      for (int c = 0; c < kGdnHead; ++c) {
        for (int i = 0; i < kernel; ++i) {
          w[i * kGdnHead + c] = args.conv[(channel + c) * kernel + i];
        }
      }
      const std::int64_t row0 = piece % chunks * kRowsAPiece;
      for (std::int64_t r = row0; r < std::min<std::int64_t>(row0 + kRowsAPiece, rows); ++r) {
        const Segment& segment = step.segments[step.rows[r].segment];
        const float* window = args.window + segment.state_in * dims.slot_stride + channel;
        const float* source[kMaxTaps];
        for (int i = 0; i < kernel; ++i) {
          const std::int64_t t = r - segment.row0 - (kernel - 1 - i);  // row of the segment
          if (t >= 0) {
            source[i] = args.u + (segment.row0 + t) * channels + channel;
          } else if (segment.pos0 + t >= 0) {
            source[i] = window + (kernel - 1 + t) * channels;
          } else {
            source[i] = kZeros;
          }
        }
        float* out = args.qkv + r * channels + channel;
        conv_head(source, w, kernel, out);
        if (head < dims.k_heads) {
          l2_norm(out, 0.08838834764831845f);  // 128^-0.5
        } else if (head < 2 * dims.k_heads) {
          l2_norm(out, 1.0f);
        }
      }
    }
  });

  // The products lie where the gates will.
  const DenseWeight weights[] = {args.a, args.b};
  float* const products_at[] = {args.decay, args.beta};
  products(weights, products_at, 2, args.x, rows, context);
  context.pool.parallel_for(rows, kRowsAPiece, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin * dims.v_heads; i < end * dims.v_heads; ++i) {
      const std::int64_t j = i % dims.v_heads;
      args.decay[i] = math::exp(-(args.rate[j] * math::softplus(args.decay[i] + args.dt_bias[j])));
      args.beta[i] = math::sigmoid(args.beta[i]);
    }
  });
  window_push({step, args.u, channels, args.window, dims.slot_stride, kernel - 1,
               static_cast<std::int32_t>(channels)},
              context);
}

std::size_t workspace_bytes(const GdnConvArgs&, int) { return 0; }

// NOTE: pieces of several segments run at once, so no segment may write a slot another one reads.
void gdn_recur(const GdnRecurArgs& args, Context& context) {
  const GdnDims& dims = args.dims;
  check_dims(dims);
  const StepView& step = args.step;
  const std::int64_t channels = (2 * dims.k_heads + dims.v_heads) * std::int64_t{kGdnHead};
  const std::int64_t key_offset = dims.k_heads * std::int64_t{kGdnHead};
  const std::int64_t strips = kGdnHead / kGdnStrip;
  const auto strip =
      pick(context.isa, lanes4::gdn_recur_strip, lanes8::gdn_recur_strip, lanes16::gdn_recur_strip);

  const std::int64_t pieces = step.head->segments * dims.v_heads * strips;
  context.pool.parallel_for(pieces, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t piece = begin; piece < end; ++piece) {
      const std::int64_t head = piece / strips % dims.v_heads;
      const Segment& segment = step.segments[piece / strips / dims.v_heads];
      if (segment.rows <= 0) continue;
      const std::int64_t key_head = head / (dims.v_heads / dims.k_heads);
      const float* qkv = args.qkv + segment.row0 * channels;
      const std::int64_t gates = segment.row0 * std::int64_t{dims.v_heads} + head;
      const std::int64_t matrix = head * kGdnHead * kGdnHead;
      GdnRecurSpan span;
      span.q = qkv + key_head * kGdnHead;
      span.k = qkv + key_offset + key_head * kGdnHead;
      span.v = qkv + 2 * key_offset + head * kGdnHead;
      span.decay = args.decay + gates;
      span.beta = args.beta + gates;
      span.in =
          segment.pos0 == 0 ? nullptr : args.state + segment.state_in * dims.slot_stride + matrix;
      span.out = args.state + segment.state_out * dims.slot_stride + matrix;
      span.o = args.o + gates * kGdnHead;
      span.qkv_stride = channels;
      span.gate_stride = dims.v_heads;
      span.o_stride = dims.v_heads * std::int64_t{kGdnHead};
      span.rows = segment.rows;
      strip(span, static_cast<int>(piece % strips) * kGdnStrip);
    }
  });
}

void gdn_gate(const GdnGateArgs& args, Context& context) {
  const auto gate_head =
      pick(context.isa, lanes4::gdn_gate_head, lanes8::gdn_gate_head, lanes16::gdn_gate_head);
  const std::int64_t heads = std::int64_t{rows_of(args.rows)} * args.v_heads;
  context.pool.parallel_for(heads, 16, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin * kGdnHead; i < end * kGdnHead; i += kGdnHead) {
      gate_head(args.o + i, args.z + i, args.w, args.eps, args.silu_gate != 0, args.y + i);
    }
  });
}

}  // namespace flashnext::host
