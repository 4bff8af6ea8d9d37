"""The tokenizer of a GGUF file: its vocabulary, the rule that splits a text before the merges, and
its special tokens.

A byte-level vocabulary is built here, because the splitting rule decides the tokens and
transformers takes GPT-2's for names that it does not know. Other vocabularies are transformers'.
Sources: the names are those of llama.cpp (src/llama-vocab.cpp), the rules those of the models'
own tokenizer.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from quantkit.checkpoint.gguf_config import ORIGINAL
from quantkit.errors import CheckpointError
from quantkit.io.gguf_header import GgufList
from quantkit.io.json_files import dump_json, shown
from quantkit.io.model_folder import TEMPLATES

PREFIX = "tokenizer.ggml."
#: Values of `token_type`.
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
MODELS = ("gpt2", "llama")
#: A chat template, with its name if it is not the default, or the list of the names.
TEMPLATE = re.compile(r"tokenizer\.chat_template(?:s|\.([\w-]+))?")
#: Tokens that end a text or a turn, by their keys.
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
#: -1, as the types of keys hold it.
NONE = (-1, 2**32 - 1)
NAMED = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
#: Keys that are used, or have no effect on the tokens of a text: the file of Hugging Face says the
#: same once more.
USED = {
    "tokenizer.huggingface.json",
    "model",
    "pre",
    "tokens",
    "token_type",
    "scores",
    "merges",
    "add_bos_token",
    "add_eos_token",
    "add_space_prefix",
    "precompiled_charsmap",
    "eos_token_ids",
    "added_tokens",
    *ENDS,
    "token_type_count",
    "suppress_tokens",
    "seperator_token_id",
    "separator_token_id",
    "mask_token_id",
    "cls_token_id",
    "prefix_token_id",
    "suffix_token_id",
    "middle_token_id",
    *(f"{name}_token_id" for name in NAMED),
    *(f"fim_{name}_token_id" for name in ("pre", "suf", "mid", "pad", "rep", "sep")),
}
#: Keys that are refused unless they have this value.
NEUTRAL = {
    "add_sep_token": False,
    "remove_extra_whitespaces": False,
    "normalizer.lowercase": False,
    "normalizer.strip_accents": False,
}

_SUFFIXES = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_START = r"[^\r\n\p{L}\p{N}]?"


def _words(digits: str, letters: str = r"\p{L}") -> str:
    """Write the rule of GPT-4 and its heirs: one sign goes before a word, digits in short runs."""
    signs = rf" ?[^\s{letters.strip('[]')}\p{{N}}]+[\r\n]*"
    return rf"{_SUFFIXES}|{_START}{letters}+|{digits}|{signs}|{_BLANKS}"


def _cased(digits: str, suffixes: str) -> str:
    """Write the rule that splits words before capitals."""
    words = rf"{_START}{_UPPER}*{_LOWER}+{suffixes}|{_START}{_UPPER}+{_LOWER}*{suffixes}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_KANA = "[一-龥぀-ゟ゠-ヿ]+"
_DEEPSEEK = (
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANKS}"
)
_BLOOM = " ?[^(\\s|.,!?…。，、।۔،)]+"
_LLAMA3 = (
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano dbrx "
    "smaug-bpe glm4 chatglm-bpe"
)
_GPT2S = (
    "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum "
    "jina-es jina-de jina-v2-es jina-v2-de modern-bert"
)
#: Names of pre-tokenizers -> the patterns that split a text, one after the other.
RULES: dict[str, tuple[str, ...]] = {
    name: patterns
    for names, patterns in {
        _GPT2S: (_GPT2,),
        "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": (r"\p{N}", _GPT2),
        _LLAMA3: (_words(r"\p{N}{1,3}"),),
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": (
            _words(r"\p{N}"),
        ),
        "qwen35": (_words(r"\p{N}", r"[\p{L}\p{M}]"),),
        "seed-coder": (
            rf"{_SUFFIXES}|{_START}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_BLANKS}",
        ),
        "tekken": (_cased(r"\p{N}", ""),),
        "gpt-4o llama4 kanana2 talkie minimax-m2": (_cased(r"\p{N}{1,3}", f"{_SUFFIXES}?"),),
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4": (r"\p{N}{1,3}", _KANA, _DEEPSEEK),
        "deepseek-coder": (
            *(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+"),
            *("[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}"),
        ),
        "falcon": (r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]"),
        "bloom poro-chat gpt3-finnish": (_BLOOM,),
        "viking": (_BLOOM, r"\p{N}"),
    }.items()
    for name in names.split()
}
#: Pre-tokenizers whose vocabularies take a word that is a token before any merge, and that put a
#: start token before a text unless the file says otherwise.
WHOLE = {*_LLAMA3.split()[:9], "tekken"}
#: Pre-tokenizers whose models compose characters first.
COMPOSED = ("qwen2", "qwen35")
#: A text on which a tokenizer that is read again must split as the file says.
PROBE = "It's 12345 of John's naïve_words (in) the $path/to\n\n\tif x1  == 'We'LL':  # UPPERCase…"


def check_keys(stated: Mapping[str, Any], path: Path) -> str | None:
    """Account for each key of a tokenizer; return why no text can be read, None if one can.

    CheckpointError names a key that is not followed.
    """
    model = stated.get(f"{PREFIX}model")
    if model not in MODELS:
        raise CheckpointError(
            f"transformers cannot make a tokenizer of it ({PREFIX}model is {shown(model)})",
            ORIGINAL,
            subject=path,
        )
    if not count_of(stated, "tokens"):
        raise CheckpointError(f"cannot be read without {PREFIX}tokens", ORIGINAL, subject=path)
    for key, value in stated.items():
        name = key.removeprefix(PREFIX)
        known = name in USED or TEMPLATE.fullmatch(key) or value == NEUTRAL.get(name, ...)
        if key.startswith("tokenizer.") and not known:
            raise CheckpointError(
                f"states {key} {shown(value)}, which transformers' tokenizers do not follow",
                ORIGINAL,
                subject=path,
            )
    pre = stated.get(f"{PREFIX}pre")
    if model == "gpt2" and pre not in RULES and count_of(stated, "merges"):
        which = f"names the unknown {PREFIX}pre {shown(pre)}" if pre else f"lacks {PREFIX}pre"
        return f"{which}, the rule that splits a text before it becomes tokens"
    return None


def drop_impossible(stated: dict[str, Any]) -> list[str]:
    """Remove the keys that name no token of the vocabulary, and return a notice for each. -1, which
    says that there is none, has no notice.
    """
    count, notices = count_of(stated, "tokens"), []
    for key in [key for key in stated if re.fullmatch(rf"{PREFIX}\w+_token_id", key)]:
        if not isinstance(stated[key], int) or not 0 <= stated[key] < count:
            found = stated.pop(key)
            if found not in NONE:
                notices.append(f"{key} {shown(found)} is no token of the vocabulary: left out")
    return notices


def templates_of(stated: Mapping[str, Any]) -> dict[str, str]:
    """Map the files of the chat templates, in a model folder, to their texts."""
    found = {TEMPLATE.fullmatch(key): value for key, value in stated.items()}
    return {
        f"{TEMPLATES}/{key[1]}.jinja" if key[1] else "chat_template.jinja": text
        for key, text in found.items()
        if key and isinstance(text, str)
    }


def ends_of(stated: Mapping[str, Any]) -> list[int]:
    """List the tokens that end a text, a turn or a message, without repetition."""
    found = [stated[f"{PREFIX}{name}"] for name in ENDS if f"{PREFIX}{name}" in stated]
    return [*dict.fromkeys([*found, *list_of(stated, "eos_token_ids")])]


def count_of(stated: Mapping[str, Any], name: str) -> int:
    """Count the values of a list of a tokenizer."""
    found = stated.get(f"{PREFIX}{name}")
    return found.size if isinstance(found, GgufList) else len(found or [])


def list_of(stated: Mapping[str, Any], name: str) -> list[Any]:
    """Return a list of a tokenizer, `[]` if the file has none."""
    found = stated.get(f"{PREFIX}{name}")
    return found.values() if isinstance(found, GgufList) else found or []


def files_of(architecture: str, stated: Mapping[str, Any]) -> tuple[dict[str, bytes], list[str]]:
    """Make the tokenizer's files for a model folder, and the words into which it splits `PROBE`.

    The keys were checked. A vocabulary goes into the text of tokenizer.json as it is: building a
    tokenizer of it and saving that takes ten times as long.
    """
    from tokenizers import Tokenizer

    tokens, model = list_of(stated, "tokens"), stated[f"{PREFIX}model"]
    backend = (
        _byte_level(stated) if model == "gpt2" else _by_transformers(architecture, tokens, stated)
    )
    state = json.loads(backend.to_str())
    if model == "gpt2":
        state["model"]["vocab"] = {token: index for index, token in enumerate(tokens)}
        state["model"]["merges"] = list_of(stated, "merges")
        state["added_tokens"] = _added(tokens, stated)
    ids = {name: stated.get(f"{PREFIX}{key}_token_id") for key, name in NAMED.items()}
    named = {name: tokens[at] for name, at in ids.items() if at is not None}
    starts = model == "llama" or (model == "gpt2" and stated.get(f"{PREFIX}pre") in WHOLE)
    bos = stated.get(f"{PREFIX}add_bos_token", starts) and "bos_token" in named
    eos = stated.get(f"{PREFIX}add_eos_token") and "eos_token" in named
    first, last = ["bos_token"] if bos else [], ["eos_token"] if eos else []
    text = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}
    before, after = (
        [{"SpecialToken": {"id": named[name], "type_id": 0}} for name in names]
        for names in (first, last)
    )
    state["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [*before, text[0], *after],
        "pair": [*before, text[0], *after, text[1]],
        "special_tokens": {
            named[name]: {"id": named[name], "ids": [ids[name]], "tokens": [named[name]]}
            for name in (*first, *last)
        },
    }
    config = {
        **named,
        "add_bos_token": bool(bos),
        "add_eos_token": bool(eos),
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    found = {
        "tokenizer.json": json.dumps(state, ensure_ascii=False).encode(),
        "tokenizer_config.json": dump_json(config),
    }
    return found, words_of(Tokenizer.from_buffer(found["tokenizer.json"]))


def words_of(backend: Any) -> list[str]:
    """Split `PROBE` as a tokenizer of the package tokenizers does before its merges."""
    text = backend.normalizer.normalize_str(PROBE) if backend.normalizer else PROBE
    if backend.pre_tokenizer is None:
        return [text]
    return [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]


def _byte_level(stated: Mapping[str, Any]) -> Any:
    """Build a tokenizer of merges over bytes, without its vocabulary, with the splitting rule that
    the file names.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = stated.get(f"{PREFIX}pre")
    made = Tokenizer(models.BPE(ignore_merges=name in WHOLE))
    patterns = RULES.get(name or "", (_GPT2,))  # without merges, each rule gives the same tokens
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(each), "isolated") for each in patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    if name in COMPOSED:
        made.normalizer = normalizers.NFC()
    return made


def _added(tokens: list[str], stated: Mapping[str, Any]) -> list[dict[str, Any]]:
    """List the tokens that are found whole in a text, before it is split."""
    added = {*list_of(stated, "added_tokens")}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [
        {"id": index, "content": token, **plain, "special": kind == CONTROL}
        for index, (token, kind) in enumerate(
            zip(tokens, list_of(stated, "token_type") or [NORMAL] * len(tokens), strict=False)
        )
        if token and (kind in (CONTROL, USER_DEFINED) or token in added)
    ]


def _by_transformers(architecture: str, tokens: list[str], stated: Mapping[str, Any]) -> Any:
    """Build a sentencepiece tokenizer as transformers does."""
    from tokenizers import decoders, pre_tokenizers as pre

    # transformers 5.20 moved it.
    place = find_spec("transformers.integrations.gguf") and "transformers.integrations.gguf"
    convert: Any = import_module(place or "transformers.integrations").convert_gguf_tokenizer
    names = {
        "tokenizer_type": "model",
        "pre_tokenizer_type": "pre",
        "precompiled_charsmap": "precompiled_charsmap",
        "bos_token_id": "bos_token_id",
        "eos_token_id": "eos_token_id",
        "unk_token_id": "unknown_token_id",
        "pad_token_id": "padding_token_id",
    }
    values = {name: stated.get(f"{PREFIX}{key}") for name, key in names.items()}
    lists = {name: list_of(stated, name) for name in ("scores", "token_type", "merges")}
    backend, _ = convert(
        architecture,
        {key: v for key, v in {**values, **lists}.items() if v not in (None, [])}
        | {"tokens": tokens},
    )
    if not stated.get(f"{PREFIX}add_space_prefix", True) and isinstance(
        backend.pre_tokenizer, pre.Metaspace
    ):
        backend.pre_tokenizer = pre.Metaspace(prepend_scheme="never", split=False)
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    return backend
