"""Conversations: read the messages of a record, and write them as text by the model's own chat template.

Two forms are read: `role` and `content` (OpenAI), `from` and `value` (ShareGPT). Both become the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quantkit.errors import FILE, NAME, CheckpointError, Setting, Words, reason

#: ShareGPT's names of speakers -> roles of chat templates.
SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}
REPAIR = "repair the record or remove it"


@dataclass(frozen=True)
class Conversation:
    """Hold the messages of one record, each with `role` and a `content` of text.

    `where` names file and record in errors. `dropped` counts the parts of messages that are no text.
    """

    messages: tuple[dict[str, Any], ...]
    where: str
    dropped: int = 0


def read_conversation(value: Any, key: str, where: str) -> Conversation:
    """Read a list of messages; CheckpointError names the record and the rule that it breaks."""
    if not isinstance(value, list) or not value:
        raise CheckpointError(f"{key} is no list of messages", REPAIR, subject=where)
    messages, dropped = [], 0
    for number, message in enumerate(value, start=1):
        read, lost = _read_message(message, f"{where}, message {number} of {key}")
        messages.append(read)
        dropped += lost
    if not any(message["content"].strip() for message in messages):
        raise CheckpointError(f"no message of {key} has text", REPAIR, subject=where)
    return Conversation(tuple(messages), where, dropped)


def has_chat_template(tokenizer: Any) -> bool:
    """Return True if a tokenizer can write conversations as its model saw them."""
    return bool(getattr(tokenizer, "chat_template", None))


def render(tokenizer: Any, conversation: Conversation) -> str:
    """Write a conversation by the tokenizer's chat template, special tokens included.

    CheckpointError for a model without a template, a conversation that the template refuses, and a template that
    leaves the text out.
    """
    where, messages = conversation.where, conversation.messages
    if not has_chat_template(tokenizer):
        raise CheckpointError(
            "is a conversation, and the model has no chat template",
            "put its chat_template.jinja into the model's folder",
            Words("give text with", Setting("text_column", NAME), "or another", Setting("calib", FILE)),
            subject=where,
        )
    texts = [message["content"].strip() for message in messages]
    # Templates of image-text models may read only lists of parts, and write nothing for a string.
    in_parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]
    for form in (list(messages), in_parts):
        try:
            written = str(tokenizer.apply_chat_template(form, tokenize=False))
        except Exception as error:  # templates raise errors of jinja, and whatever their expressions raise
            raise CheckpointError(
                f"the model's chat template refuses it ({reason(error)})", REPAIR, subject=where
            ) from error
        if any(text and text in written for text in texts):
            return written
    raise CheckpointError("the model's chat template writes none of its text", "check the template", subject=where)


def _read_message(message: Any, where: str) -> tuple[dict[str, Any], int]:
    """Return a message with role and content, and the number of its parts that are no text."""
    if not isinstance(message, dict):
        raise CheckpointError("is no object with role and content", REPAIR, subject=where)
    found = {key: value for key, value in message.items() if value is not None}  # a table has every key in every row
    if "role" not in found and "from" in found:
        if found["from"] not in SPEAKERS:
            raise CheckpointError(f"is from {found['from']!r}, known are {', '.join(SPEAKERS)}", REPAIR, subject=where)
        found = {"role": SPEAKERS[found["from"]], "content": found.get("value")}
    if not isinstance(found.get("role"), str) or not found["role"]:
        raise CheckpointError("has no role, nor from and value", REPAIR, subject=where)
    content = found.get("content")
    if content is None and found.get("tool_calls"):
        content = ""
    parts = content if isinstance(content, list) else [content]
    texts = [text for text in map(_text, parts) if text is not None]
    if not texts and parts:
        raise CheckpointError("has no content that is text", REPAIR, subject=where)
    return {**found, "content": "".join(texts)}, len(parts) - len(texts)


def _text(part: Any) -> str | None:
    """Return the text of a content or of one of its parts, None for an image, a sound or anything else."""
    text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else part
    return text if isinstance(text, str) else None
