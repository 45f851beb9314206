#include "cpp/base/json.h"
#include "cpp/checkpoint/safetensors.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <dirent.h>
#include <memory>
#include <sys/stat.h>
#include <unordered_map>

namespace flashnext {
namespace {

constexpr const char* kIndexName = "model.safetensors.index.json";
constexpr std::uint64_t kMaxIndexBytes = 1u << 30;

// Names of the *.safetensors of a folder, sorted. Hidden files are not the checkpoint's.
std::vector<std::string> list_folder(const std::string& folder) {
  struct stat status {};
  if (::stat(folder.c_str(), &status) != 0) {
    throw CheckpointError("checkpoint " + folder + ": " + std::strerror(errno) +
                          ". Give the path of a folder with config.json and *.safetensors");
  }
  if (!S_ISDIR(status.st_mode)) {
    throw CheckpointError("checkpoint " + folder +
                          ": is a file. Give the path of the folder that holds it");
  }
  const std::unique_ptr<DIR, int (*)(DIR*)> entries(::opendir(folder.c_str()), &::closedir);
  if (entries == nullptr) {
    throw CheckpointError("checkpoint " + folder + ": cannot be listed (" + std::strerror(errno) +
                          "). Check its permissions");
  }
  constexpr std::string_view suffix = ".safetensors";
  std::vector<std::string> names;
  while (const dirent* entry = ::readdir(entries.get())) {
    const std::string_view name = entry->d_name;
    if (name.size() > suffix.size() && name.front() != '.' && name.ends_with(suffix)) {
      names.emplace_back(name);
    }
  }
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace

struct TensorFiles::State {
  std::vector<MappedFile> mappings;
  std::vector<File> files;
  std::vector<Tensor> tensors;
  std::unordered_map<std::string_view, const Tensor*> by_name;
  std::vector<std::string> notes;

  void add(const std::string& name, const std::byte* data, std::size_t bytes);
  void finish();
  void check_index(const std::string& path);
};

void TensorFiles::State::add(const std::string& name, const std::byte* data, std::size_t bytes) {
  const std::uint64_t length = header_length(data, bytes, name);
  const std::byte* body = data + 8 + length;
  advise(data, 8 + length, Advice::kSoon);
  Header header =
      parse_header({reinterpret_cast<const char*>(data) + 8, length}, bytes - 8 - length, name);
  const auto file = static_cast<std::uint32_t>(files.size());
  for (HeaderEntry& entry : header.entries) {
    tensors.push_back({std::move(entry.name), entry.dtype, std::move(entry.shape),
                       body + entry.begin, entry.end - entry.begin, file});
  }
  files.push_back({name, bytes, std::move(header.metadata)});
}

void TensorFiles::State::finish() {
  std::sort(tensors.begin(), tensors.end(),
            [](const Tensor& a, const Tensor& b) { return a.name < b.name; });
  by_name.reserve(tensors.size());
  for (const Tensor& tensor : tensors) {
    const auto [at, fresh] = by_name.emplace(tensor.name, &tensor);
    if (fresh) continue;
    const std::string& first = files[at->second->file].name;
    const std::string& second = files[tensor.file].name;
    throw CheckpointError(
        tensor.name + ": stands twice in the checkpoint, " +
        (first == second ? "both times in " + first : "in " + first + " and in " + second) +
        ". Remove the file that does not belong here, or download it again");
  }
}

void TensorFiles::State::check_index(const std::string& path) {
  const std::string text = read_text(path, kIndexName, kMaxIndexBytes);
  std::unordered_map<std::string_view, std::uint32_t> file_ids;
  for (std::uint32_t i = 0; i < files.size(); ++i) file_ids.emplace(files[i].name, i);
  std::vector<std::uint64_t> unlisted(files.size(), 0);
  for (const Tensor& tensor : tensors) ++unlisted[tensor.file];
  try {
    json::Reader reader(text);
    std::string_view key, name;
    bool has_map = false;
    reader.begin_object();
    while (reader.next_key(key)) {
      if (key != "weight_map") {
        reader.skip();
        continue;
      }
      if (has_map) throw CheckpointError(std::string(kIndexName) + ": has weight_map twice");
      has_map = true;
      reader.begin_object();
      while (reader.next_key(name)) {
        const std::string_view file = reader.string();
        const auto id = file_ids.find(file);
        if (id == file_ids.end()) {
          throw CheckpointError(std::string(kIndexName) + ": lists " + std::string(name) + " in " +
                                std::string(file) +
                                ", which is not in the folder. Download that file too");
        }
        const auto found = by_name.find(name);
        if (found == by_name.end() || found->second->file != id->second) {
          throw CheckpointError(
              std::string(kIndexName) + ": lists " + std::string(name) + " in " +
              std::string(file) + ", but " +
              (found == by_name.end() ? std::string("no file has it")
                                      : "it is in " + files[found->second->file].name) +
              ". The index and the files are of different checkpoints: download them again");
        }
        if (unlisted[id->second] > 0) --unlisted[id->second];
      }
    }
    reader.finish();
    if (!has_map) {
      throw CheckpointError(std::string(kIndexName) +
                            ": has no weight_map. Download it again, or remove it");
    }
  } catch (const json::JsonError& error) {
    throw CheckpointError(std::string(kIndexName) + ": is not valid: " + error.what() +
                          ". Download it again, or remove it");
  }
  for (std::size_t i = 0; i < files.size(); ++i) {
    if (unlisted[i] == 0) continue;
    notes.push_back(files[i].name + ": " + std::to_string(unlisted[i]) +
                    " tensors are not listed in " + kIndexName + " (used all the same)");
  }
}

TensorFiles TensorFiles::open(const std::string& folder) {
  auto state = std::make_shared<State>();
  const std::vector<std::string> names = list_folder(folder);
  if (names.empty()) {
    throw CheckpointError("checkpoint " + folder +
                          ": holds no *.safetensors file. Give the folder of an EXL3 checkpoint");
  }
  for (const std::string& name : names) {
    state->mappings.emplace_back(folder + "/" + name, name);
    state->add(name, state->mappings.back().data(), state->mappings.back().bytes());
  }
  state->finish();
  const std::string index = folder + "/" + kIndexName;
  if (exists(index)) state->check_index(index);
  TensorFiles files;
  files.state_ = std::move(state);
  return files;
}

TensorFiles TensorFiles::view(const std::vector<Buffer>& buffers) {
  auto state = std::make_shared<State>();
  for (const Buffer& buffer : buffers) state->add(buffer.name, buffer.data, buffer.bytes);
  state->finish();
  TensorFiles files;
  files.state_ = std::move(state);
  return files;
}

const std::vector<TensorFiles::File>& TensorFiles::files() const { return state_->files; }
const std::vector<Tensor>& TensorFiles::tensors() const { return state_->tensors; }
const std::vector<std::string>& TensorFiles::notes() const { return state_->notes; }

const Tensor* TensorFiles::find(std::string_view name) const {
  const auto found = state_->by_name.find(name);
  return found == state_->by_name.end() ? nullptr : found->second;
}

// Pieces sorted by address fall into one group a file; the mappings' order does not matter.
void TensorFiles::read(std::span<ReadPiece> pieces) const {
  std::sort(pieces.begin(), pieces.end(),
            [](const ReadPiece& a, const ReadPiece& b) { return a.from < b.from; });
  const auto mapping_of = [&](const ReadPiece& piece) -> const MappedFile* {
    if (state_ == nullptr) return nullptr;
    for (const MappedFile& mapping : state_->mappings) {
      if (mapping.holds(piece.from)) return &mapping;
    }
    return nullptr;
  };
  for (std::size_t i = 0; i < pieces.size();) {
    const MappedFile* mapping = mapping_of(pieces[i]);
    std::size_t end = i + 1;
    if (mapping == nullptr) {
      if (pieces[i].bytes > 0) std::memcpy(pieces[i].to, pieces[i].from, pieces[i].bytes);
    } else {
      while (end < pieces.size() && mapping->holds(pieces[end].from)) ++end;
      mapping->read(pieces.subspan(i, end - i));
    }
    i = end;
  }
}

std::pair<const Tensor*, const Tensor*> TensorFiles::with_prefix(std::string_view prefix) const {
  const std::vector<Tensor>& all = state_->tensors;
  const auto head = [&](const Tensor& tensor) {
    return std::string_view(tensor.name).substr(0, prefix.size());
  };
  const auto first =
      std::lower_bound(all.begin(), all.end(), prefix,
                       [&](const Tensor& tensor, std::string_view p) { return head(tensor) < p; });
  auto last = first;
  while (last != all.end() && head(*last) == prefix) ++last;
  const Tensor* base = all.data();
  return {base + (first - all.begin()), base + (last - all.begin())};
}

}  // namespace flashnext
