#!/bin/bash
# speed.sh make          random folders with the shape of an 8B model, and one block of each, into $BIG
# speed.sh warm OUT      compile the kernels of all by engines on the single blocks, before anything is timed
# speed.sh time OUT      decoding compiled as `vllm serve` starts it, all folders in one run on GPU ${GPU:-0}: OUT/serving.csv
set -uo pipefail
cd "$(dirname "$0")/../.."; . benchmarks/engines/env.sh; export PYTHONPATH=$PYTHONPATH:$PWD CUDA_VISIBLE_DEVICES=${GPU:-0}
export BIG=${BIG:-$BUNDLE/big}; mkdir -p "$BIG"
SERIES=${SERIES:-marlin ct ct@linear_backend=humming tcfpx humming marlin24}
start() {  # start PREFIX OUT.csv SECONDS: all folders of the series, loaded at once and measured one after the other
  local specs=() spec
  for spec in $SERIES; do specs+=("$BIG/$1$spec@gpu_memory_utilization=0.1@compile"); done
  python3 benchmarks/serving.py time --together --batch 1 4 16 64 256 --timeout "$3" --logs "$out/logs" -o "$2" "${specs[@]}"
}
make() { python3 benchmarks/serving.py make "$BIG/$1.new" "${@:2}" && mv "$BIG/$1.new" "$BIG/$1"; }
case ${1:-} in
make)
  for folder in "ct compressed-tensors int4:g128" "marlin marlin int4:g128" "tcfpx tcfpx fp6:channel" \
    "humming humming fp6:channel" "marlin24 marlin24 int4:g128:24"; do
    make one-$folder --blocks 1 & make $folder &
  done; wait; du -sm "$BIG"/*;;
warm) out=$2; start one- /dev/null 180;;
time) out=$2; start "" "$out/serving.csv" 200;;
*) sed -n 2,4p "$0"; exit 2;;
esac
