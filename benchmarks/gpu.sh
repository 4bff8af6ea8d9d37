#!/usr/bin/env bash
# All GPU tests and benchmarks; results and log go to benchmarks/h200/. REFERENCE holds models/ and data/.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
reference=${REFERENCE:-../shared}
results=benchmarks/h200
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$results"
exec > >(tee "$results/log.txt") 2>&1

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv
"$python" -c 'import torch, transformers; print("torch", torch.__version__, "transformers", transformers.__version__)'
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH}

"$python" -m pytest -q -m gpu tests

data=$reference/data
texts=("$data/wikitext2/test.txt" "$data/ptb/test.txt")
"$python" benchmarks/accuracy.py --model "$reference/models/llama-29m" --calib "$data/wikitext2/train.txt" \
    --text "${texts[@]}" -o "$results/accuracy_llama-29m.csv"

"$python" benchmarks/train_opt.py --tokenizer "$reference/models/llama-29m" --valid "$data/wikitext2/valid.txt" \
    --text "$data/wikitext2/train.txt" "$data/ptb/train.txt" -o "$work/opt"
"$python" benchmarks/accuracy.py --model "$work/opt" --calib "$data/wikitext2/train.txt" \
    --text "${texts[@]}" -o "$results/accuracy_opt-14m.csv"
