"""Conversations: both forms of messages, parts, broken records, and chat templates that do not fit."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quantkit.errors import CheckpointError, RecipeError
from quantkit.text.conversations import (
    BrokenRecord,
    ChatTemplate,
    Conversation,
    Without,
    names_unread,
    read_conversation,
)
from tests.tiny_models import CHAT_TEMPLATE, byte_tokenizer

WHERE = "a.jsonl: line 3"
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


def test_text_parts_are_joined_and_others_counted() -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "image_url", "image_url": {}}, "this?", {"text": "!"}]
    found = read_conversation([{"role": "user", "content": parts}], "messages", WHERE)
    assert isinstance(found, Conversation)
    assert (found.messages, found.dropped) == (({"role": "user", "content": "What is this?!"},), ("image_url",))


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"role": "user"}, "line 3: messages is no list of messages"),
        ('[{"role": "user", "content": "', "line 3: messages is no list of messages"),
        (["hi"], "line 3, message 1 of messages: is no object with role and content"),
        ([*TALK, {"content": "x"}], "message 4 of messages: has no role, nor from and value"),
        ([{"role": 1, "content": "x"}], "message 1 of messages: has no role"),
        ([{"from": "bing", "value": "x"}], "message 1 of messages: is from 'bing', known are human, user, gpt"),
        ([{"role": "user"}], "message 1 of messages: has no content that is text"),
        ([{"role": "user", "content": {"answer": 7}}], "message 1 of messages: has no content that is text"),
        ([{"role": "user", "content": [7, {"type": "text", "text": 7}]}], "has no content that is text"),
        *(
            ([{"role": "assistant", "content": "", "tool_calls": calls}], "has tool_calls that are no list of objects")
            for calls in ("f(1)", ["f"], 7)
        ),
    ],
)
def test_a_broken_record_is_named_with_its_rule(value: Any, says: str) -> None:
    with pytest.raises(BrokenRecord, match=says) as caught:
        read_conversation(value, "messages", WHERE)
    assert str(caught.value).startswith(WHERE)
    assert str(caught.value).endswith("repair the record or remove it, or allow some with --skip-bad-records N")


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (None, Without.NULL),
        ("null", Without.NULL),
        ("", Without.EMPTY),
        ("[]", Without.EMPTY),
        ({}, Without.EMPTY),
        ([{"role": "user", "content": " "}, {"role": "assistant", "content": None}], Without.EMPTY),
        ([{"role": "user", "content": [{"type": "image"}]}], Without.IMAGES),
        ([{"from": "human", "value": [{"type": "input_image", "image_url": "x"}]}], Without.IMAGES),
    ],
)
def test_a_record_without_text_says_why(value: Any, why: Without) -> None:
    assert read_conversation(value, "messages", WHERE) is why


@pytest.mark.parametrize(
    "value",
    [
        json.dumps(TALK),
        [{"from": who, "value": m["content"]} for who, m in zip(("system", "human", "gpt"), TALK, strict=True)],
        [json.dumps(message) for message in TALK],
        {"role": [m["role"] for m in TALK], "content": [m["content"] for m in TALK]},
        [{"role": m["role"], "content": [{"type": "input_text", "text": m["content"]}]} for m in TALK],
        [{"role": m["role"], "content": [{"type": "output_text", "text": m["content"], "id": 1}]} for m in TALK],
        [{"role": role, "value": m["content"]} for role, m in zip(["System", "Human", "GPT"], TALK, strict=True)],
    ],
)
def test_messages_are_the_same_in_each_form_that_people_have(value: Any) -> None:
    found = read_conversation(value, "messages", WHERE)
    assert isinstance(found, Conversation) and (found.messages, found.dropped) == (tuple(TALK), ())


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ({"temperature": 21.5, "ort": "Köln"}, '{"temperature": 21.5, "ort": "Köln"}'),
        ([{"title": "a"}, {"title": "b"}], '[{"title": "a"}, {"title": "b"}]'),
        ({"type": "error", "text": "gone"}, '{"type": "error", "text": "gone"}'),
        (42, "42"),
        ([{"type": "text", "text": "plain"}], "plain"),
    ],
)
@pytest.mark.parametrize("role", ["tool", "tool_response", "observation"])
def test_the_result_of_a_tool_may_be_any_value(role: str, content: Any, text: str) -> None:
    found = read_conversation([*TALK, {"role": role, "content": content}], "messages", WHERE)
    assert isinstance(found, Conversation) and found.messages[-1] == {"role": "tool", "content": text}


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_a_thought_needs_no_content_and_reaches_the_template(key: str, content: Any, tokenizer: Any) -> None:
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}[{{ m." + key + " }}]{% endfor %}"
    found = read_conversation([{"role": "assistant", key: "hm", **content}], "messages", WHERE)
    assert isinstance(found, Conversation) and ChatTemplate(tokenizer).write(found) == "[hm]"


WITH_TOOLS = (
    "{% if tools %}{{ tools | length }} tools {% endif %}{{ mode }}{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function.name }}={{ c.function.arguments | tojson }}{% endfor %}|{% endfor %}"
)


@pytest.mark.parametrize("role", ["function_call", "tool_call"])
@pytest.mark.parametrize("form", ["text", "object", "list", "nested"])
def test_a_call_reaches_the_template_as_it_reads_calls(role: str, form: str, tokenizer: Any) -> None:
    call: Any = {"name": "f", "arguments": {"a": 1}}
    call = {"type": "function", "function": call} if form == "nested" else [call] if form == "list" else call
    value = call if form == "object" else json.dumps(call)
    messages = [
        {"from": "human", "value": "Hi?"},
        {"from": role, "value": value},
        {"from": "observation", "value": "7"},
    ]
    found = read_conversation(messages, "conversations", WHERE)
    assert isinstance(found, Conversation)
    tokenizer.chat_template = WITH_TOOLS
    assert ChatTemplate(tokenizer).write(found) == 'user:Hi?|assistant:f={"a": 1}|tool:7|'
    tokenizer.chat_template = CHAT_TEMPLATE
    assert ChatTemplate(tokenizer).write(found) == f"<|endoftext|>user:Hi?\nassistant:{json.dumps(call)}\ntool:7\n"


CALLED = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
IN_TEXT = {**CALLED, "function": {"name": "f", "arguments": '{"a": 1}'}}


@pytest.mark.parametrize(
    "more",
    [
        {"tool_calls": [CALLED]},
        {"tool_calls": [IN_TEXT]},
        {"tool_calls": [json.dumps(IN_TEXT)]},
        {"tool_calls": {"function": [IN_TEXT["function"]]}},
        {"tool_calls": [CALLED["function"]]},
        {"function_call": json.dumps(IN_TEXT["function"])},
    ],
)
def test_arguments_of_a_call_are_not_encoded_twice(more: Any, tokenizer: Any) -> None:
    called = {"role": "assistant", "content": None, "name": None, **more}
    found = read_conversation([*TALK[1:2], called], "messages", WHERE)
    assert isinstance(found, Conversation)
    tokenizer.chat_template = CHAT_TEMPLATE
    assert names_unread(tokenizer, [found], {}) == (next(iter(more)),)
    tokenizer.chat_template = WITH_TOOLS
    assert ChatTemplate(tokenizer).write(found) == 'user:Hi?|assistant:f={"a": 1}|'
    assert names_unread(tokenizer, [found], {}) == (), "not even one that is written under its newer key"
    tokenizer.chat_template = WITH_TOOLS.replace("c.function.arguments | tojson", "'<' + c.function.arguments + '>'")
    written = ChatTemplate(tokenizer).write(found)  # of a template that reads text alone
    assert written == 'user:Hi?|assistant:f=<{"a": 1}>|'


@pytest.mark.parametrize("as_text", [False, True])
def test_arguments_of_a_record_reach_the_template(as_text: bool, tokenizer: Any) -> None:
    record: dict[str, Any] = {"tools": [{"type": "function"}], "chat_template_kwargs": {"mode": "brief "}}
    if as_text:
        record = {key: json.dumps(value) for key, value in record.items()}
    record |= {"messages": TALK[1:], "system": "Be kind.", "id": 7, "score": None, "documents": "none"}
    found = read_conversation(record["messages"], "messages", WHERE, record)
    assert isinstance(found, Conversation) and found.unread == ("id", "documents")
    tokenizer.chat_template = WITH_TOOLS
    written = "1 tools brief system:Be kind.|user:Hi?|assistant:Hello.|"
    assert ChatTemplate(tokenizer, {"mode": "long "}).write(found) == written  # a record goes before the option
    assert names_unread(tokenizer, [found], {"enable_thinking": False}) == ("enable_thinking",)
    tokenizer.chat_template = CHAT_TEMPLATE
    assert names_unread(tokenizer, [found], {}) == ("tools", "mode")


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"tools": '[{"type": '}, "line 3: tools is no list of objects"),
        ({"chat_template_kwargs": "fast"}, "line 3: chat_template_kwargs is no object"),
        ({"chat_template_kwargs": {"tokenize": True}}, "has tokenize, which is no argument of a template"),
    ],
)
def test_arguments_that_are_none_are_refused(more: Any, says: str) -> None:
    with pytest.raises(BrokenRecord, match=says):
        read_conversation(TALK, "messages", WHERE, {"messages": TALK, **more})


def test_a_template_that_reads_parts_alone_is_given_parts(tokenizer: Any) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}"
        "{{ part['text'] }}{% endfor %}{% endfor %}"
    )
    assert ChatTemplate(tokenizer).write(Conversation(tuple(TALK), WHERE)) == "Be brief.Hi?Hello."


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (None, r"the model has no chat template: .*--set calibration\.text_column=NAME or another --calib FILE"),
        ("{{ raise_exception('roles must alternate') }}", r"refuses it \(roles must alternate\): repair the record"),
        (
            "{% for m in messages %}{{ m.role }}{% endfor %}",
            "does not contain the words of the messages: mend the template",
        ),
        ("{% for", "refuses it"),
    ],
)
def test_a_template_that_does_not_fit_is_one_line(template: str | None, says: str, tokenizer: Any) -> None:
    tokenizer.chat_template = template
    with pytest.raises(CheckpointError, match=says) as caught:
        ChatTemplate(tokenizer).write(Conversation(tuple(TALK), WHERE))
    assert str(caught.value).startswith(WHERE) and "\n" not in str(caught.value)


@pytest.mark.parametrize("change", ["tojson", "upper", "trim"])
def test_a_template_that_writes_the_words_in_another_form_is_taken(change: str, tokenizer: Any) -> None:
    tokenizer.chat_template = f"{{% for m in messages %}}{{{{ m.content | {change} }}}}{{% endfor %}}"
    assert "B" in ChatTemplate(tokenizer).write(Conversation(({"role": "user", "content": 'B "x"\n'},), WHERE)).upper()


def test_templates_with_names_are_none_until_one_is_named(tokenizer: Any) -> None:
    tokenizer.chat_template = {"rag": "{{ messages[0].content }}"}
    talk = Conversation(({"role": "user", "content": "Hi"},), WHERE)
    with pytest.raises(CheckpointError, match=r"put its chat_template\.jinja into"):
        ChatTemplate(tokenizer).write(talk)
    assert ChatTemplate(tokenizer, {"chat_template": "rag"}).write(talk) == "Hi"


DATED = "{% macro head() %}{{ strftime_now('%-d %b %Y') }}|{{ strftime_now(format='%H')|int + 1 }}{% endmacro %}"


def test_one_date_is_written_and_a_date_that_is_asked_for_goes_before_it(tokenizer: Any) -> None:
    talk = Conversation(tuple(TALK[1:]), WHERE)
    tokenizer.chat_template = DATED + "{{ head() }}{% for m in messages %} {{ m.content }}{% endfor %}"
    template = ChatTemplate(tokenizer, date="2026-03-04T23:59:59")
    assert (template.write(talk), template.is_dated) == ("4 Mar 2026|24 Hi? Hello.", True)
    asked = ChatTemplate(tokenizer, {"strftime_now": "2025-01-31"})
    assert (asked.write(talk), asked.is_dated) == ("31 Jan 2025|1 Hi? Hello.", False)
    with pytest.raises(RecipeError, match="strftime_now: 'soon' is no date: write it as 2026-01-31"):
        ChatTemplate(tokenizer, {"strftime_now": "soon"}).write(talk)
    tokenizer.chat_template = "{% if strftime_now is defined %}{% set d = strftime_now('%Y') %}{% endif %}\n" + LINES
    template = ChatTemplate(tokenizer)
    assert (template.write(talk), template.is_dated) == ("user: Hi?\nassistant: Hello.\n", False)


#: Gemma 2, and Mistral, which lets the two sides take turns.
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
TURNS = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('no turns') }}{% endif %}{% endfor %}"
)
LINES = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.mark.parametrize("refusal", [NO_SYSTEM, TURNS])
@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_system_message_that_is_refused_goes_into_the_first_turn_of_the_user(
    refusal: str, role: str, tokenizer: Any
) -> None:
    tokenizer.chat_template = refusal.replace("'system'", f"'{role}'") + LINES
    template = ChatTemplate(tokenizer)
    talk = Conversation(({**TALK[0], "role": role}, *TALK[1:]), WHERE)
    assert template.write(talk) == "user: Be brief.\n\nHi?\nassistant: Hello.\n" and template.merged == 1
    assert template.write(Conversation(tuple(TALK[1:]), WHERE)) == "user: Hi?\nassistant: Hello.\n"
    assert template.merged == 1
    twice = Conversation((TALK[0], TALK[1], TALK[1]), WHERE)
    if refusal == TURNS:
        with pytest.raises(BrokenRecord, match=r"refuses it .*no turns"):
            template.write(twice)
