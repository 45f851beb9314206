// Inside the room: a mapped file that becomes shorter, or whose disk fails, while it is in use ends
// the process (SIGBUS). It shall say which file. Files are registered while they are mapped; the
// handler touches nothing but this list and stderr, then lets the signal do what it did before.
#pragma once

#include <cstddef>
#include <string>

namespace flashnext {

// Any thread. The returned place stays valid for ever; free it with forget_mapping().
struct MappedRange;
MappedRange* remember_mapping(const std::byte* data, std::size_t bytes, const std::string& path);
void forget_mapping(MappedRange* range) noexcept;

}  // namespace flashnext
