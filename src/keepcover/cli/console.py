"""What every command shares: the application, the consoles, tables and JSON."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import typer
from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import Progress
from rich.segment import Segment
from rich.status import Status
from rich.table import Table
from rich.text import Text

app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False
)
# What a terminal obeys instead of showing: control characters, and those that turn the direction of text.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class Plain(Console):
    """A console that shows text as it is: names out of a file cannot move the cursor, and brackets are no markup."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, soft_wrap=True, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for text, style, control in super().render(renderable, options):
            plain = _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
            yield Segment(text if control else plain, style, control)


err = Plain(stderr=True)
# In a pipe or a log a table is as wide as it needs to be.
out = Plain() if sys.stdout.isatty() else Plain(width=140)


class Answer(NamedTuple):
    """What a command found: for ``--json``, for a reader (text and tables), and its exit code."""

    json: Any
    shown: Sequence[RenderableType]
    code: int = 0

    def show(self, as_json: bool) -> int:
        """Print one of the two; the exit code."""
        if as_json:
            print_json(self.json)
        else:
            for one in self.shown:
                out.print(one, soft_wrap=not isinstance(one, Table))
        return self.code


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=1) + "\n")


def progress_lines(status: Status) -> Callable[[str], None]:
    """A function that shows progress: in the status line of a terminal, in lines of their own elsewhere."""
    return lambda text: status.update(text) if err.is_terminal else err.print(text)


@contextmanager
def bar(what: str) -> Iterator[Callable[..., None]]:
    """A bar on a terminal, moved by a function of what is done, of the total and, where it changes, of what is being done."""
    with Progress(console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total, what=what: progress.update(task, completed=done, total=total, description=what)


def command_line() -> str:
    """The command as another person would type it: of files and folders of this machine only their names."""

    def plain(word: str) -> str:
        option, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
        part = re.fullmatch(r"\d+/\d+", value)
        return option + equals + (Path(value).name if os.sep in value and not part else value)

    return " ".join(["keepcover", *map(plain, sys.argv[1:])])


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    made = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", header_style="bold", padding=(0, 1, 0, 0))
    for index, name in enumerate(head):
        made.add_column(name, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        made.add_row(*(f"{one:g}" if isinstance(one, float) else str(one) for one in row))
    return made


def dim(text: str) -> Text:
    """What is said of a table below it."""
    return Text(text, "dim")
