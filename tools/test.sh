#!/usr/bin/env bash
# THE test command: installs what it needs, builds, and runs every test that this machine can run.
#
#   tools/test.sh           C++ tests (ctest), the package installed from this tree, Python tests (pytest)
#   tools/test.sh --quick   without the slow tests and the comparison with the reference implementation
#   tools/test.sh --asan    the C++ tests under AddressSanitizer and UBSanitizer alone
#   tools/test.sh --tsan    the C++ tests under ThreadSanitizer alone
#
# Everything it makes lies in build/. It exits with 0 only if all that ran passed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

mode=${1:-all}
case "$mode" in
  all | --quick | --asan | --tsan) ;;
  *)
    sed -n '2,9s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac

say() { printf '\n== %s\n' "$*"; }

# ---- what the build needs ----------------------------------------------------------------------
missing=()
command -v g++ >/dev/null || missing+=(g++)
command -v cmake >/dev/null || missing+=(cmake)
command -v ninja >/dev/null || missing+=(ninja-build)
[ -e /usr/include/gtest/gtest.h ] || missing+=(libgtest-dev)
python3 -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
command -v ccache >/dev/null || missing+=(ccache)
if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -q >/dev/null
    apt-get install -q -y --no-install-recommends "${missing[@]}" >/dev/null
  else
    echo "please install: ${missing[*]}" >&2
    exit 1
  fi
fi
if command -v ccache >/dev/null; then
  export CMAKE_CXX_COMPILER_LAUNCHER=ccache
fi
jobs=$(nproc)
export CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$jobs}

# ---- C++ ---------------------------------------------------------------------------------------
preset=host
[ "$mode" = --asan ] && preset=host-asan
[ "$mode" = --tsan ] && preset=host-tsan
say "building preset $preset"
mkdir -p build
log=build/$preset.log
cmake --preset "$preset" >"$log" 2>&1 || { cat "$log"; exit 1; }
grep 'flashnext:' "$log" || true
cmake --build --preset "$preset" >>"$log" 2>&1 || { tail -n 60 "$log"; exit 1; }

failed=()
say "C++ tests"
ctest --preset "$preset" || failed+=("ctest ($preset)")
if [ "$preset" != host ]; then
  [ ${#failed[@]} -eq 0 ]
  exit
fi

# ---- the package, installed from this tree -----------------------------------------------------
venv=build/test-venv
say "installing the package into $venv"
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
python=$venv/bin/python
if [ ! -e /dev/nvidiactl ]; then
  export CMAKE_ARGS="${CMAKE_ARGS:-} -DFN_CUDA=OFF"
  echo "no GPU here: the package is built for the host device alone"
fi
"$python" -m pip install '.[test,dev]' >build/pip.log 2>&1 || { tail -n 60 build/pip.log; exit 1; }
"$venv/bin/flashnext" --version

marks='not gpu'
if [ "$mode" = --quick ]; then
  marks='not gpu and not slow and not reference'
  echo 'reference and slow tests: not run (--quick)'
elif ! timeout 900 "$python" -m pip install 'torch==2.13.0' 'transformers>=5.24' >build/pip-reference.log 2>&1; then
  echo 'reference tests: not run (torch and a transformers with this architecture are not to be had)'
fi

# ---- what does not run here --------------------------------------------------------------------
cpp_gpu=$(find tests/cpp -name '*_gpu_test.cpp' | wc -l)
py_gpu=$("$python" -m pytest -q --collect-only -m gpu 2>/dev/null | grep -c '::' || true)
if "$python" -c 'import flashnext as f, sys; sys.exit(len(f.devices()) < 2)'; then
  echo "gpu tests: run them with ctest --preset gpu and pytest -m gpu"
else
  echo "gpu tests: not run (no GPU here): $cpp_gpu C++ test programs, $py_gpu Python tests"
  find tests/cpp -name '*_gpu_test.cpp' -printf '  not run: %f\n' | sort
fi

say "Python tests"
"$python" -m pytest -q -m "$marks" --durations=8 || failed+=(pytest)

if [ ${#failed[@]} -gt 0 ]; then
  printf 'FAILED: %s\n' "${failed[*]}" >&2
  exit 1
fi
