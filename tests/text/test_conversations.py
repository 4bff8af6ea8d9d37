"""Conversations: both forms of messages, parts, broken records, and chat templates that do not fit."""

from __future__ import annotations

from typing import Any

import pytest

from quantkit.errors import CheckpointError
from quantkit.text.conversations import Conversation, read_conversation, render
from quantkit.text.tokenizer import token_ids
from tests.tiny_models import CHAT_TEMPLATE, byte_tokenizer

WHERE = "a.jsonl: record 3"
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi?"},
    {"role": "assistant", "content": "Hello."},
]


@pytest.fixture
def tokenizer() -> Any:
    made = byte_tokenizer()
    made.chat_template = CHAT_TEMPLATE
    return made


def test_both_forms_of_messages_are_the_same() -> None:
    shared = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "Hi?"},
        {"from": "gpt", "value": "Hello."},
    ]
    assert read_conversation(shared, "conversations", WHERE) == read_conversation(TALK, "messages", WHERE)


def test_text_parts_are_joined_and_others_counted() -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "image_url", "image_url": {}}, "this?", {"text": "!"}]
    found = read_conversation([{"role": "user", "content": parts}], "messages", WHERE)
    assert (found.messages, found.dropped) == (({"role": "user", "content": "What is this?!"},), 1)


def test_a_call_of_a_tool_needs_no_text_and_empty_columns_are_dropped() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}], "name": None}
    found = read_conversation([*TALK, call], "messages", WHERE)
    assert found.messages[-1] == {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([], "record 3: messages is no list of messages"),
        ({"role": "user"}, "record 3: messages is no list of messages"),
        (["hi"], "record 3, message 1 of messages: is no object with role and content"),
        ([*TALK, {"content": "x"}], "message 4 of messages: has no role, nor from and value"),
        ([{"role": 1, "content": "x"}], "message 1 of messages: has no role"),
        ([{"from": "bing", "value": "x"}], "message 1 of messages: is from 'bing', known are human, user, gpt"),
        ([{"role": "user"}], "message 1 of messages: has no content that is text"),
        ([{"role": "user", "content": [{"type": "image"}]}], "message 1 of messages: has no content that is text"),
        ([{"role": "user", "content": " "}], "no message of messages has text"),
    ],
)
def test_a_broken_record_is_named_with_its_rule(value: Any, says: str) -> None:
    with pytest.raises(CheckpointError, match=says) as caught:
        read_conversation(value, "messages", WHERE)
    assert str(caught.value).startswith(WHERE) and str(caught.value).endswith("repair the record or remove it")


def test_the_template_writes_special_tokens_once(tokenizer: Any) -> None:
    written = render(tokenizer, Conversation(tuple(TALK), WHERE))
    tokens = token_ids(tokenizer, written, special=False)
    assert tokens.tolist() == tokenizer.apply_chat_template(TALK, return_dict=False)
    assert tokens.tolist().count(tokenizer.bos_token_id) == 1


def test_a_template_that_reads_parts_alone_is_given_parts(tokenizer: Any) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}"
        "{{ part['text'] }}{% endfor %}{% endfor %}"
    )
    assert render(tokenizer, Conversation(tuple(TALK), WHERE)) == "Be brief.Hi?Hello."


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (
            None,
            r"the model has no chat template: .*--set calibration\.text_column=NAME or another --calib FILE",
        ),
        ("{{ raise_exception('roles must alternate') }}", r"refuses it \(roles must alternate\): repair the record"),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "writes none of its text"),
        ("{% for", "refuses it"),
    ],
)
def test_a_template_that_does_not_fit_is_one_line(template: str | None, says: str, tokenizer: Any) -> None:
    tokenizer.chat_template = template
    with pytest.raises(CheckpointError, match=says) as caught:
        render(tokenizer, Conversation(tuple(TALK), WHERE))
    assert str(caught.value).startswith(WHERE) and "\n" not in str(caught.value)
