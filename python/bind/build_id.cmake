# Writes HEADER with FN_BUILD_ID: a hash over the sources of cpp/ and cuda/ under ROOT. Run at build time
# (cmake -P), so that it names what was compiled. Receipts of the gate hold for one build id: text
# outside of these two folders (Python, tests, documents) changes no result of a device.
file(
  GLOB_RECURSE files
  RELATIVE "${ROOT}"
  "${ROOT}/cpp/*.h"
  "${ROOT}/cpp/*.cpp"
  "${ROOT}/cpp/*.inc"
  "${ROOT}/cuda/*.h"
  "${ROOT}/cuda/*.cu"
  "${ROOT}/cuda/*.cuh"
  "${ROOT}/cuda/CMakeLists.txt")
list(SORT files)
set(all "")
foreach(name ${files})
  file(SHA256 "${ROOT}/${name}" hash)
  string(APPEND all "${name} ${hash}\n")
endforeach()
string(SHA256 id "${all}")
string(SUBSTRING "${id}" 0 16 id)
set(text "#pragma once\n#define FN_BUILD_ID \"${id}\"\n")
set(old "")
if(EXISTS "${HEADER}")
  file(READ "${HEADER}" old)
endif()
if(NOT old STREQUAL text)
  file(WRITE "${HEADER}" "${text}")
endif()
