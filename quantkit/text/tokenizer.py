"""Load a model's tokenizer; the tokens of a text and of a prompt, and the text of the tokens that
continue a prompt: the same for calibration, `generate` and evaluations.
"""

from __future__ import annotations

import copy
import json
import re
from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from quantkit.checkpoint import gguf_source
from quantkit.checkpoint.gguf_config import ORIGINAL
from quantkit.errors import CheckpointError, Option, RecipeError, Words, reason
from quantkit.io import hub, model_folder
from quantkit.io.json_files import AGAIN, load_json, require_no_mark
from quantkit.text.conversations import ChatTemplate, Conversation, has_chat_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Characters of a text that are tokenized at a time, and those beyond each end of a part that the
#: next part has too.
LONG, OVERLAP = 2**17 - 1, 2**10


#: Files of tokenizers -> the package that reads them without a tokenizer.json.
PACKAGES = {
    "*.model": "sentencepiece",
    "*.spm": "sentencepiece",
    "*.tiktoken": "tiktoken",
    "tekken.json": "mistral_common",
}

#: Files of tokenizers and processors that are parsed before work, and those that state templates.
PARSED = re.compile(r"token.*\.json$|processor_config\.json$|^chat_template\.json$|\.jinja$")
STATES_TEMPLATES = re.compile("config|chat_template")


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model folder; CheckpointError if none can be read, or only by code
    of its own that is not trusted.
    """
    from transformers import AutoTokenizer

    source, words = gguf_source.source_of(folder), gguf_source.add_tokenizer(folder)
    home = folder if source is None else source.files[0].path
    if source is not None and source.unreadable is not None:
        raise CheckpointError(source.unreadable, ORIGINAL, subject=home)
    try:  # trusted code may lie in another repository
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=not trust_remote_code
        )
        tokenizer("a")  # a field of another kind, such as a length that is text, fails only here
        merges: Any = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
        if getattr(merges, "dropout", None) is not None:  # of its training: each run would differ
            merges.dropout = None
    except (Exception, SystemExit) as error:  # each class fails in its own way on damaged files
        if not trust_remote_code and model_folder.names_code(folder):
            raise CheckpointError(
                "its tokenizer asks to run code that comes with the model",
                Words("add", Option("trust_remote_code", True), "if you trust it"),
                subject=folder,
            ) from error
        needed = {package for pattern, package in PACKAGES.items() if any(folder.glob(pattern))}
        missing = " ".join(package for package in sorted(needed) if find_spec(package) is None)
        if missing and not (folder / "tokenizer.json").exists():
            raise CheckpointError(
                f"the tokenizer needs the Python package {missing}, which is not installed",
                f"pip install {missing}",
                subject=folder,
            ) from error
        rule, *ways = (
            f"has no tokenizer that transformers can read ({reason(error)})",
            "put the model's own files there",
        )
        if "tokenizer_config.json" in model_folder.names_code(folder):
            rule, *ways = hub.reasons_of_code(error, folder / "tokenizer_config.json", rule)
        raise CheckpointError(rule, *ways, subject=home) from error
    if words is not None:
        gguf_source.require_same_words(home, tokenizer, words)
    of_processor = folder / model_folder.PROCESSOR_TEMPLATE
    if not getattr(tokenizer, "chat_template", None) and of_processor.is_file():
        tokenizer.chat_template = load_json(of_processor).get("chat_template")
    return tokenizer


def has_corrected_pattern(tokenizer: PreTrainedTokenizerBase, folder: Path) -> bool:
    """Return True if transformers knows another pattern for splitting a text than the tokenizer of
    a folder has: of some Mistral models a wrong one was published.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if getattr(backend, "fix_mistral_regex", None) is not False:  # asked of the models' families
        return False
    corrected: Any = type(tokenizer).from_pretrained(folder, fix_mistral_regex=True)
    found, other = (json.loads(each.to_str()) for each in (backend, corrected.backend_tokenizer))
    return bool(found["pre_tokenizer"] != other["pre_tokenizer"])


def require_readable_tokenizer(folder: Path) -> None:
    """Raise CheckpointError for a file of a tokenizer or processor, or a chat template, that no
    program can parse.
    """
    from tokenizers import Tokenizer
    from transformers.utils.chat_template_utils import render_jinja_template

    for name in filter(PARSED.search, model_folder.opened(folder)):
        path, rule, way = folder / name, "no file of a tokenizer or processor", AGAIN
        data = path.read_bytes()
        require_no_mark(data, path)
        try:
            text = data.decode()
            found: Any = text if name.endswith(".jinja") else None
            if name == "tokenizer.json":
                Tokenizer.from_str(text)
            elif name.endswith(".json"):
                stated = json.loads(text)
                if STATES_TEMPLATES.search(name):
                    found = stated.get("chat_template")
            rule, way = "its chat template does not parse", "mend it"
            for each in [found] if isinstance(found, str) else found or ():
                render_jinja_template(
                    [], chat_template=each["template"] if isinstance(each, dict) else each
                )
        except Exception as error:  # the packages raise whatever they like
            raise CheckpointError(f"{rule} ({reason(error)})", way, subject=path) from error


def token_ids(
    tokenizer: Callable[..., Any], text: str, *, special: bool, at_most: int | None = None
) -> Tensor:
    """Return the tokens of a text, int64 `[t]`, with or without the special tokens that the
    tokenizer adds.

    The tokens after the first `at_most` are left out, and their text need not be read. RecipeError
    for bytes of a command line or a pipe that are not UTF-8: Python reads them as lone surrogates.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RecipeError(
            f"the text is not UTF-8 (character {error.start})", "convert it first"
        ) from error
    if len(text) <= LONG or not getattr(tokenizer, "is_fast", False):
        tokens = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        return torch.tensor(tokens[:at_most], dtype=torch.int64)
    front, end = affixes(tokenizer) if special else ([], [])
    found = array("q", front)
    for part in _parts(tokenizer, text):
        found.extend(part)
        if at_most is not None and len(found) > at_most:
            break
    found.extend(end)
    return torch.from_numpy(np.asarray(found, dtype=np.int64))[:at_most]


def affixes(tokenizer: Callable[..., Any]) -> tuple[list[int], list[int]]:
    """Find the tokens that a tokenizer puts in front of a text, such as BOS, and those behind it,
    such as EOS.
    """
    plain, ids = (token_ids(tokenizer, "a", special=special).tolist() for special in (False, True))
    starts = (i for i in range(len(ids)) if plain and ids[i : i + len(plain)] == plain)
    start = next(starts, len(ids))
    return ids[:start], ids[start + len(plain) :]


class _Part:
    """The tokens of `text[begin:end]`, and the place of the first character of each in `text`."""

    def __init__(self, tokenizer: Callable[..., Any], text: str, begin: int, end: int) -> None:
        begin = max(0, begin)
        found = tokenizer(text[begin:end], add_special_tokens=False, verbose=False)
        self.ids: list[int] = found["input_ids"]
        self._places = [begin + first for first, _ in found.encodings[0].offsets]

    def find(self, place: int) -> int:
        """Return the number of the first token at or after a place of the text."""
        return bisect_left(self._places, place)

    def near(self, place: int) -> list[tuple[int, int]]:
        """List the tokens, with their places, that both parts at a seam must have."""
        near = slice(self.find(place - OVERLAP // 2), self.find(place + OVERLAP // 2))
        return [*zip(self._places[near], self.ids[near], strict=True)]


def _parts(tokenizer: Callable[..., Any], text: str) -> Iterator[list[int]]:
    """Yield the tokens of a long text by parts, the same as of the whole.

    A tokenizer needs some 150 bytes for a character. Neighbouring parts overlap, and are joined
    where both have the same tokens at the same places on both sides of the seam. If they have not,
    as in a single word that is longer than a part, they are tokenized as one.
    """
    begin, seam, size = 0, LONG, LONG
    part, first = _Part(tokenizer, text, 0, seam + OVERLAP), 0
    while seam < len(text):
        after = _Part(tokenizer, text, seam - OVERLAP, seam + LONG + OVERLAP)
        if part.near(seam) == after.near(seam):
            yield part.ids[first : part.find(seam)]
            begin, first, part, size = seam, after.find(seam), after, LONG
        else:
            size *= 2
            part = _Part(tokenizer, text, begin - OVERLAP, seam + size + OVERLAP)
            first = part.find(begin) if begin else 0
        seam += size
    yield part.ids[first:]


def check_tokens(largest: int, known: int) -> None:
    """Raise CheckpointError if token `largest` is beyond the `known` rows of the model's
    embeddings.
    """
    if largest >= known:
        raise CheckpointError(
            f"the tokenizer gives token {largest}, the model knows {known}: they do not belong "
            "together, "
            "use the tokenizer files of this model"
        )


#: Tokens of a prompt that decide how the tokens after them are written.
CONTEXT = 64


def continued(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a tokenizer that puts nothing behind a text. Some end a text by EOS, and no decoder
    continues such a prompt.
    """
    front, end = affixes(tokenizer)
    if not end or getattr(tokenizer, "backend_tokenizer", None) is None:
        return tokenizer
    from tokenizers.processors import TemplateProcessing

    changed: Any = copy.deepcopy(tokenizer)
    names = changed.convert_ids_to_tokens(front)
    changed.backend_tokenizer.post_processor = TemplateProcessing(
        single=[*names, "$A"], special_tokens=[*zip(names, front, strict=True)]
    )
    return cast("PreTrainedTokenizerBase", changed)


def prompt_tokens(tokenizer: Any, prompt: str) -> Tensor:
    """Tokenize a prompt to int64 `[t]`, which is the BOS token if there is no other.

    BOS that the prompt spells is not repeated. RecipeError for a prompt without tokens.
    """
    ids = token_ids(tokenizer, prompt, special=bool(prompt))
    front = torch.tensor(affixes(tokenizer)[0], dtype=torch.int64)
    if len(front) and torch.equal(ids[len(front) : 2 * len(front)], front):
        ids = ids[len(front) :]
    if len(ids):
        return ids
    if tokenizer.bos_token_id is None:
        raise RecipeError(
            "the prompt has no tokens, and the tokenizer no BOS token to begin with",
            "give a prompt",
        )
    return torch.tensor([tokenizer.bos_token_id])


def message_tokens(tokenizer: PreTrainedTokenizerBase, message: str) -> Tensor:
    """Tokenize a message of a user, and the template's beginning of an answer, to int64 `[t]`."""
    instead = Words("use quantkit generate without", Option("chat", True))
    if not has_chat_template(tokenizer):
        raise RecipeError("the model has no chat template", instead, subject=tokenizer.name_or_path)
    talk = Conversation(({"role": "user", "content": message},), "the message")
    try:
        text = ChatTemplate(tokenizer, {"add_generation_prompt": True}).write(talk)
    except CheckpointError as error:
        raise RecipeError(error.rule, instead, subject=error.subject) from error
    return token_ids(tokenizer, text, special=False)


def continuation(
    tokenizer: Any, before: Sequence[int], new: Sequence[int], ends: Collection[int] = ()
) -> str:
    """Return the text that `new` tokens add to the text of the tokens `before`, to the letter.

    A decoder of sentencepiece drops the space in front of a text, so that new tokens alone lack it.
    Tokens from the first of `ends` on, and special tokens, are no text.
    """

    def text(ids: Sequence[int]) -> str:
        return str(
            tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    head = [*before[-CONTEXT:]]
    start, whole = text(head), text([*head, *takewhile(lambda token: token not in ends, new)])
    same = takewhile(lambda pair: pair[0] == pair[1], zip(start, whole, strict=False))
    return whole[sum(1 for _ in same) :]


def ends_of(generation_config: Any, tokenizer: Any) -> list[int]:
    """List the tokens that end a text: those that a model's generation config states, and the
    tokenizer's EOS, as engines do.
    """
    stated = generation_config.eos_token_id
    ends = {*(stated if isinstance(stated, list) else [stated]), tokenizer.eos_token_id}
    return sorted(ends - {None})
