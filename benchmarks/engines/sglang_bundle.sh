#!/bin/bash
# sglang_bundle.sh OUT   make OUT/site.tar.xz: SGLang 0.5.23 for a machine that has the site of bundle.sh (one architecture: sm_90)
# Its site comes before that one in PYTHONPATH. `python3` must be Python 3.12 on x86-64 Linux. About 3 GB of disk.
# Left out: diffusion models, the Rust servers, FlashAttention-3 (98 MB), kernels for other GPUs and for latent attention.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd); mkdir -p "${1:?sglang_bundle.sh OUT}"; cd "$1"

if [ ! -d site ]; then
  python3 -m pip download -q --no-deps --only-binary :all: -d wheels -r "$here/sglang.txt"
  python3 -m pip install -q --no-deps --no-index --no-compile --target site.new wheels/*.whl
  cd site.new
  rm -rf bin share triton_kernels sglang/{multimodal_gen,test} sglang/srt/rust_extensions/*.so \
    sgl_kernel/sm100 sgl_kernel/*_ops*.so
  python3 "$here/prune.py" --arch 90 sgl_kernel/sm90/*.so
  # SGLang compiles its Marlin on the machine, 270 kernels in one unit: here those of 4 bits in groups of 128 alone.
  sed -i '/^ *[A-Z0-9]*_GET_IF(host::/{/COMMON_GET_IF(host::kU4)/b; /COMMON_GET_IF(host::kU4B8)/b; d}
    /_GET_IF(W_TYPE, [1-4], N_BLOCKS, K_BLOCKS, \(true\|false\), \(-1\|2\|4\), NUM_THREADS, false) *\\$/d' \
    sglang/kernels/jit/csrc/gemm/marlin/gptq_marlin.cuh sglang/kernels/jit/csrc/gemm/marlin_moe/moe_wna16_marlin.cuh
  cd ..; mv site.new site
fi
tar --sort=name --owner=0 --group=0 --mtime=2026-01-01 -C site -c . | xz -T1 --x86 --lzma2=preset=1 > site.tar.xz
ls -l site.tar.xz
