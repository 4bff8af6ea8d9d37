"""The keys of reports, proofs and every `--json` output: where each stands, and its type."""

from __future__ import annotations

import json
import shutil

from tests.promises.outputs import CALIB, RTN
from tests.promises.running import REPORT, Work, key_paths

TEXT = "--data calib.txt --window 256"
#: Commands that print one JSON object; those with `-o out` write a report with the same keys.
PRINTED = (
    f"quantize model -o out {RTN}",
    f"quantize model -o out {CALIB} -q",
    f"quantize odd -o out --set pad=true --group-size channel --layout marlin {RTN}",
    f"quantize model -o out --prune 2:4 --layout marlin24 {RTN}",
    "prune model -o out --method magnitude -q",
    f"prune model -o out --method sparsegpt {CALIB} -q",
    "quantize model --recipe int4-rtn -o out -q",
    "pack int4 --layout marlin -o out -q",
    "pack int4 --layout tcfpx --requantize -o out -q",
    "convert compressed-tensors-to-gptq int4 -o out -q",
    "convert --list",
    f"plan model {RTN}",
    f"plan model --target vllm --gpu h100 --gpu-memory 80GB {CALIB} -q",
    f"plan odd --set pad=true --layout marlin --group-size channel {RTN}",
    "inspect model",
    "inspect int4",
    "verify int4 -q",
    "verify int4 --against int4 -q",
    f"eval ppl int4 {TEXT} -q",
    f"eval kld int4 --against model {TEXT} -q",
    "compare model -o table --recipes int4:g64:rtn --text calib.txt --window 256 --device cpu -q",
    "generate int4 abc --max-new-tokens 2 -q",
    "report int4 -q",
    "doctor",
)
#: Keys whose presence or type depends on the machine: of `doctor`, and of readers whose packages are missing.
ELSEWHERE = (
    "not_opened_by.",
    "not_tried.",
    "gpus[]",
    "kernels.here[]",
    "checks[].found",
    "checks[].fix",
    "checks[].ok",
    "fixes[]",
    "machine.free_memory",
)


def keys(work: Work) -> dict[str, list[str]]:
    """Return the sorted keys of what each command prints with `--json`, and of verify.json."""
    work.make("int4", f"quantize pruned -o int4 {RTN}")
    found = {}
    for line in PRINTED:
        printed = key_paths(json.loads(work.done(f"{line} --json").stdout))
        found[line] = sorted(path for path in printed if not path.startswith(ELSEWHERE))
        if "-o out" in line:
            assert key_paths(json.loads((work / "out" / REPORT).read_text())) == printed, line
            shutil.rmtree(work / "out")
    return found | {"verify.json": sorted(key_paths(json.loads((work / "int4" / "verify.json").read_text())))}
