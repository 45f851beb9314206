// RAM that this process may still take: of the machine, and of the container that it runs in.
#pragma once

#include <cstdint>
#include <string_view>

namespace flashnext {

// Bytes that can be had without swapping; 0 when the system does not say.
std::uint64_t free_ram();
// Bytes that stay free for the rest of the machine when a limit is not given: 2 GiB or 5 % of the
// RAM, whichever is more.
std::uint64_t ram_reserve();

// Value in bytes of a line like "MemAvailable:   1234 kB" of /proc/meminfo; 0 without it.
std::uint64_t meminfo_bytes(std::string_view text, std::string_view key);

}  // namespace flashnext
