#!/usr/bin/env bash
# Run a command with PyTorch's CUDA build on a device that only counts memory: no GPU is needed.
#
#   scripts/counting_cuda/run.sh python -m pytest tests/gpu
#   COUNTING_CUDA_TOTAL=25769803776 scripts/counting_cuda/run.sh batchfinder find ... --device cuda
#
# The python in the PATH needs PyTorch for CUDA 13. See memory.cpp and device.cpp for what can be set.
# Operators that PyTorch compiles with Triton are off: compiling needs the GPU's own driver.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
libraries="$(python "$here/build.py" "$here/../../build/counting_cuda")"
state="$(mktemp "${TMPDIR:-/tmp}/counting_cuda.XXXXXX")"
trap 'rm -f "$state"' EXIT
COUNTING_CUDA_STATE="$state" LD_PRELOAD="$libraries" TORCH_DISABLE_NATIVE_JIT=1 \
    PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" "$@"
