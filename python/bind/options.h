// Options of a session that come from Python.
#pragma once

#include "cpp/session/session.h"
#include "python/bind/bind.h"

namespace flashnext::bind {

// The keyword options of _core.Session and _core.synthetic_session, by the names of SessionOptions;
// `snapshots` is called prefix_snapshots. InputError for a value of the wrong type, TypeError for a
// name that does not exist.
SessionOptions session_options(const py::kwargs& given);

}  // namespace flashnext::bind
