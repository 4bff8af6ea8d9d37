"""Write the frozen values anew: `python -m tests.promises.freeze`. Only when a promise changes on purpose.

Calibrated weights stay as they were frozen if this machine's arithmetic is another, unless `--weights` is given.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch

from tests.promises.keys import keys
from tests.promises.outputs import ALONE, CALIBRATED, CONVERTED, arithmetic, converted, made, prepare
from tests.promises.running import ERROR_TEXTS, FROZEN, HELP, Work, weights_alone, write_blocks
from tests.promises.words import errors, helps


def main() -> None:
    torch.set_num_threads(1)  # as in the tests: sums of several threads have another order
    with tempfile.TemporaryDirectory() as folder:
        works = []
        for name in ("outputs", "keys", "words"):  # one folder a test module
            (Path(folder) / name).mkdir()
            works.append(prepare(Work(Path(folder) / name)))
        outputs = {key: found for name in CONVERTED for key, found in converted(works[0], name).items()}
        outputs |= {name: made(works[0], line) for name, line in ALONE.items()}
        outputs |= {name: weights_alone(made(works[0], line)) for name, line in CALIBRATED.items()}
        before, here = json.loads(FROZEN.read_text()), arithmetic()
        if here != before["arithmetic"] and "--weights" not in sys.argv:
            for name in CALIBRATED.keys() & before["outputs"].keys():
                outputs[name]["tensors"] = before["outputs"][name]["tensors"]
            here = before["arithmetic"]
        values = {"arithmetic": here, "keys": keys(works[1]), "outputs": outputs}
        FROZEN.write_text(json.dumps(values, indent=1) + "\n")
        write_blocks(HELP, helps(works[2]))
        write_blocks(ERROR_TEXTS, errors(works[2]))


if __name__ == "__main__":
    main()
