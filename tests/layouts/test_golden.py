"""The golden vectors here are those of the full set."""

from __future__ import annotations

import hashlib

import pytest

from tests.golden import FULL, HERE, full, here, same

FILES = sorted(path.name.removesuffix(".safetensors.gz") for path in HERE.glob("*.gz"))


@pytest.mark.parametrize("name", FILES)
def test_the_vectors_here_are_those_of_the_full_set(name: str) -> None:
    sums = dict(reversed(line.split()) for line in (HERE / "SHA256SUMS").read_text().splitlines())
    data = (HERE / f"{name}.safetensors.gz").read_bytes()
    assert hashlib.sha256(data).hexdigest() == sums[f"{name}.safetensors.gz"] and len(sums) == len(FILES)
    if FULL.is_dir():
        part, whole = here(name), full(name)
        assert part.cases == {case: whole.cases[case] for case in part.cases}
        same(part.tensors, {key: whole.tensors[key] for key in part.tensors})
