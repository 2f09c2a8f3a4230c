"""The options of every command, and how commands share them.

An option that several commands have is one type here. Options that belong together are the fields of a dataclass: a command
takes the whole group as one parameter, so a field added to :class:`Question` is an option of ``calibrate``, ``evaluate``,
``plan`` and ``audit`` at once.
"""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from fractions import Fraction
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import torch
import typer

from keepcover.cli.console import Answer, app
from keepcover.data import Labelled
from keepcover.engine.smoother import Classifier, Smoother
from keepcover.errors import InputError
from keepcover.files import check_folder
from keepcover.methods import Method, get_method
from keepcover.noise import Noise, get_noise
from keepcover.prediction import Predictor
from keepcover.promises import CLAUSES, Promise
from keepcover.specs import Inputs, load_data, load_inputs, load_model, load_predictor, take_part
from keepcover.tasks import Task, get_task

# -- the mechanism -----------------------------------------------------------------------------------------------------


def command(function: Callable[..., Any], *, to: typer.Typer = app, **about: Any) -> Callable[..., Any]:
    """Register a command. A parameter whose type is a dataclass becomes one option per field.

    ``Annotated[Path, "--out", "The page.", check_place]`` is an option with a name (its parameter's by default), its help,
    and a check that is called with its value before the command runs. Defaults are the dataclass's, or those of the
    parameter's own default. A command that returns an :class:`Answer` has ``--json``.
    """
    groups: dict[str, tuple[Any, list[str]]] = {}
    options: list[inspect.Parameter] = []
    signature = inspect.signature(function, eval_str=True)
    answers = signature.return_annotation is Answer
    for one in signature.parameters.values():
        if not is_dataclass(one.annotation):
            options.append(one.replace(kind=one.KEYWORD_ONLY))
            continue
        hints, offered = get_type_hints(one.annotation, include_extras=True), fields(one.annotation)
        offered = [field for field in offered if field.repr]  # a secret is no option: other users could read it
        groups[one.name] = one.annotation, [field.name for field in offered]
        for field in offered:
            default = field.default if one.default is one.empty else getattr(one.default, field.name)
            default, kind = one.empty if default is MISSING else default, hints[field.name]
            if field.metadata:
                option = typer.Option(help=field.metadata["help"], envvar=f"KEEPCOVER_{field.name.upper()}")
                kind = Annotated[field.metadata["kind"] or kind, option]
            options.append(inspect.Parameter(field.name, one.KEYWORD_ONLY, default=default, annotation=kind))
    if answers:
        options.append(inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Json))
    options = [one.replace(annotation=_option(one.annotation)) for one in options]
    checks = {
        one.name: check for one in options for check in getattr(one.annotation, "__metadata__", ()) if callable(check)
    }

    @wraps(function)
    def run(**given: Any) -> Any:
        for name, check in checks.items():
            if given[name] is not None:
                check(given[name])
        for name, (group, members) in groups.items():
            given[name] = group(**{member: given.pop(member) for member in members})
        as_json = given.pop("as_json") if answers else False
        found = function(**given)
        return found.show(as_json) if answers else found

    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in options}
    return to.command(**about)(run)


def _option(kind: Any) -> Any:
    """A type with its option's name and help, as typer takes it."""
    words = [one for one in getattr(kind, "__metadata__", ()) if isinstance(one, str)]
    names, help = [word for word in words if word.startswith("-")], [word for word in words if not word.startswith("-")]
    bare = get_args(kind)[0] if words else kind
    how: dict[str, Any] = {"parser": _number, "metavar": "<float>"} if float in (bare, *get_args(bare)) else {}
    return Annotated[kind, typer.Option(*names, help=help[0], **how)] if help else kind


def _number(value: Any) -> float:
    """A number as people write it: ``0.25``, or ``1/255``."""
    try:
        return float(Fraction(value)) if isinstance(value, str) and "/" in value else float(value)
    except (ValueError, ZeroDivisionError, OverflowError):
        raise typer.BadParameter(f"expected a number such as 0.25 or 1/255, got {value!r}") from None


def files_in(*names: str) -> Callable[[Path], None]:
    """A check that these files can be written into a folder, which is created."""
    return lambda folder: check_folder(folder, *names)


# -- single options ----------------------------------------------------------------------------------------------------

ScoreName = Literal["hps", "aps", "raps", "residual", "quantiles", "scaled"]

Json = Annotated[bool, "--json", "Print one JSON object instead of tables."]
Alpha = Annotated[float, "Miscoverage: 0.1 promises that 90 % of sets hold the truth."]
Epsilon = Annotated[float, "Radius of the attack in the norm that the noise certifies, in the units of the inputs."]
NormName = Annotated[
    str | None,
    "What epsilon measures: `l2`, `l1`, `linf`, `l0` (changed pixels) or `patch` (its side); the noise's own by default.",
]
Score = Annotated[
    ScoreName | None,
    "Non-conformity score: `hps` by default, `aps` or `raps` of classes; `residual`, `quantiles` or `scaled` of regression.",
]
TaskName = Annotated[
    Literal["classification", "regression", "multilabel", "segmentation"],
    "--task",
    "What the model returns: logits of one class, numbers, logits of several labels, or logits of pixels.",
]
Draws = Annotated[int, "Model evaluations per query."]
InputShape = Annotated[str | None, "--shape", "Shape of an input, for norms that need it: `3x32x32`."]
BatchSize = Annotated[int | None, "Noisy images per forward pass; chosen by itself by default."]
Secret = Annotated[int | None, "--seed", "For experiments: a seed makes the noise guessable. Fresh entropy by default."]
Seed = Annotated[int, "Seed of splits, noise and training: the same seed gives the same numbers."]
ClassNames = Annotated[str | None, "Names separated by commas, or a text file with one per line."]
Figures = Annotated[
    Path | None, "--figures", "Also write the page's figures into this folder, as SVG and PNG.", check_folder
]


def read_sigma(given: str | float) -> float | str:
    """A number, or ``auto``."""
    return given if given == "auto" else float(given)


# -- groups ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Added:
    """The noise that a defender adds."""

    sigma: Annotated[
        Any,
        typer.Option(
            parser=read_sigma,
            metavar="FLOAT",
            help="Standard deviation of Gaussian noise, in the units of the inputs; a store knows its own, and `calibrate` takes "
            "`auto`: the holdout chooses.",
        ),
    ] = None
    noise: Annotated[
        str | None,
        "Any noise as name:number, in place of `--sigma`: `gaussian:0.25`, `laplace:0.35`, `uniform:0.9`, `ablation:75`, `bands:4`.",
    ] = None

    def optional(self) -> Noise | None:
        """What ``--sigma`` or ``--noise`` asks for; None where neither is given."""
        if self.sigma is not None and self.noise is not None:
            raise InputError("--sigma is short for --noise gaussian:SIGMA; give one of the two")
        if self.sigma == "auto":
            raise InputError("--sigma auto is for calibrate, which has a holdout to choose it on; give a number")
        given = self.sigma if self.noise is None else self.noise
        return None if given is None else get_noise(given)

    def required(self) -> Noise:
        """The same where a noise is needed."""
        found = self.optional()
        if found is None:
            raise InputError("expected --sigma, the standard deviation of Gaussian noise, or --noise NAME:NUMBERS")
        return found


@dataclass(frozen=True)
class Promised:
    """For whom, how surely and despite what: the clauses of a promise."""

    delta: Annotated[
        float | None, "Promise with confidence 1 - delta over the calibration data, not on average over them."
    ] = None
    per: Annotated[str | None, "Promise for every `class`, or for every group in a file with one per line."] = None
    clusters: Annotated[
        Literal["auto"] | None, "With `--per class`: pool classes that behave alike on the holdout."
    ] = None
    poisoned: Annotated[int, "Calibration points that may have been replaced, added or removed."] = 0
    calibration_epsilon: Annotated[
        float, "How far calibration inputs may have been moved before their noise was drawn."
    ] = 0.0
    drift: Annotated[float, "Total variation between the population at calibration and the one of queries."] = 0.0
    label_weights: Annotated[
        str | None, "Per class, its share of queries over that at calibration, separated by commas."
    ] = None

    def promise(self, rows: Any = None) -> Promise:
        """The promise asked for; ``rows`` are those of the data that are used, whose groups are meant."""
        said = {name: getattr(self, name) for name in CLAUSES if hasattr(self, name)}
        if self.per not in (None, "class"):
            said["per"] = read_groups(Path(self.per), rows)
        if self.label_weights is not None:
            said["label_weights"] = self.label_weights.split(",")
        return Promise(**said)


@dataclass(frozen=True)
class Question(Promised, Added):
    """What is asked of a method beside alpha and epsilon: shared by ``calibrate``, ``evaluate``, ``plan`` and ``audit``."""

    norm: NormName = None
    beta: Annotated[float | None, "Monte Carlo budget of RSCP+, 0.001 by default."] = None

    def arguments(self, rows: Any = None) -> dict[str, Any]:
        """What :func:`keepcover.calibrate`, :func:`keepcover.evaluate` and ``make_plan`` take by the same names."""
        return {"norm": self.norm, "promise": self.promise(rows)}

    def method(self, name: str) -> Method:
        """A method by name, with those of these options that it has."""
        plain = get_method(name)
        return get_method(name, beta=self.beta) if self.beta is not None and "beta" in plain.options() else plain

    def offered(self, names: Iterable[str], noise: Noise, task: Task, promises: Sequence[Promise]) -> list[Method]:
        """Those of the methods that make sets for the task under the noise and can make all of the promises."""
        fit = [method for method in map(self.method, names) if not method.unfit(noise) and not task.unfit(method)]
        return [method for method in fit if not any(map(method.refuses, promises))]


@dataclass(frozen=True)
class Data:
    """Labelled data, or a part of them."""

    data: Annotated[
        str,
        "`digits`, `cifar10`, `cifar100`, `mnist`, `fashion-mnist`, a folder of class folders, or a .npz or "
        ".safetensors file with `images` and `labels` (a class each, a table [n, K] of several, or a map [n, height, width] of pixels), or "
        "`inputs` and `targets`, or a .csv file; `predict` needs no labels.",
    ]
    data_dir: Annotated[Path | None, "Folder of official files, as `keepcover data` writes it."] = None
    part: Annotated[str | None, "k/m: the k-th of m random disjoint parts of the data, the same on every run."] = None
    target: Annotated[str | None, "Column of a .csv file to predict; the last by default."] = None

    def labelled(self) -> Labelled:
        return take_part(load_data(self.data, self.data_dir, target=self.target), self.part)

    def inputs(self, labelled: bool = False) -> Inputs:
        """Inputs with their row numbers; labels may be missing unless they are asked for."""
        return load_inputs(self.data, self.data_dir, self.part, labelled, self.target)

    def __str__(self) -> str:
        return Path(self.data).name + (f", part {self.part}" if self.part else "")


@dataclass(frozen=True)
class Model:
    """A model of the user's, and where it runs."""

    model: Annotated[
        str,
        "A built-in model (`small-cnn`, `cifar-resnet20/56/110`, `wrn-D-W`, `resnet50`) with `--weights`, an `.onnx` or "
        "`.pt2` file, a Hugging Face folder, or `package.module:function`; `denoised:MODEL` puts the bundled denoiser before "
        "it, `denoised@FILE:MODEL` one that you have trained.",
    ]
    weights: Annotated[
        str | None,
        "Weights of a built-in model: a safetensors or torch file, or the name of committed ones; BASE+HEAD puts a "
        "trained head on them.",
    ] = None
    model_output: Annotated[Literal["logits", "probabilities"], "What an ONNX file returns."] = "logits"
    fingerprint: Annotated[
        str | None, "A string that stands for a model without a fingerprint, the same at calibration and afterwards."
    ] = None
    device: Annotated[str | None, "cpu or cuda; the model's own by default."] = None

    def load(self, classes: int) -> Classifier:
        return load_model(self.model, self.weights, classes, self.device, self.model_output)

    def predictor(self, saved: Path, batch_size: int | None = None) -> Predictor:
        """A saved predictor with this model."""
        return load_predictor(
            saved, self.model, self.weights, self.device, self.model_output, batch_size, self.fingerprint
        )


@dataclass(frozen=True)
class Numerics:
    """How noisy images go through the model."""

    batch_size: BatchSize = None
    autocast: Annotated[Literal["bfloat16", "float16"] | None, "Mixed precision; part of what is certified."] = None
    channels_last: Annotated[bool, "--channels-last", "Memory format of the model's input."] = False
    compile: Annotated[bool, "--compile", "Run the model through torch.compile."] = False

    def smoother(self, model: Classifier, noise: Noise, device: str | None) -> Smoother:
        autocast = getattr(torch, self.autocast) if self.autocast else None
        how: dict[str, Any] = {"channels_last": self.channels_last, "compile": self.compile}
        return Smoother(model, noise, batch_size=self.batch_size, device=device, autocast=autocast, **how)


@dataclass(frozen=True)
class Meaning:
    """What outputs mean: shared by ``calibrate``, ``evaluate`` and ``audit``."""

    task: TaskName = "classification"
    score: Score = None
    of: Annotated[
        str | None,
        "With `segmentation`: classes to make masks of, names or numbers separated by commas; all by default.",
    ] = None
    ignore: Annotated[int | None, "With `segmentation`: the number in the labels that stands for no class."] = None

    def known(self, class_names: Any = None) -> Task:
        """The task, with the names of its classes where it has classes."""
        of = None if self.of is None else [int(one) if one.isdecimal() else one for one in self.of.split(",")]
        return get_task(self.task, score=self.score, class_names=class_names or None, of=of, ignore=self.ignore)


# -- values ------------------------------------------------------------------------------------------------------------


def config(given: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a command as a manifest keeps them: groups by their options, files by their names."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        found |= vars(value) if is_dataclass(value) else {name: value}
    return {name: value.name if isinstance(value, Path) else value for name, value in found.items()}


@dataclass(frozen=True)
class Groups:
    """The groups of queries, where the promise is per group."""

    groups: Annotated[Path | None, "A file with the group of every input of the data, one per line."] = None
    unknown: Annotated[Literal["error", "widest"], "What an unknown group gets: an error, or the widest sets."] = (
        "error"
    )

    def arguments(self, rows: Any) -> dict[str, Any]:
        """What ``predict`` takes."""
        return {"groups": None if self.groups is None else read_groups(self.groups, rows), "unknown": self.unknown}


def typed(group: Any, *but: str) -> str:
    """The options of a group as they were typed, to be pasted again.

    Example:
        >>> typed(Data("my photos", part="2/4"))
        "--data 'my photos' --part 2/4"
    """
    said = [(field.name, getattr(group, field.name)) for field in fields(group) if field.name not in but]
    defaults = {field.name: field.default for field in fields(group)}
    given = [(name, value) for name, value in said if value != defaults[name]]
    return " ".join(f"--{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in given)


def read_groups(path: Path, rows: Any = None) -> list[str]:
    """Groups from a text file, one per line; those of ``rows`` where the file speaks of all the data."""
    if not path.is_file():
        raise InputError(f"expected a text file with one group per line, and there is none at {path}; or --per class")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise InputError(f"expected one group per line in UTF-8, got other bytes in {path}; save it as UTF-8") from None
    return (
        lines if rows is None or len(lines) == len(rows) else [lines[row] for row in rows.tolist() if row < len(lines)]
    )


def read_names(given: str | None) -> tuple[str, ...] | None:
    """Class names from a list or a file."""
    if given is None:
        return None
    path = Path(given)
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else given.split(",")
    return tuple(line.strip() for line in lines if line.strip())
