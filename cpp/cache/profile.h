// The frequency profile: how often the experts of a checkpoint were used in earlier runs, in a
// small file that the user asked for.
//
// All integers little-endian: "FNPROFIL", u32 version, i32 layers, i32 experts, u32 0,
// u64 fingerprint of the checkpoint, u64 uses (layers, experts), u64 FNV-1a of all before.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace flashnext::cache {

struct Profile {
  std::vector<std::uint64_t> uses;  // (layers, experts), or empty
  std::vector<std::uint64_t> rest;  // of layers that the file has beyond those (the MTP head's)
  // Why there are none though the file exists, and what to do; empty: they were read, or there is
  // no such file yet.
  std::string note;
};

// Never throws for what is in the file: without a profile a session opens as well. A file that gave
// a note may be another checkpoint's; do not save over it.
Profile load_profile(const std::string& path, std::uint64_t fingerprint, std::int32_t layers,
                     std::int32_t experts);

// Writes a file beside it and renames, so that `path` holds the old profile or the new one whole.
// Returns what went wrong, or nothing.
std::string save_profile(const std::string& path, std::uint64_t fingerprint, std::int32_t layers,
                         std::int32_t experts, std::span<const std::uint64_t> uses);

}  // namespace flashnext::cache
