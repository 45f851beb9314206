// mtp_norm and mtp_join: the entry of the draft head (spec/model.md 7.1).
#include "cpp/device/host_rows.h"

namespace flashnext::host {

void mtp_norm(const MtpNormArgs& args, Context& context) {
  check(args.dim % 16 == 0, "mtp_norm: the width of a stream must be a multiple of 16");
  const std::int32_t rows = args.step.head->rows;
  check(rows >= 0 && rows <= args.step.max_rows,
        "mtp_norm: more rows than the program was built for");
  for (std::int32_t r = 0; r < rows; ++r) check_token(args.step.rows[r].token, "mtp_norm", r);
  const RowKernels& kernels = row_kernels(context.isa);
  const std::int32_t stack = args.num_streams * args.dim;
  // One statistic a stream, or one over the stack.
  const std::int32_t group = args.per_stream != 0 ? args.dim : stack;
  context.pool.parallel_for(rows, grain_for(8 * std::int64_t{stack}),
                            [&](std::int64_t begin, std::int64_t end) {
                              for (std::int64_t r = begin; r < end; ++r) {
                                float* e = args.e + r * args.dim;
                                widen_bf16(args.table, args.step.rows[r].token, args.dim, e);
                                kernels.norm(e, args.norm_embed, args.eps, e, args.dim);
                                for (std::int32_t at = 0; at < stack; at += group) {
                                  kernels.norm(args.hidden + r * stack + at, args.norm_hidden + at,
                                               args.eps, args.h + r * stack + at, group);
                                }
                              }
                            });
}

void mtp_join(const MtpJoinArgs& args, Context& context) {
  const std::int64_t n = std::int64_t{checked_rows(args.rows, "mtp_join")} * args.num_streams;
  const RowKernels& kernels = row_kernels(context.isa);
  context.pool.parallel_for(n, grain_for(args.dim), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      kernels.add(args.fh + i * args.dim, args.fe + i / args.num_streams * args.dim,
                  args.streams + i * args.dim, args.dim);
    }
  });
}

}  // namespace flashnext::host
