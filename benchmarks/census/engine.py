"""Ask vLLM, by a script that checks folders on a CPU, which outputs of the census it opens."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import distributions
from pathlib import Path
from threading import Timer
from typing import Any

#: seconds for one folder, and for the start of the script
LIMIT = 300
#: vLLM's quantization library would compile in the background, in two processes for each folder
SETTINGS = {"HUMMING_DISABLE_PARALLEL_BUILD": "1", "OMP_NUM_THREADS": "1"}
#: verdicts that are no refusal
OK, NO_CLASS, NEWER = "ok", "no class", "too new"
#: what vLLM says -> the verdict, where the folder itself is not the reason
NOT_ASKED = {
    r"are not supported for now|has no vLLM implementation|was supported in vLLM until|"
    r"Embedding models do not support": NO_CLASS,
    r"Transformers does not recognize this arch": NEWER,
}


def ask(script: Path, kept: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Add vLLM's verdict to each row whose output by RTN is in `kept`, as `vllm` (see `opened`).

    For each output that vLLM refuses, the verdict on the dense model is `vllm_dense`. If that is a refusal too, it says
    nothing about the quantized folder.
    """
    found = opened(script, sorted(kept.glob("*/rtn")))
    dense = opened(script, [kept / out.parent.name / "model" for out, verdict in found.items() if is_refusal(verdict)])
    for row in rows:
        for key, verdicts, name in (("vllm", found, "rtn"), ("vllm_dense", dense, "model")):
            row.pop(key, None)
            if (verdict := verdicts.get(kept / row["family"] / name)) is not None:
                row[key] = verdict


def is_refusal(verdict: str | None) -> bool:
    """Return True if vLLM has a class for a family, and does not open its folder."""
    return verdict not in (None, OK, NO_CLASS, NEWER)


def opened(script: Path, folders: Sequence[Path], limit: float = LIMIT, options: Sequence[str] = ()) -> dict[Path, str]:
    """Return folder -> "ok", "no class", "too new" (for its transformers) or vLLM's reason, in the order of `folders`.

    `script` takes folders, `--json` and `options`. It prints one object a folder, in order: `folder`, `ok`, and on
    failure `stage` and `error`. A folder at which it ends, or that it does not answer within `limit` seconds, gets that
    as its reason. RuntimeError if the script ends without any answer.
    """
    found: dict[Path, str] = {}
    waiting, settings = list(folders), os.environ | SETTINGS
    while waiting:
        with tempfile.TemporaryFile("w+") as log:
            command = [sys.executable, str(script), "--json", "-q", "--option", "model_impl=vllm", *options]
            command += map(str, waiting)
            with subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True, env=settings
            ) as run:
                for result in _results(run, limit):
                    found[Path(result["folder"])] = _verdict(result)
            hung = run.returncode == -signal.SIGKILL
            if not found and not hung:
                log.seek(0)
                raise RuntimeError(f"{script} ended with code {run.returncode}: {log.read()[-500:]}")
        waiting = [folder for folder in waiting if folder not in found]
        if waiting:
            ended = f"no end within {limit:.0f} s" if hung else f"the check ended with code {run.returncode}"
            found[waiting.pop(0)] = ended
    return {folder: found[folder] for folder in folders}


def versions() -> dict[str, str]:
    """Return the versions of vLLM, and of its transformers, in the environment that $VLLM_CHECK names to the script."""
    places = [str(path) for path in Path(os.environ["VLLM_CHECK"]).glob("lib/python*/site-packages")]
    found = {package.name: package.version for package in distributions(path=places)}
    return {"vllm": found["vllm"], "vllm_transformers": found["transformers"]}


def _results(run: subprocess.Popen[str], limit: float) -> Iterator[dict[str, Any]]:
    """Yield what the script prints; kill it and its processes if nothing comes for `limit` seconds."""
    assert run.stdout is not None

    def timer() -> Timer:
        started = Timer(limit, os.killpg, (run.pid, signal.SIGKILL))
        started.start()
        return started

    watch = timer()
    for line in run.stdout:
        watch.cancel()
        if line.startswith("{"):
            yield json.loads(line)
        watch = timer()
    watch.cancel()


def _verdict(result: dict[str, Any]) -> str:
    if result["ok"]:
        return OK
    error = " ".join(result["error"].split()).replace(result["folder"], "the folder")
    known = (verdict for pattern, verdict in NOT_ASKED.items() if re.search(pattern, error))
    return next(known, f"{result['stage']}: {error}")
