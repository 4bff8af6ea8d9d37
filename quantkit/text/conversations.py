"""Conversations: read the messages of a record, and write them as text by the model's own chat
template.

Two forms are read: `role` and `content` (OpenAI), `from` and `value` (ShareGPT). Both become the
first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Any

from quantkit.errors import FILE, NAME, CheckpointError, RecipeError, Setting, Words, reason

#: The role of a message that calls a tool, until it is known whether the template reads
#: `tool_calls`.
CALL = "function_call"
#: Names of speakers in ShareGPT's and like forms -> roles of chat templates.
SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "model", "bot"), "assistant"),
    "system": "system",
    **dict.fromkeys((CALL, "tool_call"), CALL),
    **dict.fromkeys(
        ("tool", "observation", "tool_response", "function_response", "function"), "tool"
    ),
}
TEXT_PARTS = ("text", "input_text", "output_text")
OTHER_PARTS = (
    "image",
    "image_url",
    "input_image",
    "audio",
    "audio_url",
    "input_audio",
    "video",
    "video_url",
    "file",
)
#: Keys that replace the content of an assistant message.
INSTEAD = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
#: Arguments of `apply_chat_template` that decide the form of its result, not the text.
RESERVED = (
    "conversation",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "tokenizer_kwargs",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
)
#: The function of templates that writes the present date; as an argument, the date that it writes.
NOW = "strftime_now"
#: In a template's place of that function: a macro of the parts of one date, as transformers hands
#: only data to templates.
DATE_PARTS, DIRECTIVE = "quantkit_date_parts", re.compile(r"(?<!\{)%-?[A-Za-z]")
CLOCK = (
    f"{{% macro {NOW}(format) %}}{{% set found = namespace(text=format) %}}"
    f"{{% for part, text in {DATE_PARTS}.items() %}}"
    "{% set found.text = found.text.replace(part, text) %}{% endfor %}"
    "{{ found.text }}{% endmacro %}\n"
)
#: Names that the template need not read: the library does, or each message has them.
_ALWAYS = ("role", "content", "chat_template", "continue_final_message", "sanitize_control_tokens")


class Without(Enum):
    """Why a record has no text."""

    NULL = "null"
    EMPTY = "empty"
    IMAGES = "of images or sounds alone"


class BrokenRecord(CheckpointError):
    """A record that cannot be read; `skip_bad_records` allows some."""

    def __init__(
        self, rule: str, where: str, way_out: str = "repair the record or remove it"
    ) -> None:
        super().__init__(
            rule,
            way_out,
            Words("allow some with", Setting("skip_bad_records", Words("N"))),
            subject=where,
        )


@dataclass(frozen=True)
class Conversation:
    """Hold the messages of one record, each with `role` and a `content` of text.

    `where` names file and record in errors. `dropped` are the kinds of the parts of messages that
    are no text. `arguments` are the record's arguments for the chat template, `tools` included.
    `unread` are the keys of the record that do not reach the template. `plain` is the text for a
    model without a template, if there is one.
    """

    messages: tuple[dict[str, Any], ...]
    where: str
    dropped: tuple[str, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    plain: str | None = None


def read_conversation(
    value: Any, key: str, where: str, record: Mapping[str, Any] | None = None
) -> Conversation | Without:
    """Read the messages under `key` of a record, or describe the missing text.

    BrokenRecord names the record and the rule that it breaks.
    """
    value = messages_in(value)
    if not isinstance(value, list) and value not in (None, "", {}):
        raise BrokenRecord(f"{key} is no list of messages", where)
    if not value:
        return Without.NULL if value is None else Without.EMPTY
    dropped: list[str] = []
    messages = [
        _read_message(message, dropped, f"{where}, message {number} of {key}")
        for number, message in enumerate(value, start=1)
    ]
    if not any(_texts(message) for message in messages):
        return Without.IMAGES if dropped else Without.EMPTY
    others = {
        name: each
        for name, each in (record or {}).items()
        if name != key and each not in (None, "", [], {})
    }
    if isinstance(others.get("system"), str) and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": others.pop("system")})
    arguments = _arguments(others, where)
    return Conversation(tuple(messages), where, tuple(dropped), arguments, tuple(others))


def messages_in(value: Any) -> Any:
    """Parse messages from JSON text or from columns of a table, without empty ones. Other values
    are returned unchanged.
    """
    value = _parsed(value)
    columns = list(value.values()) if isinstance(value, dict) else []
    if (
        all(isinstance(column, list) for column in columns)
        and len({len(column) for column in columns}) == 1
    ):
        value = [dict(zip(value, row, strict=True)) for row in zip(*columns, strict=True)]
    return [each for each in map(_parsed, value) if each] if isinstance(value, list) else value


def has_chat_template(tokenizer: Any) -> bool:
    """Return True if a tokenizer can write conversations as its model saw them. Of several
    templates with names it takes the default.
    """
    found = getattr(tokenizer, "chat_template", None)
    return bool(found.get("default") if isinstance(found, dict) else found)


def present_date() -> str:
    """Return the present moment as chat templates know it, in ISO form."""
    return datetime.now().isoformat(timespec="seconds")


@dataclass
class ChatTemplate:
    """A tokenizer's chat template, with `arguments` of it, and one `date` for all that it writes.

    `date` is in ISO form, by default the present moment. `is_dated` tells whether the template has
    asked for it. `merged` counts the conversations whose system message the template refused.
    """

    tokenizer: Any
    arguments: Mapping[str, Any] = field(default_factory=dict)
    date: str = field(default_factory=present_date)
    is_dated: bool = False
    merged: int = 0

    def text_of(self, document: str | Conversation) -> tuple[str, bool]:
        """Return the text of a document, and whether special tokens belong around it: a chat
        template writes them itself, BOS included.
        """
        if isinstance(document, str):
            return document, True
        if document.plain is not None and not has_chat_template(self.tokenizer):
            return document.plain, True
        return self.write(document), False

    def write(self, conversation: Conversation) -> str:
        """Write a conversation as text, special tokens included.

        A record's own arguments take precedence. A system message that the template refuses goes
        into the first turn of the user. BrokenRecord for a conversation that the template refuses.
        CheckpointError for a model without a template, and a template that leaves the text out.
        """
        if not has_chat_template(self.tokenizer) and "chat_template" not in {
            **self.arguments,
            **conversation.arguments,
        }:
            raise CheckpointError(
                "is a conversation, and the model has no chat template",
                "put its chat_template.jinja into the model's folder",
                Words(
                    "give text with",
                    Setting("text_column", NAME),
                    "or another",
                    Setting("calib", FILE),
                ),
                subject=conversation.where,
            )
        try:
            return self._written(conversation.messages, conversation)
        except BrokenRecord:
            first, *others = conversation.messages
            if first["role"] not in ("system", "developer"):
                raise
            content = first["content"]
            if others and others[0]["role"] == "user":
                content = f"{content}\n\n{others.pop(0)['content']}"
            with suppress(BrokenRecord):
                text = self._written([{"role": "user", "content": content}, *others], conversation)
                self.merged += 1
                return text
            raise

    def _written(self, messages: Sequence[dict[str, Any]], conversation: Conversation) -> str:
        """Write messages with the arguments of a conversation, and one date for all."""
        given, where = {**self.arguments, **conversation.arguments}, conversation.where
        if not _is_read(NOW, self.tokenizer, given):
            return _rendered(self.tokenizer, messages, given, where)
        asked = given.pop(NOW, None)
        try:
            moment = datetime.fromisoformat(self.date if asked is None else asked)
        except (TypeError, ValueError) as error:
            raise RecipeError(
                f"{asked!r} is no date", "write it as 2026-01-31", subject=NOW
            ) from error
        template = self.tokenizer.get_chat_template(given.get("chat_template"), given.get("tools"))
        given["chat_template"] = CLOCK + template
        parts = {part: moment.strftime(part) for part in DIRECTIVE.findall(template)}
        dated, undated = (
            _rendered(self.tokenizer, messages, {**given, DATE_PARTS: each}, where)
            for each in (parts, {})
        )
        self.is_dated = self.is_dated or (asked is None and dated != undated)
        return dated


def _rendered(
    tokenizer: Any, given_messages: Sequence[dict[str, Any]], given: Mapping[str, Any], where: str
) -> str:
    """Apply the chat template to messages in the form that it reads."""
    calls = _is_read("tool_calls", tokenizer, given)
    called = [_with_call(message, calls) for message in given_messages]
    # Servers give templates the arguments of a call as an object; a few templates read only
    # JSON text.
    messages, in_text = (
        [_with_arguments(message, form) for message in called] for form in (_parsed, _as_text)
    )
    texts = [text for message in messages for text in _texts(message)]
    # Some templates write the texts as JSON, or in capitals.
    shown = [form.casefold() for text in texts for form in (text, _as_text([text])[2:-2])]
    refused: Exception | None = None
    for form in (messages, in_text) if in_text != messages else (messages,):
        # Templates of image-text models may read only lists of parts, and write nothing for a
        # string.
        in_parts = [
            {**message, "content": [{"type": "text", "text": message["content"]}]}
            for message in form
        ]
        try:
            for shape in (form, in_parts):
                written = str(tokenizer.apply_chat_template(shape, tokenize=False, **given))
                if not texts or any(each in written.casefold() for each in shown):
                    return written
        except Exception as error:  # of jinja, or whatever an expression raises
            refused = refused or error
    if refused is not None:
        raise BrokenRecord(
            f"the model's chat template refuses it ({reason(refused)})", where
        ) from refused
    raise CheckpointError(
        "what the model's chat template writes does not contain the words of the messages",
        "mend the template: it must write each content as it is",
        subject=where,
    )


def names_unread(
    tokenizer: Any, conversations: Iterable[Conversation], arguments: Mapping[str, Any]
) -> tuple[str, ...]:
    """List the arguments and keys of messages that the chat template does not name, and so cannot
    write.
    """
    given = (part for talk in conversations for part in (talk.arguments, *talk.messages))
    names = dict.fromkeys(name for part in (arguments, *given) for name in part)
    return tuple(
        name
        for name in names
        if name not in _ALWAYS
        and not _is_read(name, tokenizer, arguments)
        and not (name == CALL and _is_read("tool_calls", tokenizer, arguments))  # as which it goes
    )


def _is_read(name: str, tokenizer: Any, arguments: Mapping[str, Any]) -> bool:
    template = arguments.get("chat_template") or tokenizer.chat_template
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", str(template)) is not None


def _arguments(others: dict[str, Any], where: str) -> dict[str, Any]:
    """Take the template's arguments out of the other keys of a record."""
    found: dict[str, Any] = {}
    for name in ("tools", "documents"):
        value = _parsed(others.get(name))
        value = [_parsed(each) for each in value] if isinstance(value, list) else value
        if value and isinstance(value, list) and all(isinstance(each, dict) for each in value):
            found[name] = value
        elif name == "tools" and value:
            raise BrokenRecord("tools is no list of objects", where)
        if not value or name in found:
            others.pop(name, None)
    given = _parsed(others.pop("chat_template_kwargs", {})) or {}
    if not isinstance(given, dict):
        raise BrokenRecord("chat_template_kwargs is no object", where)
    if wrong := [name for name in given if name in RESERVED]:
        raise BrokenRecord(
            f"chat_template_kwargs has {wrong[0]}, which is no argument of a template", where
        )
    return {**found, **given}


def _read_message(message: Any, dropped: list[str], where: str) -> dict[str, Any]:
    """Return a message with role and content, and add the kinds of its parts that are no text to
    `dropped`.
    """
    if not isinstance(message, dict):
        raise BrokenRecord("is no object with role and content", where)
    found = {
        key: value for key, value in message.items() if value is not None
    }  # a table has every key in every row
    has_role = "role" in found
    speaker = found.pop("role" if has_role else "from", None)
    if not isinstance(speaker, str) or not speaker:
        raise BrokenRecord("has no role, nor from and value", where)
    role = SPEAKERS.get(speaker.lower())
    if role is None and not has_role:
        raise BrokenRecord(f"is from {speaker!r}, known are {', '.join(SPEAKERS)}", where)
    content = found.pop("content" if "content" in found else "value", None)
    if (
        content is None
        and not {"content", "value"} & message.keys()
        and not any(map(found.get, INSTEAD))
    ):
        raise BrokenRecord("has no content that is text", where)
    if "tool_calls" in found:  # in tables it is JSON text
        found["tool_calls"] = messages_in(found["tool_calls"])
        if not isinstance(found["tool_calls"], list) or not all(
            isinstance(c, dict) for c in found["tool_calls"]
        ):
            raise BrokenRecord("has tool_calls that are no list of objects", where)
    return {"role": role or speaker, "content": _content(content, role, dropped, where), **found}


def _content(content: Any, role: str | None, dropped: list[str], where: str) -> str:
    """Return the text of a content: text, parts, nothing, or of a tool anything, as JSON."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    are_parts = all(
        isinstance(part, dict) and part.get("type") in (*TEXT_PARTS, *OTHER_PARTS) for part in parts
    )
    if role in ("tool", CALL) and not are_parts:
        return json.dumps(content, ensure_ascii=False, default=str)
    read = [_part(part) for part in parts]
    lost = [kind for kind, text in read if text is None]
    if lost and len(lost) == len(read) and not {*lost} - {*TEXT_PARTS}:
        raise BrokenRecord("has no content that is text", where)
    dropped += lost
    return "".join(text for _, text in read if text is not None)


def _part(part: Any) -> tuple[str, str | None]:
    """Return the kind of a part and its text, None if it has no text."""
    if not isinstance(part, dict):
        return "text", part if isinstance(part, str) else None
    kind, text = part.get("type") or "text", part.get("text")
    if kind not in TEXT_PARTS:
        return str(kind), None
    return kind, "" if text is None and "type" in part else text if isinstance(text, str) else None


def _texts(message: Mapping[str, Any]) -> list[str]:
    """List the texts of a message that a template may write, names of functions included."""
    found = [message["content"], *(message.get(key) for key in INSTEAD)]
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        function = call.get("function", call) if isinstance(call, dict) else None
        found.append(function.get("name") if isinstance(function, dict) else None)
    return [text.strip() for text in found if isinstance(text, str) and text.strip()]


def _with_call(message: dict[str, Any], structured: bool) -> dict[str, Any]:
    """Return a message that calls tools as an assistant message, with `tool_calls` if `structured`.

    The call is its text, or under the older key `function_call`.
    """
    of_content = message["role"] == CALL
    if not of_content and ("tool_calls" in message or CALL not in message):
        return message
    called = _parsed(message["content"] if of_content else message[CALL])
    calls = []
    for each in called if isinstance(called, list) else [called]:
        function = each.get("function", each) if isinstance(each, dict) else {}
        if not structured or not isinstance(function, dict) or "name" not in function:
            return {**message, "role": "assistant"}
        arguments = function.get("arguments", function.get("parameters", {}))
        calls.append(
            {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        )
    return {
        **{key: value for key, value in message.items() if key != CALL},
        "role": "assistant",
        "content": "" if of_content else message["content"],
        "tool_calls": calls,
    }


def _with_arguments(message: dict[str, Any], form: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a message with the arguments of its calls in another form."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function", call)
        if isinstance(function, dict) and "arguments" in function:
            function = {**function, "arguments": form(function["arguments"])}
            others = call if "function" in call else {"type": "function"}  # servers add it
            call = {**others, "function": function}
        calls.append(call)
    return {**message, "tool_calls": calls}


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _parsed(value: Any) -> Any:
    """Parse JSON text that is a list, an object or null. Other values are returned unchanged."""
    if not isinstance(value, str):
        return value
    try:
        found = json.loads(value)
        json.dumps(found, ensure_ascii=False).encode()  # tokenizers refuse lone surrogates
    except (ValueError, RecursionError):
        return value
    return found if found is None or isinstance(found, dict | list) else value
