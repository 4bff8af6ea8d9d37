#!/bin/bash
# sglang_setup.sh [DIR]   make the folder in which test_sglang.py finds SGLang (default ../.sglang-check); no GPU and no CUDA needed
# DIR holds SGLang's Python files without its compiled parts, and four packages that the environment of vLLM lacks. That
# environment's Python ($VLLM_CHECK, default ../.vllm-check) runs it, because it has torch, transformers and Triton.
set -euo pipefail
dir=${1:-../.sglang-check}
python=${VLLM_CHECK:-../.vllm-check}/bin/python
sglang=0.5.23
mkdir -p "$dir"
wheel=$(mktemp -d "$dir/wheel.XXXXXX")
trap 'rm -rf "$wheel"' EXIT
"$python" -m pip download -qq --no-deps --only-binary :all: --disable-pip-version-check -d "$wheel" "sglang==$sglang"
"$python" - "$wheel" "$dir" <<'P'
import glob, sys, zipfile
with zipfile.ZipFile(glob.glob(sys.argv[1] + "/sglang-*.whl")[0]) as z:
    z.extractall(sys.argv[2], [n for n in z.namelist() if n.endswith((".py", "METADATA", "entry_points.txt"))
                               or n.startswith("sglang/kernels/jit") and not n.endswith(".so")])
P
"$python" -m pip install -qq --no-deps --only-binary :all: --disable-pip-version-check --target "$dir" --upgrade orjson IPython traitlets torchvision==0.28.0
echo "made $dir, $(du -sm "$dir" | cut -f1) MB"
