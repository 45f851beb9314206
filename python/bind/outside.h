// Leaving the GIL, and the end of the interpreter. A thread that is outside of the GIL when the
// interpreter ends would be killed on its way back in, through C++ frames that do not survive it.
// So every thread of ours outside is counted, and shutdown() waits for them while there still is an
// interpreter to come back to.
#pragma once

#include "cpp/base/errors.h"
#include "python/bind/bind.h"

#include <atomic>
#include <optional>

namespace flashnext::bind {

// Whether the interpreter is about to end: what is long gives up, what is new is refused.
bool ending() noexcept;
void refuse_if_ending();  // throws InputError

// A scope without the GIL.
class Outside {
 public:
  Outside() {
    ++count();
    release_.emplace();
  }
  ~Outside() {
    release_.reset();  // waits for the GIL
    --count();
  }
  Outside(const Outside&) = delete;
  Outside& operator=(const Outside&) = delete;
  static std::atomic<int>& count() noexcept;

 private:
  std::optional<py::gil_scoped_release> release_;
};

// Closes every open session and waits, for a while, until no thread is outside any more. Called
// once, before the interpreter ends (atexit).
void shutdown();

}  // namespace flashnext::bind
