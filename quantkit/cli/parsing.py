"""Click's commands and choices, with options in sections, and near matches for wrong words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import Any

import click

from quantkit.errors import Option, Setting, Words
from quantkit.keys import OPTIONS, Key, Level, at_home, same_elsewhere

Function = Callable[..., Any]

#: The headings of `--help`, in order. Options in no section come last.
SECTIONS = ("Basic", "Calibration", "Method", "Output", "Advanced")
OTHERS = "Other"
#: Where a context says that help shows every option.
EVERYTHING = "quantkit.everything"
#: Commands of former versions and of other programs, and what does the same here.
ELSEWHERE = {
    "run": "quantkit quantize MODEL -o OUT --recipe RECIPE",
    "export": "quantkit quantize MODEL -o OUT",
    "chat": "quantkit generate CHECKPOINT PROMPT --chat",
    "serve": "vllm serve FOLDER",
    "info": "quantkit inspect CHECKPOINT",
    "show": "quantkit inspect CHECKPOINT",
    "benchmark": "quantkit eval tasks CHECKPOINT",
    "perplexity": "quantkit eval ppl CHECKPOINT",
    "help": "quantkit --help",
}
#: What other tools write, and which tool that is.
WRITERS = {
    "gguf": "llama.cpp's convert_hf_to_gguf.py and llama-quantize do",
    "mlx": "mlx_lm.convert does",
    "exl2": "ExLlamaV2 does",
    "exl3": "ExLlamaV3 does",
    "bitsandbytes": "transformers does",
    "bnb": "transformers does",
    "nf4": "transformers does, with bitsandbytes",
    "onnx": "optimum does",
    "fp8": "llm-compressor does",
    "nvfp4": "llm-compressor does",
    "mxfp4": "llm-compressor does",
}
#: Least similarity of a suggestion (difflib's ratio, dashes not counted). At 0.6 words are
#: suggested that only share some letters.
CUTOFF = 0.75


def moved(keys: Iterable[Key]) -> dict[str, str]:
    """Describe the replacement of an option of former versions, by its name."""
    found = {"--dry-run": "quantkit plan"} if keys else {}
    for key in keys:
        for value in (True, False) if key.is_switch else (Words("VALUE"),):
            if key.level == "all":
                found[Option(key.keyword, value).split()[0]] = Setting(key.keyword, value)
    return found


class Group(click.Group):
    """A group that names the nearest command for an unknown one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if (
            args[0] not in self.commands
            and not args[0].startswith("-")
            and not ctx.resilient_parsing
        ):
            if (meant := ELSEWHERE.get(args[0])) is not None:
                ctx.fail(f"No such command {args[0]!r}. Use {meant}")
            ctx.fail(f"No such command {args[0]!r}.{did_you_mean(args[0], self.commands)}")
        return super().resolve_command(ctx, args)


class Command(click.Command):
    """A command whose help lists options in sections. For an unknown option, the error names the
    nearest.

    `keys` are the keys of its `--set`.
    """

    keys: Sequence[Key] = ()

    def sections(
        self, ctx: click.Context, everything: bool = False
    ) -> dict[str, list[click.Option]]:
        """Sort the options by section; `everything` adds the options of `--help-all`. Without
        sections there is one.
        """
        found: dict[str, list[click.Option]] = {name: [] for name in (*SECTIONS, OTHERS)}
        for param in self.get_params(ctx):
            shown = everything or getattr(param, "level", "shown") == "shown"
            if isinstance(param, click.Option) and not param.hidden and shown:
                found[getattr(param, "section", OTHERS)].append(param)
        found = {name: params for name, params in found.items() if params}
        return {"Options": found[OTHERS]} if found.keys() == {OTHERS} else found

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        everything = EVERYTHING in ctx.meta
        for name, params in self.sections(ctx, everything).items():
            with formatter.section(name):
                formatter.write_dl(
                    [record for param in params if (record := param.get_help_record(ctx))]
                )
        if everything and self.keys:
            with formatter.section("Keys of --set KEY=VALUE"):
                formatter.write_dl(self.set_keys())

    def set_keys(self) -> list[tuple[str, str]]:
        """List the keys of `--set` that have no option, with their values and help."""
        free = [key for key in self.keys if key.level not in OPTIONS]
        return [(f"{key.name}={'|'.join(key.values) or key.kind}", key.help_text) for key in free]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        typed = " ".join(args)
        try:
            rest = super().parse_args(ctx, args)
            ctx.params |= {
                name: at_home(value) for name, value in ctx.params.items() if name != "prompt"
            }
            return rest
        except click.NoSuchOption as error:
            now = moved(self.keys).get(error.option_name)
            if now is not None:
                raise click.UsageError(f"{error.option_name} is now {now}.", ctx) from None
            options = [
                name
                for param in self.get_params(ctx)
                for name in (*param.opts, *param.secondary_opts)
            ]
            near = did_you_mean(
                error.option_name, [name for name in options if name.startswith("--")]
            )
            params = {str(param.name): param for param in self.get_params(ctx)}
            known = {*params, *(key.keyword for key in self.keys)}
            if (meant := same_elsewhere(error.option_name, known)) is not None:
                bits = re.search(rf"{re.escape(error.option_name)}[ =]([2-8])\b", typed)
                way = meant.spelled().replace("int4", f"int{bits[1]}" if bits else "int4")
                alone = isinstance(params.get(meant.name), click.Argument)
                name = params[meant.name].make_metavar(ctx) if alone else ""
                near = f" Give {name} by itself." if alone else f" Use {way}."
            elif ctx.info_name == "prune" and same_elsewhere(error.option_name, ("prune",)):
                near = " Leave it out: this command always keeps two of each four weights."
            for key in self.keys:
                if error.option_name == Option(key.keyword).spelled():
                    near = f" Use --set {key.name}=VALUE."
            raise click.UsageError(f"No such option {error.option_name!r}.{near}", ctx) from None


class Choice(click.Choice):  # type: ignore[type-arg]
    """A choice that names the nearest value for a wrong one, and lists its values in one line if
    there is none.
    """

    def get_missing_message(self, param: click.Parameter, ctx: click.Context | None) -> str:
        return f"Choose from {', '.join(map(str, self.choices))}."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            message = error.message + self._near(str(value), ctx)
            raise click.BadParameter(message, ctx, param) from None

    def _near(self, value: str, ctx: click.Context | None) -> str:
        """Name the value that was meant, or the option that it belongs to."""
        words = [str(word) for word in self.choices]
        number = re.search(r"\d+", value)
        if near := did_you_mean(value, words):
            return near
        if value.lower() in WRITERS:
            return f" quantkit does not write it: {WRITERS[value.lower()]}."
        if number and f"int{number[0]}" in words:
            return f" Did you mean 'int{number[0]}'?"
        for param in ctx.command.params if ctx else ():
            if isinstance(param.type, Choice) and value in param.type.choices:
                return f" Did you mean '{param.opts[0]} {value}'?"
        return ""


class Range(click.FloatRange):
    """A range of numbers, and never NaN, which click lets through: nothing is above or below it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        return number if number == number else self.fail(f"{value!r} is no number.", param, ctx)


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """Make the sentence that names the word nearest to `word`; empty if none is near.

    A word is near if it is similar, or if one of the two begins with the other, `--calibration` and
    `--calib`, or ends with it, `autoawq` and `awq`. Dashes do not count.
    """
    bare = {re.sub("[-_]", "", name).lower(): name for name in words}
    word = re.sub("[-_]", "", word).lower()
    parts = [
        name
        for name in bare
        for short, long in [sorted((name, word), key=len)]
        if (len(short) > 1 and long.startswith(short)) or (len(short) > 2 and long.endswith(short))
    ]
    near = sorted(parts, key=lambda name: abs(len(name) - len(word)))
    near += get_close_matches(word, bare, n=1, cutoff=CUTOFF)
    return f" Did you mean {bare[near[0]]!r}?" if near else ""


def combined(*options: Callable[[Function], Function]) -> Callable[[Function], Function]:
    """Join several options in one decorator, in the order of the help."""

    def decorate(function: Function) -> Function:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def section(
    name: str, *options: Callable[[Function], Function], level: Level = "shown"
) -> Callable[[Function], Function]:
    """Join several options that help lists under the heading `name`; at level `all`, only
    `--help-all` lists them.
    """

    def decorate(function: Function) -> Function:
        before = len(vars(function).get("__click_params__", ()))
        function = combined(*options)(function)
        for param in vars(function)["__click_params__"][before:]:
            vars(param).setdefault("section", name)
            vars(param).setdefault("level", level)
        return function

    return decorate


def needed_unless(*flags: str) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """Make a callback that asks for a parameter, unless one of `flags` is given. The flags must be
    eager.
    """

    def check(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        if value is None and not ctx.resilient_parsing and not any(map(ctx.params.get, flags)):
            hint = f"'{param.human_readable_name}'" if isinstance(param, click.Argument) else None
            raise click.MissingParameter(ctx=ctx, param=param, param_hint=hint)
        return value

    return check
