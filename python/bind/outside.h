// Leaving the GIL, and the end of the interpreter. A thread that is outside of the GIL when the
// interpreter ends would be killed on its way back in, through C++ frames that do not survive it.
// So every thread of ours outside is counted, and shutdown() waits for them. They do not come back
// to Python, where all that is left for them to do is to raise errors that nobody can handle: they
// stop where they are and go with the process, as daemon threads do.
#pragma once

#include "cpp/base/errors.h"
#include "python/bind/bind.h"

#include <atomic>
#include <optional>

namespace flashnext::bind {

// Whether the interpreter is about to end: what is long gives up.
bool ending() noexcept;
// Throws InputError on the thread that ends the interpreter; any other thread stops here.
void refuse_if_ending();

// A scope without the GIL.
class Outside {
 public:
  Outside() {
    ++count();
    release_.emplace();
  }
  ~Outside();  // waits for the GIL
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
