"""What every command shares: the application, the consoles, common options, tables and JSON."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

app = typer.Typer(
    help="Prediction sets that keep their coverage under attack.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
# What a terminal obeys instead of showing: control characters, and those that turn the direction of text.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class Plain(Console):
    """A console that shows text as it is: names out of a file cannot move the cursor, and brackets are no markup."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else _OBEYED.sub(_spelled, text), style, control)


def _spelled(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


err = Plain(stderr=True)
# Where nobody watches (a pipe, a log) a table is as wide as it needs to be.
out = Plain() if sys.stdout.isatty() else Plain(width=140)

ScoreName = Literal["hps", "aps", "raps"]
TransformName = Literal["none", "ptt", "both"]

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Alpha = Annotated[float, typer.Option(help="Miscoverage: 0.1 promises that 90 % of sets hold the truth.")]
Epsilon = Annotated[float, typer.Option(help="L2 radius of the attack, in pixel units (images in [0, 1]).")]
Sigma = Annotated[float, typer.Option(help="Standard deviation of the Gaussian noise, in pixel units.")]
ModelSpec = Annotated[
    str,
    typer.Option(
        help="A built-in model (`small-cnn`, `cifar-resnet20/56/110`, `resnet50`) with `--weights`, an `.onnx` or `.pt2` file, a "
        "Hugging Face folder, or `package.module:function`."
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        help="Weights of a built-in model: a safetensors or torch file, or the name of committed ones; BASE+HEAD puts a trained "
        "head on them."
    ),
]
ModelOutput = Annotated[Literal["logits", "probabilities"], typer.Option(help="What an ONNX file returns.")]
DataSpec = Annotated[
    str,
    typer.Option(
        help="`digits`, `cifar10`, `cifar100`, `mnist`, `fashion-mnist`, a folder of class folders, or a .npz or .safetensors "
        "file with `images` and `labels`."
    ),
]
DataDir = Annotated[Path | None, typer.Option(help="Folder of official files, as `keepcover data` writes it.")]
Part = Annotated[
    str | None, typer.Option(help="k/m: the k-th of m random disjoint parts of the data, the same on every run.")
]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; the model's own by default.")]
Secret = Annotated[
    int | None, typer.Option(help="For experiments: a seed makes the noise guessable. Fresh entropy by default.")
]
Fingerprint = Annotated[
    str | None,
    typer.Option(
        help="A string that stands for a model without a fingerprint, the same at calibration and afterwards."
    ),
]
ClassNames = Annotated[str | None, typer.Option(help="Names separated by commas, or a text file with one per line.")]
Figures = Annotated[
    Path | None, typer.Option("--figures", help="Also write the page's figures into this folder, as SVG and PNG.")
]
Seed = Annotated[int, typer.Option(help="Seed of splits, noise and training: the same seed gives the same numbers.")]


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=1) + "\n")


def read_names(given: str | None) -> tuple[str, ...] | None:
    """Class names from a list or a file."""
    if given is None:
        return None
    path = Path(given)
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else given.split(",")
    return tuple(line.strip() for line in lines if line.strip())


def command_line() -> str:
    """The command as another person would type it: of files and folders of this machine only their names."""

    def plain(word: str) -> str:
        option, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
        part = re.fullmatch(r"\d+/\d+", value)
        return option + equals + (Path(value).name if os.sep in value and not part else value)

    return " ".join(["keepcover", *map(plain, sys.argv[1:])])


def print_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> None:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", header_style="bold", padding=(0, 1, 0, 0))
    for index, name in enumerate(head):
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    out.print(table)
    if caption:
        out.print(caption, style="dim", highlight=False)
