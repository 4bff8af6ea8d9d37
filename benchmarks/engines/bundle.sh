#!/bin/bash
# bundle.sh OUT   make OUT/parts/00, 01, ...: vLLM 0.33 for a machine without a network (one architecture: sm_90)
# The parts are slices of one tar, each at most $PART bytes. `python3` must be Python 3.12 on x86-64 Linux. About 6 GB of disk.
# What the target machine has is left out: CUDA 13.0's libraries of torch 2.11 from pip, transformers 5.17, numba, OpenCV, nvcc.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd); mkdir -p "${1:?bundle.sh OUT}"; cd "$1"
PART=${PART:-50300000}

if [ ! -d site ]; then
  python3 -m pip download -q --no-deps --only-binary :all: -d wheels -r "$here/vllm.txt"
  python3 -m pip install -q --no-deps --no-index --no-compile --target site.new wheels/*.whl
  cd site.new
  # Other GPUs' libraries, the server's Rust front end, headers, tests, profilers. nvcc's ptxas serves Triton.
  rm -rf bin include share torch/{include,share,test} torch/bin/protoc* \
    triton/backends/nvidia/{bin,lib/cupti*} triton/_C/libproton.so nvidia/nccl/{include,lib/*.bc} nvidia/cu13 \
    vllm/vllm-rs vllm/third_party/{fmha_sm100,tml_fa4,deep_gemm} vllm/_qutlass_C* vllm/vllm_flash_attn/{_vllm_fa2_C*,cute}
  find . \( -name __pycache__ -o -name '*.pyi' -o -name '*.a' \) -prune -exec rm -rf {} +
  find . -name '*.so*' -type f -size +1M -exec python3 "$here/prune.py" --arch "${ARCH:-90}" {} + -exec strip --strip-unneeded {} +
  cd ..; mv site.new site
fi

# Four streams, so that four processes unpack them. Code of x86 packs better behind xz's filter for it.
pack() { tar --sort=name --owner=0 --group=0 --mtime=2026-01-01 -C site -c "${@:2}" | xz -T1 --x86 --lzma2=preset=1 > "pack/$1.tar.xz"; }
rm -rf pack parts; mkdir -p pack parts
pack cpu torch/lib/libtorch_cpu.so & pack cuda torch/lib/libtorch_cuda.so nvidia/nccl; wait
pack triton triton & pack rest --exclude=torch/lib/libtorch_cpu.so --exclude=torch/lib/libtorch_cuda.so --exclude=./nvidia --exclude=./triton .; wait
tar -C pack -c . | (cd parts && split -b "$PART" -d - x)
for slice in parts/x*; do mkdir "parts/${slice#parts/x}" && mv "$slice" "parts/${slice#parts/x}/slice${slice#parts/x}"; done
ls -l pack parts/*; du -sm pack
