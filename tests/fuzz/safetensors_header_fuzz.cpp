// Any bytes as a whole safetensors file: tensors inside the file, or a CheckpointError.
#include "cpp/checkpoint/checkpoint.h"

#include <cstddef>
#include <cstdint>
#include <string>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace flashnext;
  // Even inputs begin behind the 8 bytes of the length, which random bytes would seldom get right.
  std::string file;
  if (size > 0 && data[0] % 2 == 0) {
    const std::uint64_t data_bytes = data[0];
    const std::uint64_t length = size - 1;
    file.assign(reinterpret_cast<const char*>(&length), 8);
    file.append(reinterpret_cast<const char*>(data) + 1, size - 1);
    file.append(data_bytes, '\x3C');
  } else {
    file.assign(reinterpret_cast<const char*>(data), size);
  }
  const auto* begin = reinterpret_cast<const std::byte*>(file.data());
  try {
    const TensorFiles files = TensorFiles::view({{"a.safetensors", begin, file.size()}});
    for (const Tensor& tensor : files.tensors()) {
      if (tensor.data < begin || tensor.data + tensor.bytes > begin + file.size()) {
        __builtin_trap();
      }
      std::uint64_t items = 1;
      for (const std::int64_t dim : tensor.shape) items *= static_cast<std::uint64_t>(dim);
      if (items * item_bytes(tensor.dtype) != tensor.bytes) __builtin_trap();
      if (files.find(tensor.name) != &tensor) __builtin_trap();
    }
  } catch (const CheckpointError&) {
  }
  return 0;
}
