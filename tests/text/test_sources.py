"""Text sources: documents of every kind of file, and refusals that name the file."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from benchmarks.byte_tokenizer import byte_tokenizer
from quantkit.errors import CheckpointError
from quantkit.text.conversations import Conversation
from quantkit.text.sequences import draw_calibration
from quantkit.text.sources import kind_of, load_documents, load_evaluation_text, name_of_text

WIKI = " \n = One = \n \n Text of one , x = 5 . \n \n = = Part = = \n \n More . \n \n = Two = \n \n Text of two . \n"

TALK = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hello."}]


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def test_wikitext_articles_are_whole_and_complete(tmp_path: Path) -> None:
    formula = WIKI.replace("Text of one , x = 5 . \n", "where \n = 7 / 2 ) is ( J = \n and so on \n")
    assert len(load_documents(write(tmp_path / "wiki.txt", formula)).texts) == 2, "a formula is not a heading"
    found = load_documents(write(tmp_path / "wiki.txt", WIKI))
    assert [text.split("\n")[0].strip() for text in found.texts] == ["= One =", "= Two ="]
    assert "".join(found.texts) == WIKI.removeprefix(" \n")
    assert "heading" in found.rule


def test_wikitext2_has_its_official_number_of_articles(shared: Path) -> None:
    assert len(load_documents(str(shared / "data" / "wikitext2" / "test.txt")).texts) == 60


def test_blank_lines_separate_documents(tmp_path: Path) -> None:
    assert load_documents(write(tmp_path / "a.txt", "one\nline\n\n \t\n\n  two\r\n\r\nthree\n")).texts == [
        "one\nline",
        "  two",
        "three\n",
    ]
    found = load_documents(write(tmp_path / "b.txt", "one\ntwo\n"))
    assert (found.texts, found.rule, found.undivided) == (["one\ntwo\n"], "the whole text is one document", True)


def test_records_of_jsonl_and_parquet_are_documents(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    texts = ["first\n\nstill first", "second", "ünï – 三"]
    lines = "\n".join(json.dumps({"text": t, "id": i}) for i, t in enumerate(texts))
    jsonl = write(tmp_path / "a.jsonl", lines + "\n\n")
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
    array = write(tmp_path / "a.json", "\n" + json.dumps([{"text": t} for t in texts]))
    one = write(tmp_path / "one.json", '{\n  "text": "one record",\n  "id": 1\n}\n')
    assert load_documents(one).texts == ["one record"] == [load_evaluation_text(one)[0]]
    misnamed = write(tmp_path / "array.jsonl", json.dumps([{"text": t} for t in texts], indent=1))
    for source in (jsonl, str(tmp_path / "a.parquet"), array, misnamed, write(tmp_path / "lines.json", lines)):
        assert load_documents(source).texts == texts
        assert load_evaluation_text(source)[0] == "\n\n".join(texts)


@pytest.mark.parametrize("pack", [gzip, bz2, lzma])
def test_compressed_files_are_read_like_others(pack: Any, tmp_path: Path) -> None:
    suffix = {gzip: ".gz", bz2: ".bz2", lzma: ".xz"}[pack]
    contents = {".jsonl": '{"text": "a\\nb"}\n{"text": "c"}\n', ".csv": 'text,n\n"a\nb",1\nc,\n', ".txt": "a\nb\n\nc"}
    for kind, content in contents.items():
        source = write(tmp_path / f"a{kind}{suffix}", pack.compress(content.encode()))
        assert load_documents(source).texts == ["a\nb", "c"]
        assert load_evaluation_text(source)[0] == "a\nb\n\nc"


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_cells_of_a_csv_file_are_text_as_they_stand(separator: str, tmp_path: Path) -> None:
    texts = ["NA", "007", 'he said "no",\nand; went\taway', "", "x" * 200_000, "null", "ünï"]
    cells = ('"{}"'.format(text.replace('"', '""')) for text in texts)
    lines = "".join(f"{i}{separator}{cell}\r\n" for i, cell in enumerate(cells))
    source = write(tmp_path / "a.csv", f"\ufeffid{separator}text\r\n{lines}")
    found = load_documents(source)
    assert (found.texts, dict(found.left_out.without)) == ([text for text in texts if text], {"empty": 1})


ALPACA = {"instruction": "Add.", "input": "1 and 2", "output": "3"}


@pytest.mark.parametrize(
    ("row", "pair", "messages", "plain"),
    [
        (ALPACA, ("instruction", "input", "output"), ["Add.\n\n1 and 2", "3"], "Add.\n\n1 and 2\n\n3"),
        ({**ALPACA, "input": ""}, ("instruction", "input", "output"), ["Add.", "3"], "Add.\n\n3"),
        ({"prompt": "Hi?", "completion": "Yes."}, ("prompt", "completion"), ["Hi?", "Yes."], "Hi?\n\nYes."),
        ({"prompt": TALK[:1], "completion": TALK[1:]}, ("prompt", "completion"), ["Hi?", "Hello."], None),
        ({"Input": "Hi?", "Target": "Yes."}, ("Input", "Target"), ["Hi?", "Yes."], "Hi?\n\nYes."),
    ],
)
def test_two_columns_are_a_question_and_its_answer(
    row: dict[str, Any], pair: tuple[str, ...], messages: list[str], plain: str | None, tmp_path: Path
) -> None:
    empty = dict.fromkeys(row, "") | {pair[0]: row[pair[0]]}
    found = load_documents(write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, [row, empty, row]))))
    assert (found.pair, dict(found.left_out.without), len(found.texts)) == (pair, {"empty": 1}, 2)
    assert found.rule == f"one conversation ({', '.join(pair)}) a record"
    for talk in found.texts:
        assert isinstance(talk, Conversation) and (talk.plain, talk.unread) == (plain, ())
        roles = [(each["role"], each["content"]) for each in talk.messages]
        assert roles == [*zip(("user", "assistant"), messages, strict=True)]


def test_two_columns_can_be_named_and_keep_the_system_message(tmp_path: Path) -> None:
    row = {"ask": "Hi?", "reply": "Yes.", "system": "Be brief.", "id": "7"}
    source = write(tmp_path / "a.json", json.dumps([row, {"ask": "Hi?"}]))
    with pytest.raises(CheckpointError, match=r"found the keys ask, .*text_column=NAME or for .* answer NAME,"):
        load_documents(source)
    with pytest.raises(CheckpointError, match="record 2: has no ask and reply: found the keys ask"):
        load_documents(source, text_column="ask,reply")
    found = load_documents(source, text_column="ask, reply", skip_bad_records=1).texts[0]
    assert isinstance(found, Conversation) and found.unread == ("id",)
    assert [each["role"] for each in found.messages] == ["system", "user", "assistant"]
    assert load_documents(write(tmp_path / "b.jsonl", '{"text": "t", "question": "a", "answer": "b"}')).texts == ["t"]


def test_a_folder_of_text_files_is_divided_as_its_files_are(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    (folder / "deep").mkdir(parents=True)
    texts = {"a.txt": WIKI, "b.txt": "one\nline\r\n\r\ntwo", "deep/c.txt": "three\nlines\n"}
    files = {name: load_documents(write(folder / name, text)) for name, text in texts.items()}
    found = load_documents(str(folder))
    assert found.texts == [text for file in files.values() for text in file.texts] and not found.undivided
    assert found.rule.startswith("one document per WikiText heading; ") and found.rule.endswith("; 3 files")
    for name in ("a.txt", "b.txt"):
        (folder / name).unlink()
    alone = load_documents(str(folder))
    assert (alone.texts, alone.undivided) == (["three\nlines\n"], True)
    with pytest.raises(CheckpointError, match="set: has no split test, but train"):
        load_documents(str(folder), split="test")
    with pytest.raises(CheckpointError, match="set: is a folder, and a text to judge by is one file"):
        load_evaluation_text(str(folder))


def test_folders_of_save_to_disk_are_read(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_list([{"text": "one"}, {"text": "two"}])
    talks = datasets.Dataset.from_list([{"messages": TALK}])
    rows.save_to_disk(tmp_path / "single")
    datasets.DatasetDict({"train": rows, "test": talks}).save_to_disk(tmp_path / "splits")
    for name in ("single", "splits"):
        found = load_documents(str(tmp_path / name))
        assert (found.texts, found.rule) == (["one", "two"], "one document a row of the split train")
        assert not found.unread  # state.json and dataset_info.json are no data
    assert load_documents(str(tmp_path / "splits"), split="test").conversations
    for name in ("single", "splits"):
        with pytest.raises(CheckpointError, match=f"{name}: has no split dev, but"):
            load_documents(str(tmp_path / name), split="dev")


def test_line_ends_of_windows_change_neither_documents_nor_perplexity(tmp_path: Path) -> None:
    raw = " \n = One = \n\n  tail \r "
    assert load_evaluation_text(write(tmp_path / "raw.txt", raw))[0] == raw
    (tmp_path / "windows.txt").write_bytes(WIKI.replace("\n", "\r\n").encode())
    unix, windows = write(tmp_path / "unix.txt", WIKI), str(tmp_path / "windows.txt")
    assert load_documents(windows).texts == load_documents(unix).texts
    assert load_documents(windows).rule == load_documents(unix).rule + ", CRLF read as LF"
    assert load_evaluation_text(windows) == (WIKI, "windows.txt (as it is, CRLF read as LF)")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.txt", b" \n\n\t\n", "no text"),
        ("a.txt", b"abc\xff\xfe", "not UTF-8"),
        ("a.txt", "UTF-16 without a mark".encode("utf-16-le"), "not UTF-8 text .it has NUL characters.: convert"),
        ("a.json", b'{\n "text": "x",\n}', "a.json: is not JSON"),
        (
            "a.jsonl",
            b'{"messages": [{"role": "user", "content": "x"}]}\n{"text": "y"}\n',
            "line 2: has no messages: fo",
        ),
        ("a.jsonl", b'{"text": "x"}\n{"txt": "y"}\n', "line 2: has no text: found the keys txt: give records of each"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}\n', "line 2: is not JSON"),
        ("a.jsonl", b'{"text": "x"}\n\n{"text": ["x"]}\n', "line 3: text is no text"),
        ("a.jsonl", b'{"text": null}\n{"text": ""}\nnull\n{}\n', r"holds no text \(4 records: 2 null, 2 empty\)"),
        (
            "a.jsonl",
            b'{"id": 1, "body": "y"}\n',
            "line 1: has no text, messages .*: found the keys id, body: use --set",
        ),
        ("a.json", b'[{"chosen": [{"from": "gpt"}], "rejected": [{"from": "gpt"}]}]', "text_column=chosen"),
        ("a.json", b'{"data": [{"text": "x"}]}', "keys data: if the records are those of data, write that list to a"),
        *(
            (name, content, says)
            for name in ("a.jsonl", "a.csv", "a.txt", "a.parquet")
            for content, says in (
                (b"\n<!DOCTYPE html>\n<html>", "is a page of HTML"),
                (b"version https://git-lfs.github.com/spec/v1\noid", "is a Git LFS pointer"),
            )
        ),
        ("a.jsonl", b"7\n", r'line 1: .* it is no object with keys: write it as \{"text": "\.\.\."\}, or allow'),
        ("a.json", b'[{"text": "x"}, 7]', "record 2: .* it is no object with keys"),
        ("a.jsonl", b'["x"]\n["y"]\n', 'is not JSON .*: repair the file: one array, or a record {"text"'),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "line 1: is not JSON"),
        ("a.jsonl", b'{"text": ' + b"[" * 100_000 + b"}", "line 1: is not JSON"),
        ("a.parquet", b"PAR1 not at all", "no parquet file"),
        ("a.xlsx", b"PK", "unknown kind"),
        ("a.jsonl.gz", b"no gzip", "cannot be read"),
        ("a.parquet.gz", b"", "unknown kind of text file: decompress it"),
        ("a.csv", b'text,n\n"x" y,2,3\n', "no table that can be read"),
    ],
)
def test_a_bad_file_is_refused_with_its_name(name: str, content: bytes, says: str, tmp_path: Path) -> None:
    source = write(tmp_path / name, content)
    with pytest.raises(CheckpointError, match=says) as caught:
        load_documents(source)
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_a_parquet_file_without_rows_is_named_as_one_without_text(tmp_path: Path) -> None:
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), path)
    with pytest.raises(CheckpointError, match=r"a\.parquet: .*no text"):
        load_documents(str(path))


@pytest.mark.parametrize(
    ("name", "content", "way"),
    [
        ("a.jsonl", b'{"body": "x"}', "found the keys body: rename the key or column"),
        ("a.jsonl", b'{"messages": [{"role": "user", "content": "x"}]}', 'keys messages: write it as {"text": "..."}'),
        ("a.jsonl", b'{"text": "a"}\n{"text": null}', "line 2: text is null: remove the record"),
    ],
)
def test_what_is_no_evaluation_text_is_refused_with_a_way_that_helps(
    name: str, content: bytes, way: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_evaluation_text(write(tmp_path / name, content))
    assert str(caught.value).endswith(way)


def test_a_named_column_is_read_instead(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", '{"text": "no", "body": "yes"}\n{"text": "no", "body": "again"}\n')
    found = load_documents(source, text_column="body")
    assert (found.texts, found.rule) == (["yes", "again"], "one document (body) a record")
    with pytest.raises(CheckpointError, match="line 1: has no text called title: found the keys text, body"):
        load_documents(source, text_column="title")


@pytest.mark.parametrize("key", ["conversations", "dialog"])
def test_records_of_messages_are_conversations(key: str, tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [{key: TALK, "id": 7}, {key: TALK[:1], "id": 8}]
    jsonl = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    for source in (jsonl, str(tmp_path / "a.parquet"), write(tmp_path / "a.json", json.dumps(rows))):
        found = load_documents(source, text_column="dialog" if key == "dialog" else None)
        assert found.conversations and f"one conversation ({key})" in found.rule
        found_talks = [text.messages for text in found.texts if isinstance(text, Conversation)]
        assert found_talks == [tuple(TALK), tuple(TALK[:1])]
    with pytest.raises(CheckpointError, match=r"line 1: has no string called text: found the keys .*: (rename|write)"):
        load_evaluation_text(jsonl)


MARKED = {"utf-8": b"\xef\xbb\xbf", "utf-16-le": b"\xff\xfe", "utf-16-be": b"\xfe\xff"}


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json"])
@pytest.mark.parametrize("encoding", list(MARKED))
def test_a_byte_order_mark_is_no_text(name: str, encoding: str, tmp_path: Path) -> None:
    text = {"a.txt": "ünï", "a.json": '[{"text": "ünï"}]'}.get(name, '{"text": "ünï"}\n')
    source = write(tmp_path / name, MARKED[encoding] + text.encode(encoding))
    assert load_documents(source).texts == ["ünï"]
    assert load_evaluation_text(source)[0] == "ünï"
    joined = write(tmp_path / "joined.jsonl", '\ufeff{"text": "a"}\r\n\ufeff{"text": "b"}\r\n')
    assert load_documents(joined).texts == ["a", "b"]


@pytest.mark.parametrize(
    ("records", "texts", "why"),
    [
        (['{"text": "a"}', '{"text": null}', '{"text": " "}', "{}", "null"], 1, {"null": 2, "empty": 2}),
        (['{"text": null, "messages": null}', '{"messages": [{"role": "user", "content": "a"}]}'], 1, {"null": 1}),
    ],
)
def test_records_without_text_are_left_out_and_counted(
    records: list[str], texts: int, why: dict[str, int], tmp_path: Path
) -> None:
    found = load_documents(write(tmp_path / "a.jsonl", "\n".join(records)))
    assert (len(found.texts), dict(found.left_out.without), found.left_out.broken) == (texts, why, [])


BROKEN = ['{"text": "a"}', '{"text": ', '{"text": 7}', '{"txt": "b"}', '{"text": null}', '{"text": "c"}']


def test_broken_records_are_left_out_up_to_their_number(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", "\n".join(BROKEN))
    found = load_documents(source, skip_bad_records=3)
    assert (found.texts, found.left_out.why) == (["a", "c"], "1 null, 3 broken")
    assert found.left_out.broken[0].startswith("line 2: is not JSON")
    for allowed, line in enumerate((2, 3, 4)):
        with pytest.raises(CheckpointError, match=rf"a\.jsonl: line {line}: .*--skip-bad-records N$"):
            load_documents(source, skip_bad_records=allowed)


def test_a_table_fills_up_with_nulls_that_are_no_part_of_a_record(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    tools = [{"name": "f", "a": {"type": "int"}}, {"name": "g", "b": {"type": "str"}}]
    talk = [{"role": "assistant", "content": None, "reasoning_content": "hm"}, TALK[1]]
    rows = [{"messages": talk, "tools": tools[:1]}, {"messages": TALK, "tools": tools[1:]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    found = [text for text in load_documents(str(tmp_path / "a.parquet")).texts if isinstance(text, Conversation)]
    assert [text.arguments for text in found] == [{"tools": tools[:1]}, {"tools": tools[1:]}]
    assert [text.messages for text in found] == [({**talk[0], "content": ""}, TALK[1]), tuple(TALK)]


def test_the_packaged_text_is_enough_for_the_usual_samples() -> None:
    found = load_documents("packaged")
    texts = [text for text in found.texts if isinstance(text, str)]
    assert len(texts) == len(found.texts) >= 256 and sum(map(len, texts)) >= 128 * 2048 * 4


@pytest.fixture
def data_set(tmp_path: Path) -> Path:
    """Write a data set's folder as the hub has them: a split for training and one of conversations."""
    folder = tmp_path / "set"
    folder.mkdir()
    write(folder / "train.jsonl", "\n".join(json.dumps({"text": f"text {i}", "title": "t"}) for i in range(5)))
    write(folder / "test.jsonl", "\n".join(json.dumps({"messages": TALK}) for _ in range(3)))
    splits = [{"split": split, "path": f"{split}.jsonl"} for split in ("train", "test")]
    configs = [{"config_name": "texts", "data_files": splits[:1]}, {"config_name": "chats", "data_files": splits[1:]}]
    write(folder / "README.md", "---\nconfigs: " + json.dumps(configs) + "\n---\n")
    return folder


def test_a_hub_data_set_is_read_by_name_configuration_and_split(
    data_set: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    real = datasets.load_dataset

    def from_folder(name: str, *args: object, **options: object) -> object:
        assert name == "org/set"
        return real(str(data_set), *args, **options)

    monkeypatch.setattr(datasets, "load_dataset", from_folder)
    with monkeypatch.context() as patch:
        patch.setattr("quantkit.text.sources.HUB_ROWS", 3)
        found = load_documents("org/set:texts")
        assert (len(found.texts), found.rule) == (3, "one document a row of the split train, the first 3")
    found = load_documents("org/set:texts")
    assert (found.texts, found.rule) == ([f"text {i}" for i in range(5)], "one document a row of the split train")
    assert load_documents("org/set:texts", text_column="title").texts == ["t"] * 5
    with pytest.raises(CheckpointError, match=r"org/set:chats: has no split train, but test: use --set .*split=NAME"):
        load_documents("org/set:chats")
    assert load_documents("org/set:chats", split="test").conversations
    with pytest.raises(CheckpointError, match=r"org/set: cannot be loaded \(.*texts.*\): check the name"):
        load_documents("org/set")


def test_kinds_of_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.txt", "x")
    write(tmp_path / "b.JSON", "[]")
    (tmp_path / "folder").mkdir()
    kinds = [kind_of(s) for s in ("c4", "packaged", "a.txt", "b.JSON", "folder", "org/name", "org/na.me:v1.0")]
    assert kinds == ["data set", "packaged", "plain text", "records", "hub", "hub", "hub"]
    with pytest.raises(CheckpointError, match="self: models no longer write their calibration text: use packaged, or"):
        load_documents("self")
    for missing in ("folder/a.txt", "./org/name", "a/b/c", "wikitext3"):
        with pytest.raises(CheckpointError, match=r"no such text: .* use wikitext2, ptb, c4"):
            kind_of(missing)


def test_a_source_is_named_without_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "chats").mkdir()
    hub = ["org/name", "org/name:config", "org/name:config:2"]
    for source in ["c4", "c4:0.5", "packaged", *hub, "a.txt", "a.jsonl:3"]:
        assert name_of_text(source) == source
    files = ["/secret/a.txt", "../secret/a.jsonl:0.5", "secret/a.parquet"]
    for source in [*files, "texts/chats", "texts/chats:2", f"{tmp_path}/texts"]:
        assert name_of_text(source) == source.rpartition("/")[2]


def test_files_of_another_kind_in_a_folder_are_not_left_out_in_silence(tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    folder.mkdir()
    write(folder / "a.jsonl", '{"text": "read"}\n')
    write(folder / "b.jsonl", '{"text": "read too"}\n')
    write(folder / "notes.txt", "not read")
    found = load_documents(str(folder))
    assert len(found.texts) == 2 and found.unread == ["notes.txt"]
    drawn = draw_calibration(str(folder), byte_tokenizer(), samples=1, max_length=8, seed=0)
    assert any("not read, 1 in all: notes.txt" in line for line in drawn.notices)
