"""Whoever trusts a model's code trusts all of it, in every command, and outputs open as their source did."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer

from tests.command_line import call, refused
from tests.folders import TEXT, restate

MODEL = """
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own_type"


class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""
#: A tokenizer in Python, with a module beside it and a file of its own.
TOKENIZER = """
import json
import os

from transformers import PythonBackend

from .own_words import pieces


class OwnTokenizer(PythonBackend):
    vocab_files_names = {"own_file": "own.codes"}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, own_file=None, **more):
        self.words = json.load(open(own_file))
        super().__init__(**more)

    @property
    def vocab_size(self):
        return len(self.words)

    def get_vocab(self):
        return {word: i for i, word in enumerate(self.words)}

    def _tokenize(self, text, **_):
        return pieces(text)

    def _convert_token_to_id(self, token):
        return self.words.index(token)

    def _convert_id_to_token(self, index):
        return self.words[index % len(self.words)]

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)
"""
WORDS = """
def pieces(text):
    return [each if each.isascii() else "?" for each in text]
"""
PROCESSOR = """
from transformers import BaseImageProcessor


class OwnProcessor(BaseImageProcessor):
    pass
"""
CODE = {"own_model.py": MODEL, "own_tokenizer.py": TOKENIZER, "own_words.py": WORDS, "own_processor.py": PROCESSOR}
TRUST = "--trust-remote-code"


@pytest.fixture(scope="module")
def own(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of which config, model, tokenizer and image processor are its own code."""
    folder = tmp_path_factory.mktemp("own") / "model"
    shutil.copytree(tiny_llama, folder)
    for path in folder.glob("*token*"):
        path.unlink()
    for name, text in CODE.items():
        (folder / name).write_text(text)
    (folder / "own.codes").write_text(json.dumps([chr(i) for i in range(128)]))
    autos = {"AutoConfig": "own_model.OwnConfig", "AutoModelForCausalLM": "own_model.OwnModel"}
    restate(folder / "config.json", model_type="own_type", architectures=["OwnModel"], auto_map=autos)
    tokenizer = {"AutoTokenizer": ["own_tokenizer.OwnTokenizer", None]}
    restate(folder / "tokenizer_config.json", tokenizer_class="OwnTokenizer", auto_map=tokenizer)
    image = {"AutoImageProcessor": "own_processor.OwnProcessor"}
    restate(folder / "preprocessor_config.json", image_processor_type="OwnProcessor", auto_map=image)
    return folder


def test_trusted_code_runs_in_every_command_and_goes_along(own: Path, tmp_path: Path) -> None:
    text, out, packed = tmp_path / "text.txt", tmp_path / "out", tmp_path / "packed"
    text.write_text(TEXT.encode("ascii", "replace").decode())
    few = ("--calib", text, "--samples", 2, "--max-length", 32, "--group-size", 32)
    call("quantize", own, "-o", out, TRUST, *few, "-q")
    call("pack", out, "--layout", "gptq", "-o", packed, TRUST, "-q")
    call("verify", packed, "--against", out, "--device", "cpu", TRUST, "-q")
    for folder in (out, packed):
        assert {name: (folder / name).read_text() for name in CODE} == CODE
        for auto in (AutoConfig, AutoTokenizer):
            assert type(auto.from_pretrained(folder, trust_remote_code=True)).__name__.startswith("Own")
        call("generate", folder, "Hi", "--max-new-tokens", 2, TRUST, "-q")
        call("eval", "ppl", folder, "--data", text, "--window", 16, TRUST, "-q")


def test_what_the_code_of_a_model_prints_is_no_result_and_no_engine_is_named_for_it(own: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(own, tmp_path / "model"))
    prints = "\n    def __init__(self, config):\n        print('loading the model')\n        super().__init__(config)\n"
    (model / "own_model.py").write_text(MODEL + prints)
    for command in (("plan",), ("quantize", "-o", tmp_path / "out")):
        more = ("--method", "rtn", "--group-size", 32, TRUST, "--json")
        result = call(*command, model, *more)
        found = json.loads(result.stdout)
        assert "loading the model" in result.stderr
    assert not [reader for reader in found["readers"] if "vLLM" in reader or "SGLang" in reader]
    assert "or a model with code of its own: load it with another reader" in result.stderr


@pytest.mark.parametrize("command", ["quantize", "pack", "verify", "generate"])
def test_code_that_is_not_trusted_is_refused_by_the_option_that_helps(command: str, own: Path, tmp_path: Path) -> None:
    more = {"pack": ("--layout", "gptq"), "generate": ("Hi",)}.get(command, ())
    out = tmp_path / "out" if command in ("quantize", "pack") else None
    error = refused(command, own, *more, out=out)
    assert "asks to run code that comes with the model: add --trust-remote-code if you trust it" in error


def test_only_a_tokenizer_with_code_is_named(own: Path, tiny_llama: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(own, tmp_path / "model"))
    shutil.copy(tiny_llama / "config.json", model)
    says = f"{model}: its tokenizer asks to run code that comes with the model: add --trust-remote-code"
    assert says in refused("generate", model, "Hi")
    out = tmp_path / "out"
    notices = call("quantize", model, "-o", out, "--method", "rtn", "--group-size", 32).stderr
    assert "tokenizer_config.json asks to run code that comes with the model, which is left out" in notices
    assert not list(out.glob("*.py"))


ANEW = "fetch its Python files again, or use the transformers that they were"
#: File of the code, its text (None: it is missing), and what the error says.
BROKEN: list[tuple[str, str | None, tuple[str, ...]]] = [
    (
        "own_model.py",
        "import a_package_of_theirs\n" + MODEL,
        ("pip install a_package_of_theirs", "install the packages that it names"),
    ),
    ("own_model.py", None, ("own_model.py", ANEW)),
    ("own_model.py", "x = 1", ("no attribute 'OwnConfig'", ANEW)),
    ("own_model.py", "from transformers import NotThere", ("cannot import name 'NotThere'", ANEW)),
    ("own_tokenizer.py", None, ("own_tokenizer.py, which is missing: fetch the Python files of the model too",)),
]


@pytest.mark.parametrize(("file", "text", "says"), BROKEN)
def test_code_that_does_not_run_is_named_with_the_way_out(
    file: str, text: str | None, says: tuple[str, ...], own: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(own, tmp_path / "model"))
    (model / file).unlink() if text is None else (model / file).write_text(text)
    error = refused("generate", model, "Hi", TRUST)
    assert all(words in error for words in says), error


IN_CLASS = "class OwnModel(LlamaForCausalLM):\n"
#: File of the code, where it ends the program, and what stands there instead.
ENDS = [
    ("own_model.py", "\n\nclass OwnConfig", "\n{}\n\nclass OwnConfig"),
    ("own_model.py", IN_CLASS, IN_CLASS + "    def __init__(self, config):\n        {}\n"),
    ("own_tokenizer.py", "        return pieces(text)", "        {}"),
    ("own_model.py", "\n\nclass OwnConfig", "\ndef act(x):\n    {}\n\nclass OwnConfig"),  # in a run
]


@pytest.mark.parametrize("ends", ["raise SystemExit(0)", "import sys; sys.exit('no')", "exit(3)"])
@pytest.mark.parametrize(("file", "where", "instead"), ENDS)
def test_code_that_ends_the_program_is_an_error_of_one_line(
    file: str, where: str, instead: str, ends: str, own: Path, tmp_path: Path
) -> None:
    """With its exit code of 0, a command that wrote nothing would count as done."""
    model = Path(shutil.copytree(own, tmp_path / "model"))
    assert where in CODE[file]
    calls = "\n    def __init__(self, config):\n        super().__init__(config)\n"
    calls += "        self.model.layers[0].mlp.act_fn.forward = act\n"
    runs = "def act" in instead
    (model / file).write_text(CODE[file].replace(where, instead.format(ends)) + (calls if runs else ""))
    (tmp_path / "text.txt").write_text(TEXT.encode("ascii", "replace").decode())
    few = ("--calib", tmp_path / "text.txt", "--samples", 2, "--max-length", 32, "--group-size", 32)
    error = refused("quantize", model, *few, TRUST, out=tmp_path / "out")
    assert ("own_model.py, line " in error and "mend this code" in error) if runs else ANEW in error, error


def test_code_that_interrupts_the_program_leaves_nothing(own: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(own, tmp_path / "model"))
    (model / "own_model.py").write_text("raise KeyboardInterrupt")
    command = ("quantize", model, "-o", tmp_path / "out", "--method", "rtn", TRUST, "-q")
    assert call(*command, code=130).stderr == "Interrupted: nothing was written, run the same command again\n"
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_in_another_repository_that_is_not_reached_is_named(
    file: str, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    model = Path(shutil.copytree(own, tmp_path / "model"))
    text = (model / file).read_text()
    (model / file).write_text(
        text.replace("own_model.", "org/their--own_model.").replace("own_tok", "org/their--own_tok")
    )
    error = refused("generate", model, "Hi", TRUST)
    assert (
        "its code lies in org/their, and" in error and "nothing is cached: unset it, or put its Python files" in error
    )


def test_code_for_a_model_of_images_and_text_is_built_by_its_own_class(own: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(own, tmp_path / "model"))
    autos = {"AutoConfig": "own_model.OwnConfig", "AutoModelForImageTextToText": "own_model.OwnModel"}
    restate(model / "config.json", auto_map=autos)
    call("generate", model, "Hi", "--max-new-tokens", 2, TRUST, "-q")
    restate(model / "config.json", auto_map={"AutoConfig": autos["AutoConfig"]})
    assert "is no model that writes text" in refused("generate", model, "Hi", TRUST)
