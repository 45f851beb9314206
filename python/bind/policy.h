// Policies that come from Python.
#pragma once

#include "cpp/cache/policy.h"
#include "python/bind/bind.h"

#include <memory>

namespace flashnext::bind {

// None: null, which means the default. A text: a built-in policy, where `seed` counts for "random".
// Else an object with initial() and plan(), as flashnext.Policy describes them: its calls take the
// GIL for their own time, and what it raises becomes an exception with Python's message. Call it
// with the GIL; the result may be used and dropped without. InputError for anything else.
std::shared_ptr<cache::Policy> policy_from(const py::object& policy, std::uint64_t seed = 0);

}  // namespace flashnext::bind
