"""An output names its source by hub id, licence, language and tags, and by no local path."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from quantkit.checkpoint import report
from quantkit.checkpoint.origin import origin, without_paths
from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import CheckpointError
from quantkit.pipeline.convert import pack
from quantkit.pipeline.quantize import quantize
from quantkit.recipes.recipe import from_mapping
from tests.checkpoint.samples import dense_folder

CARD: dict[str, Any] = {
    "license": "other",
    "license_name": "acme",
    "license_link": "LICENSE",
    "language": ["en", "de"],
    "tags": ["chat", "gptq"],
    "pipeline_tag": "text-generation",
}
KEPT = {**CARD, "tags": ["chat"]}


def write_card(folder: Path, **stated: Any) -> None:
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump(stated)}---\n\n# A model\n")


def write_config(folder: Path, **stated: Any) -> None:
    (folder / "config.json").write_text(json.dumps(stated))


def facts(folder: Path, model: str | Path | None = None) -> dict[str, Any]:
    return origin(Checkpoint(folder), folder if model is None else model, None)[0]


def test_a_hub_id_that_was_given_is_the_base(tmp_path: Path) -> None:
    folder = dense_folder(tmp_path / "m")
    write_card(folder, base_model="some/ancestor", **CARD)
    ours = {"name": "org/model", "revision": None, "base_model": "org/model", "relation": "quantized"}
    assert facts(folder, "org/model") == {**ours, **KEPT}


@pytest.mark.parametrize(
    ("config", "card", "base"),
    [
        ("org/model", "org/ancestor", "org/model"),
        ("", "org/ancestor", "org/ancestor"),
        ("", ["org/ancestor"], "org/ancestor"),
        ("", ["org/one", "org/other"], None),
        ("/models/llama", None, None),
        ("./llama", None, None),
        ("models/llama", None, None),  # it leads to a folder from above the source
        ("a/b/c", None, None),
        ("llama", None, None),
        (5, 7, None),
    ],
)
def test_a_folder_names_the_model_that_it_came_from(config: Any, card: Any, base: str | None, tmp_path: Path) -> None:
    folder = dense_folder(tmp_path / "models" / "llama")
    write_config(folder, _name_or_path=config)
    if card is not None:
        write_card(folder, base_model=card)
    found = facts(folder)
    assert found.get("base_model") == base and "relation" not in found, "it may have been trained since"
    assert found["name"] == "llama"


@pytest.mark.parametrize(
    "card",
    [
        "# no front matter\n",
        "---\nlicense: mit\n",
        "---\n- a\n---\n",
        "---\nlicense: [\n---\n",
        "---\nlicense: {a: 1}\ntags: [1, 2]\nlanguage: 2001-01-01\n---\n",
        "---\n" + "[" * 1000 + "\n---\n",
        "\ufeff",
        "---\nlicense: !!python/object/apply:os.system [exit]\n---\n",
    ],
)
def test_a_card_that_says_nothing_usable_is_no_error(card: str, tmp_path: Path) -> None:
    folder = dense_folder(tmp_path / "m")
    (folder / "README.md").write_text(card)
    found, notices = origin(Checkpoint(folder), folder, None)
    assert found == {"name": "m", "revision": None}
    broken = card.startswith("---") and card.endswith("---\n") and "2001" not in card
    assert any("licence and tags were not taken over" in notice for notice in notices) == broken


def test_a_byte_order_mark_hides_no_licence(tmp_path: Path) -> None:
    folder = dense_folder(tmp_path / "m")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n", encoding="utf-8-sig")
    assert facts(folder)["license"] == "mit"


def test_a_card_that_links_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder = dense_folder(tmp_path / "m")
    (tmp_path / "card.md").write_text("x")
    (folder / "README.md").symlink_to(tmp_path / "card.md")
    with pytest.raises(CheckpointError, match=r"README\.md.*link out"):
        facts(folder)


def test_local_paths_leave_a_config_at_any_depth(tmp_path: Path) -> None:
    stated = {
        "_name_or_path": "/x",
        "text_config": {"_name_or_path": "org/model", "l": [{"name_or_path": "./x"}]},
        "k": 1,
        "vocab_file": "~/models/vocab.json",
        "merges_file": r"C:\models\merges.txt",
        "cache": r"\\server\share",
    }
    kept = {"k": 1, "template": "/no_think /a/b\n", "eos_token": "</s>", "pattern": r"\s+\S", "splits": r"\n\n"}
    stated |= kept
    assert without_paths(stated, tmp_path) == {"text_config": {"_name_or_path": "org/model", "l": [{}]}, **kept}


@pytest.mark.parametrize("text", ["/a/b", "~/x/y", "C:\\x\\y", "//a/b", "file:///a/b"])
def test_no_token_label_or_template_is_taken_for_a_local_path(text: str, tmp_path: Path) -> None:
    stated = {
        "added_tokens_decoder": {"7": {"content": text, "special": True}, "file": {"content": text, "path": text}},
        "bos_token": text,
        "eos_token": {"content": text, "lstrip": False},
        "additional_special_tokens": [text, {"content": text}],
        "extra_special_tokens": {"path": text, "image_file": text},
        "chat_template": text,
        "chat_templates": [{"name": "default", "template": text}],
        "stop_strings": [text],
        "id2label": {"0": text},
        "id_to_token": {"0": text, "model": text},
        "unk": text,
    }
    assert without_paths(stated, tmp_path) == stated
    places = {"special_tokens_map_file": text, "train_files": [text], "base_model": text, "modelPath": text}
    assert without_paths({**places, "tokenizer": {"path": text}}, tmp_path) == {"train_files": [], "tokenizer": {}}


def test_every_step_hands_on_what_the_source_says(small_llama: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(small_llama, tmp_path / "models--org--m" / "snapshots" / "12ab"))
    write_card(model, **CARD)
    (model / "model.gguf").write_bytes(b"GGUF")
    quantize(model, tmp_path / "ct", from_mapping({"method": "rtn"}))
    pack(tmp_path / "ct", tmp_path / "marlin", "marlin")
    expected = {"base_model": "org/m", "base_model_relation": "quantized", **KEPT}
    for out, layout in (("ct", "compressed-tensors"), ("marlin", "marlin")):
        stated = yaml.safe_load((tmp_path / out / "README.md").read_text().split("---\n")[1])
        assert stated.items() >= {**expected, "tags": ["quantized", "quantkit", layout, "int4", "chat"]}.items()
        assert report.load(tmp_path / out)["base"]["revision"] == "12ab"
    assert report.load(tmp_path / "ct")["left_out"] == ["model.gguf"]
    (tmp_path / "ct" / report.REPORT).unlink()  # as the folder of another program
    write_card(tmp_path / "ct", base_model="org/m", license="mit", tags=["compressed-tensors", "chat"])
    pack(tmp_path / "ct", tmp_path / "gptq", "gptq")
    stated = yaml.safe_load((tmp_path / "gptq" / "README.md").read_text().split("---\n")[1])
    assert stated["base_model"] == "org/m" and stated["base_model_relation"] == "quantized"
    assert stated["license"] == "mit" and stated["tags"] == ["quantized", "quantkit", "gptq", "int4", "chat"]
