#include "cpp/device/host_rows.h"

#include "cpp/device/host_vec.h"

// clang-format off
#include "cpp/device/host_vec_begin_4.inc"
#include "cpp/device/host_rows_kernels.inc"
#include "cpp/device/host_vec_end.inc"

#include "cpp/device/host_vec_begin_8.inc"
#include "cpp/device/host_rows_kernels.inc"
#include "cpp/device/host_vec_end.inc"

#include "cpp/device/host_vec_begin_16.inc"
#include "cpp/device/host_rows_kernels.inc"
#include "cpp/device/host_vec_end.inc"
// clang-format on

namespace flashnext::host {

const RowKernels& row_kernels(exl3::Isa isa) noexcept {
  return *pick(isa, &lanes4::kRowKernels, &lanes8::kRowKernels, &lanes16::kRowKernels);
}

}  // namespace flashnext::host
