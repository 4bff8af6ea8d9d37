"""Packed weights in and out of folders; files that are filled; writing that is stopped and then continued."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.stored_tensors import StoredTensors
from quantkit.checkpoint.writer import CheckpointWriter, Item, committed_files
from quantkit.core.formats import INT4
from quantkit.core.quantized_tensor import Scheme
from quantkit.errors import CheckpointError, QuantkitError
from quantkit.io import files
from quantkit.io.model_folder import INDEX, SMALL, companions
from quantkit.io.safetensors_files import RESERVED, damaged_tensors, read_header
from quantkit.io.staging import JOURNAL, read_journal, staging
from quantkit.layouts import LAYOUTS
from tests.checkpoint.samples import Q, copy_all, dense_folder, keys_that_differ, packed_folder
from tests.faults import Killed, count, faults, killer, state
from tests.layouts.samples import record
from tests.tiny_models import write_model


@pytest.mark.parametrize("name", LAYOUTS)
def test_packed_weights_go_through_folders_unchanged(tmp_path: Path, name: str) -> None:
    folder, q = packed_folder(tmp_path / "m", name)
    source = Checkpoint(folder)
    assert source.layout is LAYOUTS[name] and source.modules() == [Q]
    assert source.scheme(Q) == q.scheme and source.size(Q) == (256, 256)
    assert source.quantized(Q).equal(q)
    assert torch.equal(source.dense(f"{Q}.weight"), q.dequantize(torch.float16))
    assert sorted(source.logical()) == sorted(
        ["model.embed_tokens.weight", "model.norm.weight", f"{Q}.bias", f"{Q}.weight"]
    )
    hashes = copy_all(source, tmp_path / "out", source.layout)
    assert hashes == {path.name: files.hash_of_file(path) for path in (tmp_path / "out").iterdir()}
    again = Checkpoint(tmp_path / "out")
    assert again.quantized(Q).equal(q) and again.schemes == source.schemes
    assert {n: again.get(n).tolist() for n in again.names()} == {n: source.get(n).tolist() for n in source.names()}
    if source.layout.SIDE_FILE is not None:
        side = json.loads((tmp_path / "out" / source.layout.SIDE_FILE.name).read_text())
        assert side == source.layout.SIDE_FILE.contents(source.config["quantization_config"])


def test_a_folder_that_only_the_side_file_describes(tmp_path: Path) -> None:
    folder, q = packed_folder(tmp_path / "m", "gptq")
    side = {"bits": 4, "group_size": 64, "desc_act": False, "sym": True, "damp_percent": 0.01}
    (folder / "config.json").write_text("{}")
    (folder / "quantize_config.json").write_text(json.dumps(side))
    assert Checkpoint(folder).quantized(Q).equal(q)


def test_only_data_goes_along(tmp_path: Path) -> None:
    folder = dense_folder(tmp_path / "m")
    wanted = ["tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.txt", "merges.txt", "LICENSE.md"]
    wanted += ["chat_template.jinja", "generation_config.json", "special_tokens_map.json", "Notice", "USE_POLICY.md"]
    wanted += ["added_tokens.json", "preprocessor_config.json", "additional_chat_templates/tool.jinja"]
    wanted += ["SYSTEM_PROMPT.txt", "tekken.json", "tokenizer.model.v3", "video_preprocessor_config.json", "figure.png"]
    left_out = ["tokenizer.py", "tokenization_x.py", "modeling_x.py", "tokenizer.pkl", "training_args.bin", "run.sh"]
    left_out += ["optimizer.pt", "vocab.npz", "model.gguf", "params.json"]
    left_out += ["consolidated.00.pth", "consolidated.safetensors"]
    replaced = ["README.md", ".gitattributes", "SHA256SUMS", "pytorch_model.bin.index.json", "quant_config.json"]
    folders = ["original/tokenizer.model", "onnx/model.onnx", ".cache/x.json"]
    for name in (*wanted, *left_out, *replaced, *folders):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"{}")
    (folder / "tokenizer").mkdir()
    os.mkfifo(folder / "pipe.txt")
    os.truncate(folder / "figure.png", SMALL)
    with (folder / "video.json").open("wb") as large:
        large.truncate(SMALL + 1)
    copy_all(Checkpoint(folder), tmp_path / "out")
    weights = {p for p in state(tmp_path / "out") if p.endswith(".safetensors")}
    assert set(state(tmp_path / "out")) - weights == {*wanted, "README.md", "config.json", INDEX}
    assert (tmp_path / "out" / "README.md").read_bytes() == b"a card\n"
    names, others_left = companions(folder, [path.name for path in Checkpoint(folder).files()])
    assert names == sorted(wanted)
    others = ["onnx/", "original/", "pipe.txt", "tokenizer/", "video.json"]
    assert sorted(others_left) == sorted([*left_out, *others])


def test_a_name_that_is_no_text_is_left_out(tmp_path: Path) -> None:
    folder = dense_folder(tmp_path / "m")
    (folder / "a\nb.txt").write_text("")
    (folder / os.fsdecode(b"\xff.txt")).write_text("")
    assert set(companions(folder)[1]) >= {"a\\nb.txt", "\\udcff.txt"}


def test_shards_stay_below_their_limit(tmp_path: Path) -> None:
    folder = write_model("llama", tmp_path / "m")
    copy_all(Checkpoint(folder), tmp_path / "out", every=1000, shard=300_000)
    for path in Checkpoint(tmp_path / "out").files():
        tensors = read_header(path)[0]
        assert path.stat().st_size - RESERVED <= 300_000 or len(tensors) == 1
    total = json.loads((tmp_path / "out" / INDEX).read_text())["metadata"]["total_size"]
    assert total == sum(p.stat().st_size - RESERVED for p in (tmp_path / "out").glob("*.safetensors"))


def test_a_weight_that_the_layout_cannot_hold_is_named(tmp_path: Path) -> None:
    source = Checkpoint(dense_folder(tmp_path / "m"))
    with pytest.raises(QuantkitError, match="x.y.weight"), staging(tmp_path / "out") as partial:  # noqa: RUF043
        CheckpointWriter(partial, source, LAYOUTS["marlin"]).add(Item("x.y.weight", record(Scheme(INT4, 32), 256, 256)))
    with pytest.raises(CheckpointError, match="twice"), staging(tmp_path / "out") as partial:
        for _ in range(2):
            (writer := CheckpointWriter(partial, source, None)).add(Item("x", torch.ones(1)))
            writer.add(Item("x", torch.ones(1)))
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_a_resume_with_other_inputs_names_them(tmp_path: Path) -> None:
    source = Checkpoint(dense_folder(tmp_path / "m"))
    with suppress(KeyboardInterrupt), staging(tmp_path / "out") as partial:
        writer = CheckpointWriter(partial, source, None)
        writer.identify({"recipe": "a", "source": {"x": "1"}, "same": [1]}, keys_that_differ)
        writer.add(Item("x", torch.ones(2)))
        writer.commit({"seconds": 1.5})
        raise KeyboardInterrupt
    with (
        pytest.raises(CheckpointError, match=r"was begun with other settings, recipe and source$"),
        staging(tmp_path / "out", resume=True) as partial,
    ):
        writer = CheckpointWriter(partial, source, None)
        assert writer.done[0]["facts"] == {"seconds": 1.5} and writer.items_done() == {"x"}
        writer.identify({"recipe": "b", "source": {"x": "2"}, "same": [1]}, keys_that_differ)
    committed = partial / "model-00001.safetensors"
    committed.write_bytes(committed.read_bytes()[:-1] + b"\1")
    with (
        pytest.raises(CheckpointError, match=r"model-00001\.safetensors: changed"),
        staging(tmp_path / "out", resume=True) as partial,
    ):
        CheckpointWriter(partial, source, None)


def filled(folder: Path, stops: int = 0, shard: int = 2 * (32 + 6)) -> CheckpointWriter:
    """Write what is not committed yet of five units, by a new writer after each of the first `stops`.

    Some sizes of tensors are multiples of 8 bytes, some are not.
    """
    folder.mkdir(parents=True, exist_ok=True)
    source = Checkpoint(dense_folder(folder.parent / "m"))
    names = [f"model.layers.{i}.{kind}" for i in range(5) for kind in ("weight", "bias")]
    writer = None
    for i in range(5):
        if writer is None or i <= stops:
            writer = CheckpointWriter(folder, source, None, max_shard_bytes=shard, expected=names)
            writer.identify({}, keys_that_differ)
        if names[2 * i] not in writer.items_done():
            writer.add(Item(f"model.layers.{i}.weight", torch.full([8], float(i))))
            writer.add(Item(f"model.layers.{i}.bias", torch.full([3], float(i), dtype=torch.float16)))
            writer.commit({"block": i})
    assert writer is not None
    return writer


def weights(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def test_files_are_filled_in_order_and_named_to_their_end(tmp_path: Path) -> None:
    writer = filled(tmp_path / "out")
    assert list(writer.hashes().values())[-1] == "", "the last file may grow"
    writer.arrange()
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert sorted(path.name for path in (tmp_path / "out").glob("*.safetensors")) == names == list(writer.hashes())
    held = [sorted(read_header(tmp_path / "out" / name)[0]) for name in names]
    assert held == [
        [f"model.layers.{i}.{kind}" for i in blocks for kind in ("bias", "weight")] for blocks in ((0, 1), (2, 3), (4,))
    ]
    assert all(damaged_tensors(tmp_path / "out" / name) == [] for name in names)
    assert CheckpointWriter(tmp_path / "out", writer.like, None).hashes() == writer.hashes()


@pytest.mark.parametrize("shard", [2 * (32 + 6), 50, 2**20])
def test_a_run_that_is_stopped_after_each_commit_writes_the_same_files(tmp_path: Path, shard: int) -> None:
    found = []
    for stops in range(5):
        filled(folder := tmp_path / f"{stops}" / "out", stops, shard).arrange()
        found.append(weights(folder))
    assert all(each == found[0] for each in found)


def test_a_kill_at_any_operation_of_the_writer_costs_no_byte_and_no_commit(tmp_path: Path) -> None:
    steps = count(lambda: filled(tmp_path / "whole" / "out").arrange())
    for step in range(1, steps + 1):
        folder = tmp_path / f"{step}" / "out"
        with faults(killer(step)), suppress(Killed):
            filled(folder).arrange()
        lines = read_journal(folder / JOURNAL)
        writer = filled(folder)
        assert writer.resumed == max(0, len(lines) - 1)
        writer.arrange()
        assert weights(folder) == weights(tmp_path / "whole" / "out"), f"killed at operation {step} of {steps}"


def test_what_a_stopped_run_committed_can_be_read_before_it_goes_on(tmp_path: Path) -> None:
    writer = filled(tmp_path / "out", 0, 2**20)
    writer.add(Item("x", torch.zeros(4)))
    again = CheckpointWriter(tmp_path / "out", writer.like, None, max_shard_bytes=2**20)
    stored = StoredTensors((tmp_path / "out").resolve(), list(again.hashes()), None)
    assert len(stored.names()) == 10
    assert all(stored.get(f"model.layers.{i}.{kind}").eq(i).all() for i in range(5) for kind in ("weight", "bias"))


@pytest.mark.parametrize("name", ["model-00001.safetensors", "model-00003.safetensors"])
def test_a_byte_that_changed_on_the_disk_meanwhile_is_not_sealed(tmp_path: Path, name: str) -> None:
    writer = filled(tmp_path / "out")
    with (tmp_path / "out" / name).open("r+b") as file:
        file.seek(RESERVED + 5)
        file.write(b"\1")
    with pytest.raises(CheckpointError, match=f"{name}: changed since it was written"):
        CheckpointWriter(tmp_path / "out", writer.like, None)


def test_a_journal_that_replaced_some_of_its_files_keeps_the_others() -> None:
    lines = [
        {"files": {"a": "1", "b": "2"}},
        {"files": {"c": "3"}},
        {"files": {"ab": "4"}, "replaced": ["a", "b"]},
        {"files": {"d": ""}},
        {"files": {"d": "5"}},
    ]
    assert committed_files(lines) == {"c": "3", "ab": "4", "d": "5"}
