// The error ladder of the engine: four kinds, so that a caller can tell what to do next.
//   InputError   the checkpoint, the config or the request is wrong; the message names thing,
//   value, remedy OutOfMemory  a space is exhausted; carries the space and the bytes asked for
//   DeviceError  a device call failed; poisons the session that saw it
//   LogicError   a bug of ours: an invariant of the engine does not hold
// Expected outcomes (a cache miss, a stop token) are values, never exceptions.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

namespace flashnext {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class InputError : public Error {
 public:
  using Error::Error;
};

// An InputError about a checkpoint folder (files, tensors, config) rather than about a request.
class CheckpointError : public InputError {
 public:
  using InputError::InputError;
};

class OutOfMemory : public Error {
 public:
  OutOfMemory(std::string space, std::size_t bytes, const std::string& message)
      : Error(message), space_(std::move(space)), bytes_(bytes) {}
  const std::string& space() const noexcept { return space_; }
  std::size_t bytes() const noexcept { return bytes_; }

 private:
  std::string space_;
  std::size_t bytes_;
};

class DeviceError : public Error {
 public:
  using Error::Error;
};

// A wait that ended at its deadline; the message names rank, layer and sequence. What the step was
// to compute is lost, its inputs are not.
class StalledError : public DeviceError {
 public:
  using DeviceError::DeviceError;
};

class LogicError : public Error {
 public:
  using Error::Error;
};

// Throws LogicError(message) when an invariant of ours does not hold.
inline void check(bool ok, const char* message) {
  if (!ok) throw LogicError(message);
}

}  // namespace flashnext
