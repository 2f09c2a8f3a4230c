"""What every command shares: the application, the consoles, common options, tables and JSON."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.status import Status
from rich.table import Table

from keepcover.errors import InputError

if TYPE_CHECKING:
    from keepcover.noise import Noise

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
        super().__init__(markup=False, emoji=False, highlight=False, soft_wrap=True, **options)

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
Epsilon = Annotated[
    float, typer.Option(help="Radius of the attack in the norm that the noise certifies, in the units of the inputs.")
]
Sigma = Annotated[float, typer.Option(help="Standard deviation of the Gaussian noise, in the units of the inputs.")]
MaybeSigma = Annotated[
    float | None, typer.Option("--sigma", help="Standard deviation of Gaussian noise, in the units of the inputs.")
]
NoiseSpec = Annotated[
    str | None, typer.Option("--noise", help="Any noise as name:numbers, in place of `--sigma`: `gaussian:0.25`.")
]
NormName = Annotated[str | None, typer.Option("--norm", help="Norm of epsilon; the noise's own by default.")]
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
Score = Annotated[Literal["hps", "aps", "raps"], typer.Option(help="Non-conformity score.")]
InputShape = Annotated[
    str | None, typer.Option("--shape", help="Shape of an input, for norms that need it: `3x32x32`.")
]
BatchSize = Annotated[int | None, typer.Option(help="Noisy images per forward pass; chosen by itself by default.")]
Autocast = Annotated[
    Literal["bfloat16", "float16"] | None, typer.Option(help="Mixed precision; part of what is certified.")
]
ChannelsLast = Annotated[bool, typer.Option("--channels-last", help="Memory format of the model's input.")]
Compile = Annotated[bool, typer.Option("--compile", help="Run the model through torch.compile.")]
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


def asked_noise(sigma: float | None, noise: str | None) -> Noise | None:
    """What ``--sigma`` or ``--noise`` asks for; None where neither is given."""
    from keepcover.noise import get_noise

    if sigma is not None and noise is not None:
        raise InputError("--sigma is short for --noise gaussian:SIGMA; give one of the two")
    asked = sigma if noise is None else noise
    return None if asked is None else get_noise(asked)


def some_noise(sigma: float | None, noise: str | None, otherwise: float | None = None) -> Noise:
    """The same where there must be one: ``otherwise`` is the sigma where neither is given."""
    asked = asked_noise(otherwise if sigma is None and noise is None else sigma, noise)
    if asked is None:
        raise InputError("expected --sigma, the standard deviation of Gaussian noise, or --noise NAME:NUMBERS")
    return asked


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=1) + "\n")


def read_names(given: str | None) -> tuple[str, ...] | None:
    """Class names from a list or a file."""
    if given is None:
        return None
    path = Path(given)
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else given.split(",")
    return tuple(line.strip() for line in lines if line.strip())


def read_shape(given: str | None) -> tuple[int, ...] | None:
    """The shape of an input as the command line takes it.

    Example:
        >>> read_shape("3x32x32")
        (3, 32, 32)
    """
    if given is None:
        return None
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", given):
        raise InputError(f"expected a shape as numbers joined by x, for instance 3x32x32, got {given!r}")
    return tuple(int(part) for part in given.split("x"))


def told(status: Status) -> Callable[[str], None]:
    """What shows progress: the line that turns on a terminal, lines of their own elsewhere."""
    return lambda text: status.update(text) if err.is_terminal else err.print(text)


def command_line() -> str:
    """The command as another person would type it: of files and folders of this machine only their names."""

    def plain(word: str) -> str:
        option, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
        part = re.fullmatch(r"\d+/\d+", value)
        return option + equals + (Path(value).name if os.sep in value and not part else value)

    return " ".join(["keepcover", *map(plain, sys.argv[1:])])


def print_table(title: str, head: Sequence[str], rows: Sequence[Sequence[Any]], caption: str = "") -> None:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", header_style="bold", padding=(0, 1, 0, 0))
    for index, name in enumerate(head):
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(str, row))
    out.print(table, soft_wrap=False)
    if caption:
        out.print(caption, style="dim")
