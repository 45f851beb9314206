#!/usr/bin/env bash
# Everything that needs a GPU, in one go: build, tests, sanitizers, gate, benches, receipts.
#
#   tools/gpu_check.sh [FOLDER] [STAGE ...]
#
# FOLDER (default: $OUT, else build/gpu-check) gets a log a stage, summary.txt and receipts/. Stages, all of
# them by default, in this order:
#
#   build       configure and build the preset cuda, Python module included
#   ctest       C++ tests with the label gpu
#   gate        flashnext gate on the first GPU; writes the kernel-contract records too
#   pytest      Python tests marked gpu
#   memcheck racecheck initcheck    compute-sanitizer on tests of the ops
#   decode lanes offload prefill beside load    flashnext bench on random weights of the real dimensions, 12 layers
#
# FN_BUILD=DIR   use this build folder: its tests and libraries are taken as they are, and the stage `build` only
#                compiles the Python module again where this Python cannot load the one that is there
# FN_ARCHS=LIST  CUDA architectures to build for (default: all; 90-real is quicker on an H200)
# FN_PYTHON=EXE  the Python to use (default: python3); it needs numpy, tokenizers, jinja2 and rich
# FN_PACK=1       leave gpu-check.tar.gz and summary.txt alone in FOLDER
# FN_LAYERS=N, FN_CONTEXT=N,N..   of the benches (12; 2048 for decode, 8192 for prefill, 30000 for beside)
# FN_LANES="N .."  decode steps of so many lanes (8 9 16 32)
#
# Needs no network, no git history (give FLASHNEXT_COMMIT and FLASHNEXT_DIRTY=0 for citable receipts), no
# installed package, and nothing beside the repository. Exit code 0 only if every stage asked for ran and
# passed; a stage that could not run is reported as "not run", never as passed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

all=(build ctest gate pytest memcheck racecheck initcheck decode lanes offload prefill beside load)
case "${1:-}" in -h | --help)
  sed -n '2,/^set -uo/{/^set -uo/d;s/^# \{0,1\}//p}' "$0"
  exit 0
  ;;
esac
out=${1:-${OUT:-build/gpu-check}}
shift || true
stages=("$@")
[ ${#stages[@]} -gt 0 ] || stages=("${all[@]}")
for stage in "${stages[@]}"; do
  case " ${all[*]} " in
    *" $stage "*) ;;
    *)
      echo "no stage is called $stage; there are: ${all[*]}" >&2
      exit 2
      ;;
  esac
done
mkdir -p "$out/receipts"
out=$(cd "$out" && pwd)
build=${FN_BUILD:-build/cuda}
python=${FN_PYTHON:-python3}
layers=${FN_LAYERS:-12}
readonly not_run=77

python_loads() { PYTHONPATH=$(dirname "$1") "$python" -c 'import _core'; }

# The extension module for this Python from the libraries of a build folder: a minute instead of a whole build.
build_module() {
  local runtime to=$out/module source version jobs=() job failed=0
  runtime=$(find -L "${CUDA_HOME:-/usr/local/cuda}" /usr/local/cuda* -maxdepth 5 -name libcudart_static.a 2>/dev/null | head -n 1)
  [ -n "$runtime" ] || { echo "not run: no libcudart_static.a; set CUDA_HOME"; return $not_run; }
  version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
  mkdir -p "$to"
  cmake -DROOT="$PWD" -DHEADER="$to/build_id.h" -P python/bind/build_id.cmake || return 1
  for source in python/bind/*.cpp; do
    # shellcheck disable=SC2046  # include options are words
    g++ -std=c++20 -O2 -fPIC -fvisibility=hidden -ffp-contract=off -Wno-psabi -I. -I"$to" \
      $("$python" -m pybind11 --includes) -DFN_VERSION="\"$version\"" -DFN_BUILD_TYPE='"Release"' \
      -DFN_FLAGS='"-O3 -DNDEBUG"' -DFN_CUDA_ARCHS='"90-real,120-real"' -DFN_WITH_CUDA=1 \
      -c "$source" -o "$to/$(basename "$source" .cpp).o" &
    jobs+=($!)
  done
  for job in "${jobs[@]}"; do wait "$job" || failed=1; done
  [ $failed -eq 0 ] || return 1
  g++ -shared -o "$to/_core$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')" \
    "$to"/*.o -Wl,--start-group "$build/libflashnext_core.a" "$build/cuda/libflashnext_cuda.a" -Wl,--end-group \
    "$runtime" -lrt -ldl -lpthread || return 1
  rm -f "$to"/*.o
  python_loads "$(echo "$to"/_core.*.so)"
}

# The package as it lies in the tree, with the extension module of the build beside it.
export PYTHONPATH="$out/python" PYTHONDONTWRITEBYTECODE=1
link_package() {
  local module
  while read -r module; do
    if python_loads "$module"; then break; fi
    module=
  done < <(find "$out/module" "$build" -name '_core.*.so' 2>/dev/null)
  if [ -z "${module:-}" ]; then
    echo "not run: no extension module of this Python in $build (the stage build makes it)"
    return 1
  fi
  rm -rf "$out/python"
  mkdir -p "$out/python/flashnext"
  local file
  for file in "$PWD"/python/flashnext/*; do
    case "$file" in *.so | */__pycache__) ;; *) ln -s "$file" "$out/python/flashnext/" ;; esac
  done
  ln -s "$(realpath "$module")" "$out/python/flashnext/"
}

# Says why a program is missing and gives the code of a stage that did not run.
need() {
  command -v "$1" >/dev/null && return 0
  echo "not run: $1 is not on the path"
  return $not_run
}

sanitizer() {
  local found
  for found in compute-sanitizer "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer"; do
    command -v "$found" && return 0
  done
  return 1
}

run_build() {
  if [ -n "${FN_BUILD:-}" ]; then
    local module
    for module in "$build"/python/bind/_core.*.so; do
      if python_loads "$module" 2>/dev/null; then return 0; fi
    done
    build_module
    return
  fi
  need nvcc || return
  need cmake || return
  local pybind
  pybind=$("$python" -m pybind11 --cmakedir) || { echo "not run: $python has no pybind11"; return $not_run; }
  cmake --preset cuda ${FN_ARCHS:+"-DCMAKE_CUDA_ARCHITECTURES=$FN_ARCHS"} -DFN_PYTHON=ON -Dpybind11_DIR="$pybind" -DPython_EXECUTABLE="$(command -v "$python")" &&
    cmake --build --preset cuda
}

run_ctest() {
  local test failed=0 count=0
  if command -v ctest >/dev/null && grep -qx "CMAKE_HOME_DIRECTORY:INTERNAL=$PWD" "$build/CMakeCache.txt"; then
    ctest --test-dir "$build" -L gpu --output-on-failure --no-tests=error
    return
  fi
  # A build folder that moved to another machine: run the programs themselves.
  for test in "$build"/tests/cpp/*_gpu_test; do
    [ -x "$test" ] || continue
    count=$((count + 1))
    echo "== $test"
    "$test" --gtest_brief=1 || failed=1
  done
  if [ $count -eq 0 ]; then
    echo "not run: no gpu test in $build"
    return $not_run
  fi
  return $failed
}

run_gate() {
  "$python" -m flashnext gate --device cuda:0 --receipts "$out/receipts" --contracts "$out/kernel_contracts.md"
}

run_pytest() {
  "$python" -c 'import pytest' 2>/dev/null || { echo "not run: $python has no pytest"; return $not_run; }
  local plugins=()
  "$python" -c 'import pytest_timeout' 2>/dev/null || plugins=(-o timeout=0 -W ignore::pytest.PytestConfigWarning)
  FLASHNEXT_GATES="$out/receipts" "$python" -m pytest -q -m gpu -p no:cacheprovider ${plugins[@]+"${plugins[@]}"}
}

# The tool on tests of every family, at sizes that leave it a few minutes; without the tests that
# provoke errors of the device on purpose.
run_sanitizer() {
  local tool=$1 program failed=0 count=0 filter
  program=$(sanitizer) || { echo "not run: compute-sanitizer is not installed"; return $not_run; }
  while read -r test filter; do
    [ -x "$build/tests/cpp/$test" ] || { echo "no $test in $build"; failed=1; continue; }
    # What stands behind the comma is for memcheck, the quickest of the three, alone.
    if [ "$tool" = memcheck ]; then filter=${filter/,/:}; else filter=${filter%%,*}; fi
    if ! "$build/tests/cpp/$test" --gtest_list_tests "--gtest_filter=$filter" | grep -q '^  '; then
      echo "$test has no test $filter"
      failed=1
      continue
    fi
    count=$((count + 1))
    echo "== $tool $test $filter"
    timeout 240 "$program" --tool "$tool" --error-exitcode 99 --launch-timeout 60 --print-limit 20 \
      "$build/tests/cpp/$test" --gtest_brief=1 "--gtest_filter=$filter" || failed=1
  done <<'TESTS'
ops_gpu_test Ops.PleAndDraftHead:Ops.NgramIsBitEqualToTheHost,Ops.RouteAndCombineAreBitEqualToTheHost:Ops.RoutesInARowShareTicketAndWorkspace:Ops.MixOfOtherShapes
exl3_gpu_test Exl3Gpu.RowsWithoutNumbers,Exl3Gpu.InputsAtTheLimits:Exl3Gpu.PrefillRowCounts:Exl3Gpu.MoreStripsThanFitAtOnce
exl3_experts_gpu_test ExpertsGpu.FewerRowsThanTheBucket,ExpertsGpu.AllRowsTheSameExpert:ExpertsGpu.PairsOfAGroup
gdn_gpu_test GdnGpu.GateMatchesTheHost,GdnGpu.OtherSequencesKeepTheBits:GdnGpu.ChunksAndBucketsKeepTheBits
offload_gpu_test Offload.ABranchOfAGraphFetches,Offload.TheGatesCasesPass
attention_gpu_test AttentionGpu.PrepareMatchesTheHost,AttentionGpu.MatchesTheHost
cuda_device_gpu_test *-*ZLast*:*TheCardsOwnLimit*:*AnAbandonedCapture*:*TheFirstFailure*
gdn_chain_gpu_test GdnChainGpu.*
TESTS
  [ $count -gt 0 ] || return $not_run
  return $failed
}

# bench NAME CONTEXT CHUNK [OPTION ..]
bench() {
  FLASHNEXT_GATES="$out/receipts" "$python" -m flashnext bench "$1" --like flash-next --layers "$layers" \
    --device cuda:0 --context "$2" --chunk "$3" --receipt "$out/receipts" --quiet "${@:4}"
}

# Decode steps of several lanes, each fed random ids, so that their experts differ.
run_lanes() {
  local n
  for n in ${FN_LANES:-8 9 16 32}; do
    bench decode "${FN_CONTEXT:-2048}" 2048 --lanes "$n" --random-ids || return 1
  done
}

# The same with experts in host memory and lines for 115 of a layer's 512.
run_offload() {
  local n
  for n in 1 ${FN_LANES:-8 9 16 32}; do
    bench decode "${FN_CONTEXT:-2048}" 2048 --experts offload --lines 115 --lanes "$n" --random-ids --profile 0 || return 1
  done
}

run_stage() {
  case "$1" in
    build | ctest | gate | pytest) "run_$1" ;;
    memcheck | racecheck | initcheck) run_sanitizer "$1" ;;
    lanes | offload) "run_$1" ;;
    beside) bench beside "${FN_CONTEXT:-30000}" 2048 ;;
    decode) bench decode "${FN_CONTEXT:-2048}" 2048 ;;
    prefill) bench prefill "${FN_CONTEXT:-8192}" 8192 ;;
    load) bench load 2048 2048 ;;
  esac
}

gpu=$(nvidia-smi -L 2>/dev/null | grep '^GPU' || ls /dev/nvidia0 2>/dev/null || true)
summary=$out/summary.txt
printf '%-12s %-8s %5s %9s\n' stage result code seconds >"$summary"
bad=0
linked=no
for stage in "${stages[@]}"; do
  start=$(date +%s.%N)
  echo "== $stage"
  case "$stage" in
    gate | pytest | decode | lanes | offload | prefill | beside | load)
      if [ $linked = no ] && link_package >"$out/package.log" 2>&1; then linked=yes; fi
      ;;
  esac
  if [ "$stage" != build ] && [ -z "$gpu" ]; then
    # Tests that skip for want of a GPU would look like tests that passed.
    echo 'not run: there is no NVIDIA GPU here' >"$out/$stage.log"
    code=$not_run
  elif [ $linked = no ] && [[ "$stage" =~ ^(gate|pytest|decode|lanes|offload|prefill|beside|load)$ ]]; then
    cp "$out/package.log" "$out/$stage.log"
    code=$not_run
  else
    (run_stage "$stage") >"$out/$stage.log" 2>&1
    code=$?
  fi
  case $code in
    0) result=passed ;;
    "$not_run") result='not run' ;;
    *) result=FAILED ;;
  esac
  [ "$result" = passed ] || bad=1
  tail -n 12 "$out/$stage.log"
  printf '%-12s %-8s %5d %9.1f\n' "$stage" "$result" "$code" "$(echo "$(date +%s.%N) $start" | awk '{print $1 - $2}')" >>"$summary"
done
rm -rf "$out/python"
echo
if [ "${FN_PACK:-0}" = 1 ]; then
  find "$out" -mindepth 1 -maxdepth 1 ! -name summary.txt ! -name gpu-check.tar.gz -printf '%f\n' |
    tar -C "$out" -czf "$out/gpu-check.tar.gz" -T -
  find "$out" -mindepth 1 -maxdepth 1 ! -name summary.txt ! -name gpu-check.tar.gz -exec rm -rf {} +
fi
cat "$summary"
exit $bad
