"""Model folders from strangers, and writing that is stopped at any operation: one result, or one line that says why."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.checkpoint.origin import resolve
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.stored_tensors import Derived
from quantkit.errors import CheckpointError
from quantkit.io.model_folder import INDEX, companions
from quantkit.text.tokenizer import load_tokenizer
from tests.checkpoint.samples import ONE, TWO, dense_folder
from tests.tiny_models import write_model


def change_index(folder: Path, **changes: Any) -> None:
    index = json.loads((folder / INDEX).read_text())
    weight_map = {k: v for k, v in {**index["weight_map"], **changes}.items() if v is not None}
    (folder / INDEX).write_text(json.dumps({**index, "weight_map": weight_map}))


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(folder)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 800
    return str(caught.value)


@contextmanager
def only_opens_inside(*folders: Path) -> Iterator[list[str]]:
    """Record every open() of a path that is in none of the folders and no part of Python."""
    outside: list[str] = []
    watching = True

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if watching and event == "open" and isinstance(arguments[0], (str, Path)):
            path = Path(arguments[0]).absolute()
            if not any(folder in path.parents or folder == path for folder in folders) and path.suffix != ".py":
                outside.append(str(path))

    sys.addaudithook(hook)
    try:
        yield outside
    finally:
        watching = False


@pytest.mark.parametrize("index", [True, False])
def test_a_folder_is_read_tensor_by_tensor(tmp_path: Path, index: bool) -> None:
    source = Checkpoint(dense_folder(tmp_path / "m", index=index))
    assert sorted(source.names()) == ["a.weight", "b.bias", "c.weight"] == sorted(source.logical())
    for name, tensor in {**ONE, **TWO}.items():
        assert torch.equal(source.get(name), tensor) and torch.equal(source.dense(name), tensor)
        assert (source.shape(name), source.dtype(name)) == (tuple(tensor.shape), tensor.dtype)
    assert source.dense("a.weight", torch.float64).dtype == torch.float64
    assert source.layout is None and source.modules() == [] and source.notices == []
    assert source.hashes().keys() == {"config.json", *(p.name for p in source.files())}
    with pytest.raises(CheckpointError, match=r"no tensor 'x\.weight'"):
        source.get("x.weight")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"torch_dtype": "half"}, torch.float16),
        ({"torch_dtype": None}, torch.float32),
        ({}, torch.float32),
    ],
)
def test_the_dtype_of_the_model(tmp_path: Path, config: dict[str, Any], expected: torch.dtype) -> None:
    assert Checkpoint(dense_folder(tmp_path / "m", config)).dtype_of_model == expected


def second(folder: Path) -> Path:
    return folder / "x-00002-of-00002.safetensors"


def instead(make: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Put something else in the place of the second shard."""
    return lambda folder: (second(folder).unlink(), make(second(folder)))


def out(name: str) -> Callable[[Path], Any]:
    """Move a file out of the folder, and leave a link to it."""
    return lambda folder: (folder / name).symlink_to((folder / name).rename(folder.parent / "elsewhere.safetensors"))


def states(name: str, text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_text(text)


def quantized(stated: Any) -> Callable[[Path], Any]:
    return states("config.json", json.dumps({"quantization_config": stated}))


#: Case -> what is done to a folder of two shards, and what the error says.
SABOTAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "shard missing": (lambda m: second(m).unlink(), "x-00002-of-00002.safetensors' is missing"),
    "shard truncated": (lambda m: os.truncate(second(m), second(m).stat().st_size - 1), "should end at byte"),
    "shard is a FIFO": (instead(os.mkfifo), "not a regular file"),
    "shard links out": (out("x-00002-of-00002.safetensors"), "link out"),
    "shard links to itself": (instead(lambda path: path.symlink_to(path.name)), "cannot be opened"),
    "shard is a pickle": (instead(lambda path: torch.save(TWO, path)), "header"),
    "tensor in two shards, and the index names a third": (
        lambda m: (
            save_file({**TWO, "b.bias": ONE["b.bias"]}, second(m)),
            save_file({"d.weight": torch.ones(1)}, m / "x-3.safetensors"),
            change_index(m, **{"b.bias": "x-3.safetensors", "d.weight": "x-3.safetensors"}),
        ),
        "b.bias is in x-00001-of-00002.safetensors and x-00002",
    ),
    "index names a pickle": (
        lambda m: change_index(m, **{"c.weight": "pytorch_model.bin"}),
        "only *.bin, a kind that can run code",
    ),
    "index names a file elsewhere": (
        lambda m: (
            save_file(TWO, m.parent / "x.safetensors"),
            change_index(m, **{"c.weight": "../x.safetensors"}),
        ),
        "'../x.safetensors'",
    ),
    "index names a number": (lambda m: change_index(m, **{"c.weight": 7}), "no .safetensors weights"),
    "index is a list": (states(INDEX, "[]"), "no JSON object"),
    "weight_map is a list": (states(INDEX, '{"weight_map": []}'), "no weight_map"),
    "weight_map is empty": (states(INDEX, '{"weight_map": {}}'), "no weight_map"),
    "index links out": (out(INDEX), "link out"),
    "index has a key twice": (states(INDEX, '{"weight_map": {"a": "x", "a": "y"}}'), "twice"),
    "index missing": (lambda m: (m / INDEX).unlink(), INDEX),
    "one of two shards": (lambda m: ((m / INDEX).unlink(), second(m).unlink()), INDEX),
    "two indexes": (
        lambda m: (
            shutil.copy(m / INDEX, m / "other.safetensors.index.json"),
            (m / INDEX).rename(m / "one.safetensors.index.json"),
        ),
        "several indexes",
    ),
    "index and single file": (lambda m: save_file({**ONE, **TWO}, m / "model.safetensors"), "out of date"),
    "no config": (lambda m: (m / "config.json").unlink(), "config.json is missing"),
    "config of a stranger's code": (
        states("config.json", '{"text_config": {"auto_map": {"AutoConfig": "x.y"}}}'),
        "--trust-remote-code",
    ),
    "unknown quantization": (
        quantized({"quant_method": "hqq", "bits": 4}),
        "remove quantization_config from config.json, which is out of date",
    ),
    "a linear of BitNet, which rounds dense weights": (
        quantized({"quant_method": "bitnet", "quantization_mode": "online"}),
        "weights quantized by 'bitnet' are not read",
    ),
    "codes in 64 bits": (
        lambda m: (
            quantized({"quant_method": "spqr"})(m),
            save_file({"c.weight": torch.ones(4, 2, dtype=torch.int64)}, second(m)),
        ),
        "weights quantized by 'spqr' are not read",
    ),
    "unknown quantization beside config.json": (
        states("hf_quant_config.json", '{"producer": {}, "quantization": {"quant_algo": "NVFP4"}}'),
        "remove hf_quant_config.json, which is out of date",
    ),
    "quantization no object": (quantized(["gptq"]), "quantization_config is no object"),
}


@pytest.mark.parametrize("case", SABOTAGE)
def test_hostile_and_broken_folders_are_refused(tmp_path: Path, case: str) -> None:
    folder = dense_folder(tmp_path / "m")
    damage, words = SABOTAGE[case]
    damage(folder)
    with only_opens_inside(folder) as outside:
        assert words in refusal(folder)
    assert outside == []


FIRST = "x-00001-of-00002.safetensors"
#: Case -> what is done to a folder of two shards, what the notice says, and the names that are read.
DISAGREEING: dict[str, tuple[Callable[[Path], Any], str, list[str]]] = {
    "unlisted": (
        lambda m: change_index(m, **{"b.bias": None}),
        "'b.bias' is not in the index",
        ["a.weight", "c.weight"],
    ),
    "another copy in the last file": (
        lambda m: save_file({**TWO, "b.bias": torch.zeros(3)}, second(m)),
        "'b.bias' is in several files: the copy that the index names is read, and transformers reads the last",
        ["a.weight", "b.bias", "c.weight"],
    ),
    "in another file": (
        lambda m: change_index(m, **{"b.bias": "x-00002-of-00002.safetensors"}),
        "'b.bias' is not in the file that the index names",
        ["a.weight", "b.bias", "c.weight"],
    ),
    "in no file": (
        lambda m: change_index(m, **{"lm_head.weight": FIRST}),
        "'lm_head.weight' is in the index and in no weight file",
        ["a.weight", "b.bias", "c.weight"],
    ),
    "an index of other files": (
        lambda m: shutil.copy(m / INDEX, m / "consolidated.safetensors.index.json"),
        "ignored: consolidated.safetensors.index.json",
        ["a.weight", "b.bias", "c.weight"],
    ),
    "an index without its files": (
        lambda m: ((m / FIRST).unlink(), second(m).unlink(), save_file({**ONE, **TWO}, m / "model.safetensors")),
        "ignored: model.safetensors.index.json, whose files are not there",
        ["a.weight", "b.bias", "c.weight"],
    ),
}


@pytest.mark.parametrize("case", DISAGREEING)
def test_the_index_decides_and_a_notice_names_the_difference(tmp_path: Path, case: str) -> None:
    folder = dense_folder(tmp_path / "m")
    change, notice, names = DISAGREEING[case]
    change(folder)
    src = Checkpoint(folder)
    assert sorted(src.names()) == names
    assert all(torch.equal(src.get(name), {**ONE, **TWO}[name]) for name in names)
    assert [line.startswith(notice) for line in src.notices] == [True] * bool(notice)


@pytest.mark.parametrize(
    "wrap",
    [
        "_orig_mod.module.{}".format,
        "module.{}".format,
        "base_model.model.{}".format,
        lambda name: name.replace(".", "._fsdp_wrapped_module._checkpoint_wrapped_module."),
    ],
)
def test_names_are_read_without_the_parts_of_a_wrapper(tmp_path: Path, wrap: Callable[[str], str]) -> None:
    folder = dense_folder(tmp_path / "m", index=False)
    save_file({wrap(name): tensor for name, tensor in {**ONE, **TWO}.items()}, folder / "model.safetensors")
    src = Checkpoint(folder)
    assert sorted(src.names()) == ["a.weight", "b.bias", "c.weight"] and src.wrapped is not None
    assert [line.startswith(f"{src.wrapped} is read as ") for line in src.notices] == [True]
    save_file({"model.a": TWO["c.weight"], "module.b": ONE["b.bias"]}, folder / "model.safetensors")
    assert sorted(Checkpoint(folder).names()) == ["model.a", "module.b"]  # not all names begin so
    with pytest.raises(CheckpointError, match=r"MLX.*mlx_lm"):
        header = json.dumps({"a.weight": {"dtype": "U32", "shape": [1], "data_offsets": [0, 4]}}).encode()
        (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
        Checkpoint(folder)


POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 17098273\n"


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.model", "merges.txt", INDEX, "x-00001-of-00002.safetensors"]
)
def test_a_git_lfs_pointer_is_named_whatever_file_it_stands_for(tmp_path: Path, name: str) -> None:
    folder = dense_folder(tmp_path / "m")
    (folder / "sample.png").write_text(POINTER)
    assert "sample.png" in companions(folder)[1]  # no model needs it
    (folder / name).write_text(POINTER)
    said = refusal(folder)
    assert f"{name}: is a Git LFS pointer" in said and "git lfs pull" in said


def test_an_index_may_write_its_files_as_paths_from_its_folder(tmp_path: Path) -> None:
    folder = dense_folder(tmp_path / "m")
    change_index(
        folder, **{"c.weight": "./x-00002-of-00002.safetensors", "a.weight": ".//x-00001-of-00002.safetensors"}
    )
    assert set(Checkpoint(folder).names()) == {*ONE, *TWO}


def test_pickles_alone_are_refused_with_a_program_that_makes_a_whole_folder(tmp_path: Path) -> None:
    old, new = write_model("llama", tmp_path / "old"), tmp_path / "new"
    weights = {name: tensor for path in old.glob("*.safetensors") for name, tensor in load_file(path).items()}
    torch.save(weights, old / "pytorch_model.bin")
    for path in old.glob("*.safetensors*"):
        path.unlink()
    said = refusal(old)
    assert "only pytorch_model.bin" in said
    _, program, _ = said.split('"')
    exec(program.replace("OLD", str(old)).replace("NEW", str(new)))
    assert Checkpoint(new).notices == [] and load_tokenizer(new)


@pytest.mark.parametrize("config", [True, False])
def test_an_adapter_is_refused_with_the_way_out(tmp_path: Path, config: bool) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    save_file(ONE, tmp_path / "adapter_model.safetensors")
    if config:
        (tmp_path / "config.json").write_text("{}")
    assert "merge" in refusal(tmp_path)


def test_a_repository_in_the_hubs_cache_is_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "snapshots" / "0").mkdir(parents=True)
    assert "config.json is missing: give a folder in its snapshots" in refusal(tmp_path)


def test_a_download_that_has_not_ended_is_refused(tmp_path: Path) -> None:
    folder = dense_folder(tmp_path / "m", index=False)
    (folder / "model.safetensors.aria2").touch()  # which has made the whole file, with zeros for what is to come
    assert "model.safetensors.aria2 says that a download has not ended: finish it" in refusal(folder)


@pytest.mark.parametrize("how", ["appended", "replaced", "gone"])
def test_a_file_that_changes_during_the_run_is_found(tmp_path: Path, how: str) -> None:
    folder = dense_folder(tmp_path / "m", index=False)
    path = folder / "model.safetensors"
    source, size = Checkpoint(folder), path.stat().st_size
    if how == "appended":
        path.open("ab").write(b"x")
    elif how == "replaced":
        shutil.copy(path, tmp_path / "copy")
        (tmp_path / "copy").rename(path)
    else:
        path.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        source.get("a.weight")
    assert source.sizes() == {"model.safetensors": size}  # a plan, a report and a search ask for them


@pytest.mark.parametrize(
    "model", ["./x", "../x", "/x/y", "~/x", "a/b/c", "x\\y", "/etc/passwd", "x y", "a//b", "", "x" * 200]
)
def test_a_path_that_is_no_folder_never_reaches_the_network(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    calls: list[str] = []
    watching = True
    sys.addaudithook(lambda event, _: calls.append(event) if watching and event.startswith("socket.") else None)
    with pytest.raises(CheckpointError) as caught:
        resolve(model)
    watching = False
    assert "\n" not in str(caught.value) and calls == []


def test_a_folder_has_no_revision(tmp_path: Path) -> None:
    assert resolve(str(tmp_path)) == tmp_path
    with pytest.raises(CheckpointError, match="--revision"):
        resolve(str(tmp_path), "main")


def test_a_derived_tensor_takes_the_place_of_its_inputs_and_reads_only_the_slice_asked_for(tmp_path: Path) -> None:
    folder = dense_folder(tmp_path / "m", index=False)
    src = Checkpoint(folder)
    twice = Derived((2, 2), torch.float32, ("c.weight",), lambda read, index: 2 * read("c.weight", index))
    before = src.names()
    src.derive({"c.weight": twice})  # under the name of its input
    assert src.names() == before
    assert src.nbytes("c.weight") == 16 and src.shape("c.weight") == (2, 2) and src.dtype("c.weight") == torch.float32
    assert torch.equal(src.get("c.weight"), 2 * TWO["c.weight"])
    row = Derived((2,), torch.float32, ("c.weight",), lambda read, _: read("c.weight", 1))
    src.derive({"row": row})
    assert src.names() == ["row" if name == "c.weight" else name for name in before]
    assert torch.equal(src.get("row"), 2 * TWO["c.weight"][1])
