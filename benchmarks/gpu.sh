#!/usr/bin/env bash
# GPU tests and benchmarks: results and logs go to benchmarks/gpu/. Stages by name; without arguments those of the last line.
# REFERENCE is the folder that holds models/ and data/.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
reference=${REFERENCE:-../shared}
data=$reference/data
results=benchmarks/gpu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$results"
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH}

tests() {
    "$python" -m pytest -q -m gpu tests
}

accuracy() { # MODEL NAME [OPTIONS]
    "$python" benchmarks/accuracy.py --model "$1" --calib "$data/wikitext2/train.txt" \
        --text "$data/wikitext2/test.txt" "$data/ptb/test.txt" -o "$results/accuracy_$2.csv" "${@:3}"
}

llama() {
    accuracy "$reference/models/llama-29m" llama-29m
}

sparse() {
    accuracy "$reference/models/llama-29m" llama-29m-24 --sparse
}

opt() {
    "$python" benchmarks/train_opt.py --tokenizer "$reference/models/llama-29m" --valid "$data/wikitext2/valid.txt" \
        --text "$data/wikitext2/train.txt" "$data/ptb/train.txt" -o "$work/opt"
    accuracy "$work/opt" opt-14m
}

moe_accuracy() { # routed or all; the first characters (all of PTB) are enough for KL, and six runs take their time
    "$python" benchmarks/train_moe.py --tokenizer "$reference/models/llama-29m" --valid "$data/wikitext2/valid.txt" \
        --text "$data/wikitext2/train.txt" "$data/ptb/train.txt" -o "$work/moe"
    "$python" benchmarks/moe_accuracy.py --model "$work/moe" --calib "$data/wikitext2/train.txt" --characters 450000 \
        --text "$data/wikitext2/test.txt" "$data/ptb/test.txt" -o "$results/moe_accuracy.csv"
}

moe_blocks() { # a process each, so that peaks of memory are those of one model
    for model in qwen3-30b-a3b mixtral-8x7b; do
        "$python" benchmarks/moe_blocks.py --model "$model" --work "$work" -o "$results/moe_blocks.json"
    done
}

solver() {
    "$python" benchmarks/solver.py --csv "$results/solver.csv"
}

quantize() { # GPTQ of whole models by phase, memory beside the plan: all blocks of the 8B, three of the 70B
    "$python" benchmarks/quantize.py --model llama3-8b --blocks 32 --csv "$results/quantize_llama3-8b.csv"
    "$python" benchmarks/quantize.py --model llama2-70b --blocks 3 --csv "$results/quantize_llama2-70b_3.csv"
}

best() { # what a block takes by the recipe int4-best
    "$python" benchmarks/quantize.py --model llama3-8b --blocks 3 --recipe int4-best --csv "$results/quantize_best.csv"
}

kernels() { # LAYOUT
    "$python" -m benchmarks.bench_kernels -q --layout "$1" --model llama3-8b --model llama2-70b --model large \
        --csv "$results/kernels_$1.csv"
}

kernels_marlin() { kernels marlin; }
kernels_marlin24() { kernels marlin24; }
kernels_tcfpx() { kernels tcfpx; }
kernels_quick() { kernels quick; }

generate() { # whole models, dense beside packed; of 70 billion weights in FP6, on one GPU
    export TORCHINDUCTOR_ENABLE_PDL=1 # compiled kernels let the next one begin, and ours are next
    "$python" -m benchmarks.bench_generate -v --model llama3-8b --csv "$results/generate_llama3-8b.csv"
    "$python" -m benchmarks.bench_generate -v --model llama3-8b --layout marlin --layout marlin24 --batch 1 --batch 16 \
        --prompt-tokens 128 --csv "$results/generate_llama3-8b_128.csv"
    "$python" -m benchmarks.bench_generate -v --model llama2-70b --layout tcfpx --csv "$results/generate_llama2-70b.csv"
}

several_gpus() { # of the tests only these, and those of the stage ranks, need two
    "$python" -m pytest -q -m gpu -k "several_gpus or on_two_gpus" tests/properties/test_several_gpus.py tests/kernels/test_bad_operands.py
}

ranks() { # the same run by one process and by a process for each GPU; its journal, signals and bytes are tested first
    local gpus
    gpus=$(nvidia-smi --list-gpus | wc -l)
    "$python" -m pytest -q -m gpu tests/pipeline/test_ranks.py
    for count in 1 "$gpus"; do
        "$python" -m torch.distributed.run --nproc-per-node "$count" benchmarks/quantize.py --model llama3-8b \
            --csv "$results/quantize_ranks$count.csv"
    done
}

sanitizer() { # every tile of the fast kernels on a small odd shape, and the naive kernels, side by side
    local tool layout chosen one running
    for tool in memcheck racecheck; do
        running=()
        for layout in marlin-int4 marlin24-int4 quick-int4 tcfpx-fp naive experts; do
            chosen="odd_shapes and $layout and (test_hopper and 1-dtype0 or test_portable and dtype0)"
            [ "$layout" = naive ] && chosen="test_naive and products"
            [ "$layout" = experts ] && chosen="test_grouped and (every_scheme or sorted or agrees) and not dtype1"
            compute-sanitizer --tool "$tool" --error-exitcode 9 "$python" -m pytest -q -m gpu -x -k "$chosen" \
                tests/kernels/test_{hopper,portable,naive,grouped}.py >"$work/$tool-$layout" 2>&1 &
            running+=($!)
        done
        for one in "${running[@]}"; do wait "$one" || { cat "$work/$tool"-*; return 1; }; done
        cat "$work/$tool"-*
    done
}

verify_8b() {
    "$python" benchmarks/verify_8b.py --work "$work" -o "$results/verify_8b.json"
}

perplexity() { # every layout by its kernel, on a CPU (16 windows of a text), and in transformers alone
    "$python" benchmarks/perplexity.py --windows 16 --model "$reference/models/llama-29m" \
        --text "$data/wikitext2/test.txt" "$data/ptb/test.txt" --csv "$results/perplexity_llama-29m.csv"
}

counters() { # what warps wait for; needs Nsight Compute
    for layout in marlin marlin24 tcfpx quick; do
        "$python" benchmarks/counters.py --layout "$layout" --shape 4096x4096 57344x8192 8192x28672 --m 1 16 64 256 1024 \
            --csv "$results/counters_$layout.csv"
    done
}

papers() { # every figure of the papers that has rows, after the stages kernels_*, generate, counters and bias_shift
    "$python" benchmarks/paper.py
}

batches() { # many tokens: in one launch, in several, and cuBLAS
    "$python" benchmarks/batches.py --csv "$results/batches.csv"
}

experts() { # products and layers of mixtures of experts, every tile
    "$python" benchmarks/experts.py --sweep --csv "$results/experts.csv"
}

encoder_decoders() { # each packed shape proved against the decoded model, and timed
    "$python" benchmarks/encoder_decoders.py --csv "$results/encoder_decoders.csv"
}

cold_start() {
    "$python" benchmarks/cold_start.py --csv "$results/cold_start.csv"
}

bias_shift() { # what FP6 gains by moving the exponent once and not for each weight
    "$python" benchmarks/bias_shift.py --csv "$results/bias_shift.csv"
}

tiles() { # what the models of the Hopper kernels are fitted to
    for layout in marlin marlin24 tcfpx quick; do
        "$python" benchmarks/tiles.py "$layout"
    done
}

for stage in "${@:-tests llama sparse opt moe_accuracy moe_blocks solver kernels_marlin kernels_marlin24 kernels_tcfpx kernels_quick batches generate perplexity verify_8b cold_start bias_shift sanitizer}"; do
    for name in $stage; do
        {
            nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
            "$python" -c 'import torch, transformers as t; print("torch", torch.__version__, "transformers", t.__version__)'
            "$name"
        } 2>&1 | tee "$results/$name.log"
    done
done
