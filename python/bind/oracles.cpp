// Pieces of the engine as plain functions, for tests against other implementations.
#include "cpp/base/errors.h"
#include "cpp/base/math.h"
#include "cpp/base/thread_pool.h"
#include "cpp/device/host_ops.h"
#include "cpp/exl3/exl3.h"
#include "python/bind/bind.h"

namespace flashnext::bind {

namespace {

using Words = py::array_t<std::int16_t, py::array::c_style | py::array::forcecast>;
using Halves = py::array_t<std::uint16_t, py::array::c_style>;
using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;

std::int32_t checked_words(const Words& trellis) {
  if (trellis.ndim() != 3 || !exl3::valid_words(static_cast<std::int32_t>(trellis.shape(2)))) {
    throw InputError("trellis must be int16 [in/16, out/16, 16 K]");
  }
  return static_cast<std::int32_t>(trellis.shape(2));
}

const std::byte* bytes(const py::array& a) { return static_cast<const std::byte*>(a.data()); }

py::array_t<std::int16_t> reconstruct_sums(const Words& trellis) {
  const std::int32_t words = checked_words(trellis);
  const auto kt = trellis.shape(0), nt = trellis.shape(1);
  py::array_t<std::int16_t> out({kt * 16, nt * 16});
  std::int16_t tile[256];
  for (py::ssize_t k = 0; k < kt; ++k) {
    for (py::ssize_t n = 0; n < nt; ++n) {
      exl3::tile_sums(bytes(trellis) + (k * nt + n) * words * 2, words, tile);
      for (py::ssize_t r = 0; r < 16; ++r) {
        std::memcpy(out.mutable_data(k * 16 + r, n * 16), tile + r * 16, 32);
      }
    }
  }
  return out;
}

Halves codebook() {
  Halves out(65536);
  for (std::uint32_t s = 0; s < 65536; ++s) {
    out.mutable_at(s) = exl3::codebook(static_cast<std::uint16_t>(s));
  }
  return out;
}

Floats linear(const Words& trellis, const Halves& suh, const Halves& svh, const Floats& x,
              std::int32_t levels, const std::string& isa, std::int32_t threads,
              const std::optional<Floats>& bias) {
  Exl3Weight w{};
  w.words = checked_words(trellis);
  w.in = static_cast<std::int32_t>(trellis.shape(0) * 16);
  w.out = static_cast<std::int32_t>(trellis.shape(1) * 16);
  if (w.in % 128 != 0 || w.out % 128 != 0) throw InputError("features must be multiples of 128");
  if (suh.size() != w.in || svh.size() != w.out || x.ndim() != 2 || x.shape(1) != w.in ||
      (bias && bias->size() != w.out)) {
    throw InputError("suh, svh, bias or x do not fit the trellis");
  }
  w.trellis = bytes(trellis);
  w.suh = bytes(suh);
  w.svh = bytes(svh);
  if (bias) w.bias = bias->data();
  const auto rows = static_cast<std::int32_t>(x.shape(0));
  Floats y({x.shape(0), static_cast<py::ssize_t>(w.out)});
  Exl3LinearArgs a{};
  a.rows = {&rows, 1, rows};
  a.x = x.data();
  a.w[0] = w;
  a.y[0] = y.mutable_data();
  a.n = 1;
  a.levels = levels;
  ThreadPool pool(threads);
  std::vector<float> scratch(host::workspace_bytes(a, pool.threads()) / sizeof(float) + 64);
  a.workspace = {scratch.data(), scratch.size() * sizeof(float)};
  host::Context context{pool, exl3::isa_named(isa)};
  host::exl3_linear(a, context);
  return y;
}

Floats ring_rows(const Words& rows, std::int32_t bits, const std::optional<Halves>& bias) {
  const py::ssize_t width = (rows.shape(1) - 1) * 16 / bits;
  if (rows.ndim() != 2 || bits < 1 || bits > 8 || (bias && bias->size() != rows.shape(0) * width)) {
    throw InputError("rows must be int16 [N, 1 + width * bits / 16], bias fp16 [N, width]");
  }
  Floats out({rows.shape(0), width});
  for (py::ssize_t i = 0; i < rows.shape(0); ++i) {
    exl3::ring_row(bytes(rows) + i * rows.shape(1) * 2, bits, static_cast<std::int32_t>(width),
                   bias ? bias->data() + i * width : nullptr, out.mutable_data(i, 0));
  }
  return out;
}

Floats elementwise(const std::string& name, const Floats& x) {
  float (*f)(float) = name == "exp"        ? +[](float v) { return math::exp(v); }
                      : name == "sigmoid"  ? +[](float v) { return math::sigmoid(v); }
                      : name == "silu"     ? +[](float v) { return math::silu(v); }
                      : name == "softplus" ? +[](float v) { return math::softplus(v); }
                                           : nullptr;
  if (f == nullptr) throw InputError("no elementary function is called \"" + name + "\"");
  Floats out(x.size());
  for (py::ssize_t i = 0; i < x.size(); ++i) out.mutable_data()[i] = f(x.data()[i]);
  return out;
}

}  // namespace

void bind_oracles(py::module_& m) {
  m.def("exl3_reconstruct_sums", &reconstruct_sums, py::arg("trellis"));
  m.def("exl3_codebook", &codebook);
  m.def("exl3_linear", &linear, py::arg("trellis"), py::arg("suh"), py::arg("svh"), py::arg("x"),
        py::arg("levels") = exl3::kLevels, py::arg("isa") = "auto", py::arg("threads") = 1,
        py::arg("bias") = py::none());
  m.def("ring_rows", &ring_rows, py::arg("rows"), py::arg("bits"), py::arg("bias") = py::none());
  m.def("elementwise", &elementwise, py::arg("name"), py::arg("x"));
}

}  // namespace flashnext::bind
