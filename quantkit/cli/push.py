"""The command push, and the options with which other commands push what they wrote."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import options, show
from quantkit.cli.exits import emit
from quantkit.cli.options import command
from quantkit.cli.parsing import section
from quantkit.core.units import format_bytes
from quantkit.progress import Progress

if TYPE_CHECKING:
    from quantkit.pipeline.push import Pushed

#: The options of a command whose output goes to the hub.
pushing_options = section(
    "Output",
    options.text(
        "--push-to", "ORG/NAME", "Verify OUT and upload it to the hub, into a private repository."
    ),
    section("Output", options.flag("--public", "Let everybody see the repository."), level="all"),
)


@command("push", "quantkit push ./model-int4 my-org/model-int4")
@click.argument("folder", type=options.PATH)
@click.argument("repository", metavar="ORG/NAME")
@options.flag("--public", "Let everybody see the repository; otherwise a new one is private.")
@options.device
def push(
    folder: Path, repository: str, public: bool, device: str, as_json: bool, progress: Progress
) -> None:
    """Upload FOLDER to the hub.

    FOLDER is an output of quantkit, and is verified first. The token is that of hf auth login or
    HF_TOKEN. After an interruption the same command sends what is missing. A repository with other
    contents is left as it is."""
    from quantkit import api

    done = api.push(folder, repository, public=public, device=device, progress=progress)
    emit(show.as_json(asdict(done)) if as_json else _said(done))


@contextmanager
def pushed(
    out: Path, asked: dict[str, Any], progress: Progress, device: str = "auto"
) -> Iterator[None]:
    """Take the options above out of `asked`, look at the repository, and push `out` there after the
    block.
    """
    repository, public = asked.pop("push_to"), asked.pop("public")
    if repository is None:
        if public:
            raise click.UsageError("--public needs --push-to ORG/NAME.")
        yield
        return
    from quantkit import api
    from quantkit.core.ranks import ranks
    from quantkit.pipeline.push import reach

    if not ranks().first:
        yield
        return
    reach(repository, public=public).require_only()
    yield
    done = api.push(out, repository, public=public, device=device, progress=progress)
    progress.note(_said(done))


def _said(done: Pushed) -> str:
    sent = (
        f"{len(done.uploaded)} files, {format_bytes(done.bytes)}"
        if done.uploaded
        else "nothing was missing"
    )
    return f"{done.url} ({'private' if done.private else 'public'}): {sent}"
