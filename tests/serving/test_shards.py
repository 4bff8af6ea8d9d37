"""Test the share of a linear that a rank multiplies with, in every layout, against slices of the decoded weight."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor

from quantkit.core.quantized_tensor import Scheme
from quantkit.errors import CheckpointError, LayoutError, QuantkitError
from quantkit.layouts import LAYOUTS
from quantkit.layouts.recast import recast
from quantkit.serving.shards import JoinedWeight, Part, StackedWeight
from tests.serving.samples import PACKED, decoded, packed, record

N, K = (512, 256, 256), 512


def joined(
    layout: str, label: str, parts: list[Part], k: tuple[int, int], rank: int = 0, ranks: int = 1
) -> JoinedWeight:
    return JoinedWeight("qkv", LAYOUTS[layout], Scheme.parse(label), parts, k, rank, ranks)


def share_of(weight: JoinedWeight) -> Tensor:
    found = weight.packed()
    return decoded(found.layout, found.scheme.label, found.tensors, weight.out, weight.columns[1])


@pytest.mark.parametrize(("layout", "label", "target"), PACKED)
def test_no_row_of_a_rank_is_another_ranks(layout: str, label: str, target: str) -> None:
    whole = [record(label, n, K, seed) for seed, n in enumerate(N)]
    tensors, dense = [packed(layout, q) for q in whole], [q.dequantize() for q in whole]
    for ranks in (1, 2, 4):
        for rank in range(ranks):
            parts = [Part(f"p{i}", n, n // min(ranks, 2 if i else 4)) for i, n in enumerate(N)]
            weight = joined(layout, label, parts, (K, K), rank, ranks)
            weight.check()
            for i, each in enumerate(tensors):
                for suffix, tensor in each.items():
                    weight.add([i], suffix, tensor)
            expected = []
            for i, values in enumerate(dense):
                pieces = values.chunk(ranks if i == 0 else min(ranks, 2))  # two heads of keys and values
                expected.append(pieces[rank if i == 0 else rank * len(pieces) // ranks])
            found = weight.packed()
            assert found.layout == target
            got = decoded(found.layout, found.scheme.label, found.tensors, weight.out, K)
            assert torch.equal(got, torch.cat(expected))


@pytest.mark.parametrize(("layout", "label", "target"), PACKED)
def test_no_column_of_a_rank_is_another_ranks(layout: str, label: str, target: str) -> None:
    q = record(label, 256, K)
    tensors, dense = packed(layout, q), q.dequantize()
    for ranks in (1, 2, 4):
        for rank in range(ranks):
            weight = joined(layout, label, [Part("down", 256, 256)], (K, K // ranks), rank, ranks)
            weight.check()
            for suffix, tensor in tensors.items():
                weight.add([0], suffix, tensor)
            assert torch.equal(share_of(weight), dense.chunk(ranks, 1)[rank])


@pytest.mark.parametrize(("layout", "label", "target"), PACKED)
def test_a_linear_that_is_joined_on_disk_is_split_part_by_part(layout: str, label: str, target: str) -> None:
    q = record(label, sum(N), K)
    weight = joined(layout, label, [Part(f"p{i}", n, n // 2) for i, n in enumerate(N)], (K, K), 1, 2)
    for suffix, tensor in packed(layout, q).items():
        weight.add(range(3), suffix, tensor)
    expected = [part.chunk(2)[1] for part in q.dequantize().split(N)]
    assert torch.equal(share_of(weight), torch.cat(expected))


@pytest.mark.parametrize(("layout", "label"), [("marlin", "int4:g128"), ("compressed-tensors", "int4:g32:asym")])
def test_padding_of_the_folder_and_of_the_kernel_is_told_from_weights(layout: str, label: str) -> None:
    q = record(label, 200, 576 - 576 % Scheme.parse(label).padded_k(1))
    stored = recast(q, q.scheme, (256, 640))
    weight = joined(layout, label, [Part("up", 200, 200)], (q.shape[1], q.shape[1]))
    for suffix, tensor in packed(layout, stored).items():
        weight.add([0], suffix, tensor)
    assert torch.equal(share_of(weight), q.dequantize())

    broken = record(label, 256, 640)
    weight = joined(layout, label, [Part("up", 200, 200)], (q.shape[1], q.shape[1]))
    with pytest.raises(LayoutError, match=r"^up: .* past its true shape"):
        for suffix, tensor in packed(layout, broken).items():
            weight.add([0], suffix, tensor)


@pytest.mark.parametrize(
    ("label", "k", "ranks", "message"),
    [
        ("int4:g128", 4864, 4, "qkv: its 4864 columns in groups of 128 cannot be split over 4 GPUs: "
         "use --tensor-parallel-size 1 or 2"),
        ("int4:g128", 1792, 8, "qkv: its 1792 columns in groups of 128 cannot be split over 8 GPUs: "
         "use --tensor-parallel-size 1 or 2 or 7"),
    ],
)  # fmt: skip
def test_a_split_through_a_group_names_the_sizes_that_work(label: str, k: int, ranks: int, message: str) -> None:
    with pytest.raises(LayoutError) as error:
        joined("awq", label, [Part("down", 256, 256)], (k, k // ranks), 0, ranks).check()
    assert str(error.value) == message


@pytest.mark.parametrize(("k", "ranks"), [(14336, 8), (28672, 8), (53248, 8), (1792, 7), (576, 3)])
def test_no_split_that_a_kernel_takes_is_refused(k: int, ranks: int) -> None:
    labels = ("int4:g64",) if k == 576 else ("int4:g128", "fp6:channel", "int4:channel", "int4:g128:24")
    for label in labels:
        joined("marlin", label, [Part("down", 4096, 4096)], (k, k // ranks), ranks - 1, ranks).check()


def test_no_weight_is_packed_from_what_is_left_of_it() -> None:
    tensors = packed("marlin", record("int4:g128", 256, 256))
    parts = [Part("gate", 256, 256), Part("up", 256, 256)]
    weight = joined("marlin", "int4:g128", parts, (256, 256))
    for suffix, tensor in tensors.items():
        weight.add([0], suffix, tensor)
    with pytest.raises(CheckpointError, match=r"^up is not in the folder"):
        weight.packed()
    with pytest.raises(CheckpointError, match=r"^gate.s is there twice"):
        weight.add([0], "s", tensors["s"])
    weight.add([1], "B", tensors["B"])
    with pytest.raises(QuantkitError, match=r"^up: tensor 's' is missing"):
        weight.packed()
    wide = joined("marlin", "int4:g128", parts[:1], (512, 512))
    with pytest.raises(
        CheckpointError, match=r"^gate: it is packed from \[256, 256\], config.json asks for \[256, 512\]"
    ):
        for suffix, tensor in tensors.items():
            wide.add([0], suffix, tensor)


def test_the_tensors_of_the_folder_are_freed_as_soon_as_a_linear_is_complete() -> None:
    tensors = {suffix: tensor.clone() for suffix, tensor in packed("awq", record("int4:g128:asym", 256, 256)).items()}
    alive = [weakref.ref(tensor) for tensor in tensors.values()]
    weight = joined("awq", "int4:g128:asym", [Part("o", 256, 256)], (256, 256))
    while tensors:
        weight.add([0], *tensors.popitem())
    gc.collect()
    assert [ref() for ref in alive] == [None] * len(alive)
    assert weight.packed().layout == "quick"


def test_the_tensors_of_an_expert_are_freed_as_soon_as_it_is_complete() -> None:
    scheme, layout = Scheme.parse("int4:g128:asym"), LAYOUTS["awq"]
    named = [[Part(f"{e}.{leaf}", 256, 256) for leaf in ("gate", "up")] for e in range(3)]
    stacked = StackedWeight(
        [JoinedWeight("e", layout, scheme, parts, (256, 256), 0, 1, is_expert=True) for parts in named]
    )
    with pytest.raises(CheckpointError, match=r"^0.gate is not in the folder, or not packed"):
        stacked.packed()
    whole = [[record("int4:g128:asym", 256, 256, 2 * e + part) for part in range(2)] for e in range(3)]
    for expert in (2, 0, 1):
        given = {(part, s): t.clone() for part in range(2) for s, t in packed("awq", whole[expert][part]).items()}
        alive = [weakref.ref(tensor) for tensor in given.values()]
        while given:
            (part, suffix), tensor = given.popitem()
            stacked.add((expert, part), suffix, tensor)
            del tensor
        gc.collect()
        assert [ref() for ref in alive] == [None] * len(alive)
    with pytest.raises(CheckpointError, match=r"^2.up.scales is there twice"):
        stacked.add((2, 1), "scales", packed("awq", whole[2][1])["scales"])
    found = stacked.packed()
    assert found.layout == "quick"
    for expert, (gate, up) in enumerate(whole):
        tensors = {suffix: tensor[expert] for suffix, tensor in found.tensors.items()}
        got = decoded(found.layout, found.scheme.label, tensors, 512, 256)
        assert torch.equal(got, torch.cat([gate.dequantize(), up.dequantize()]))
