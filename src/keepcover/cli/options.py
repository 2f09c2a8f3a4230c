"""The options of every command, and how commands share them.

An option that several commands have is one type here. Options that belong together are the fields of a dataclass: a command
takes the whole group as one parameter, so a field added to :class:`Question` is an option of ``calibrate``, ``evaluate``,
``plan`` and ``audit`` at once.
"""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from fractions import Fraction
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from typer.models import ParameterInfo

from keepcover.cli.console import Answer, app
from keepcover.data import Labelled
from keepcover.engine.smoother import AUTOCAST, Classifier, Smoother
from keepcover.errors import InputError
from keepcover.files import check_folder
from keepcover.methods import Method, get_method
from keepcover.noise import Noise, get_noise
from keepcover.prediction import Predictor
from keepcover.promises import CLAUSES, Promise
from keepcover.specs import Inputs, load_data, load_inputs, load_model, load_predictor, part_rows
from keepcover.tasks import Task, get_task

# -- the mechanism -----------------------------------------------------------------------------------------------------


def command(function: Callable[..., Any], *, to: typer.Typer = app, **about: Any) -> Callable[..., Any]:
    """Register a command. A parameter whose type is a dataclass becomes one option per field.

    What the docstring of the command, or of the dataclass, says of a parameter under ``Args`` is the help of its option.
    ``Annotated[Path, "--out", check_place]`` gives an option another name than its parameter's, and a check that is called
    with its value before the command runs. Defaults are the dataclass's, or those of the parameter's own default; False by
    default is a flag. A command that returns an :class:`Answer` has ``--json``.
    """
    groups: dict[str, tuple[Any, list[str]]] = {}
    options: list[inspect.Parameter] = []
    signature, told = inspect.signature(function, eval_str=True), _described(function)
    answers = signature.return_annotation is Answer
    for one in signature.parameters.values():
        if is_dataclass(one.annotation):
            members = list(_members(one))
            groups[one.name] = one.annotation, [member.name for member in members]
            options += members
        else:
            options.append(_option(one.name, one.annotation, told.get(one.name), one.default))
    if answers:
        options.append(_option("as_json", Json, None, False))
    checks = [(one.name, check) for one in options for check in one.annotation.__metadata__ if callable(check)]

    @wraps(function)
    def run(**given: Any) -> Any:
        for name, check in checks:
            if given[name] is not None:
                check(given[name])
        for name, (group, members) in groups.items():
            given[name] = group(**{member: given.pop(member) for member in members})
        as_json = given.pop("as_json") if answers else False
        found = function(**given)
        return found.show(as_json) if answers else found

    run.__doc__ = (inspect.getdoc(function) or "").partition("\n\nArgs:")[0]
    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in options}
    return to.command(**about)(run)


def _members(group: inspect.Parameter) -> Iterator[inspect.Parameter]:
    """The options of a parameter whose type is a dataclass."""
    hints, told = get_type_hints(group.annotation, include_extras=True), _described(group.annotation)
    for field in fields(group.annotation):
        if not field.repr:  # a secret is no option: other users could read it
            continue
        default = field.default if group.default is group.empty else getattr(group.default, field.name)
        kind, about = hints[field.name], field.metadata
        if about:
            option = typer.Option(help=about["help"], envvar=f"KEEPCOVER_{field.name.upper()}")
            kind = Annotated[about["kind"] or kind, option]
        yield _option(field.name, kind, told.get(field.name), group.empty if default is MISSING else default)


def _described(thing: Any) -> dict[str, str]:
    """What docstrings say of parameters, those of the classes that a class inherits from included."""
    texts = [(inspect.getdoc(one) or "").partition("Args:")[2] for one in reversed(getattr(thing, "__mro__", (thing,)))]
    found = [pair for text in texts for pair in re.findall(r"^    (\w+): (.+(?:\n {6}.+)*)", text, re.MULTILINE)]
    return {name: " ".join(text.split()) for name, text in found}


def _option(name: str, kind: Any, help: str | None, default: Any) -> inspect.Parameter:
    """An option as typer takes it."""
    bare, *said = get_args(kind) if get_origin(kind) is Annotated else (kind,)
    words = [one for one in said if isinstance(one, str)]
    names = [word for word in words if word.startswith("-")]
    help = next((word for word in words if not word.startswith("-")), help)
    if ready := [one for one in said if isinstance(one, ParameterInfo)]:
        ready[0].help = ready[0].help or help
    else:
        how: dict[str, Any] = {"parser": _number, "metavar": "<float>"} if float in (bare, *get_args(bare)) else {}
        flag = [f"--{name.replace('_', '-')}"] if default is False else []
        said.append(typer.Option(*(names or flag), help=help, **how))
    kind = Annotated[bare, *said]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _number(value: Any) -> float:
    """A number as people write it: ``0.25``, or ``1/255``."""
    try:
        return float(Fraction(value)) if isinstance(value, str) and "/" in value else float(value)
    except (ValueError, ZeroDivisionError, OverflowError):
        raise typer.BadParameter(f"expected a number such as 0.25 or 1/255, got {value!r}") from None


# -- single options ----------------------------------------------------------------------------------------------------

Json = Annotated[bool, "--json", "Print one JSON object instead of tables."]
Alpha = Annotated[float, "Miscoverage: 0.1 promises that 90 % of sets hold the truth."]
Epsilon = Annotated[float, "Radius of the attack in the norm that the noise certifies, in the units of the inputs."]
Score = Annotated[
    Literal["hps", "aps", "raps", "residual", "quantiles", "scaled"] | None,
    "Non-conformity score: `hps` by default, `aps` or `raps` of classes; `residual`, `quantiles` or `scaled` of regression.",
]
Draws = Annotated[int, "Model evaluations per query."]
InputShape = Annotated[str | None, "--shape", "Shape of an input, for norms that need it: `3x32x32`."]
BatchSize = Annotated[int | None, "Noisy images per forward pass; chosen by itself by default."]
Secret = Annotated[int | None, "--seed", "For experiments: a seed makes the noise guessable. Fresh entropy by default."]
Seed = Annotated[int, "Seed of splits, noise and training: the same seed gives the same numbers."]
ClassNames = Annotated[str | None, "Names separated by commas, or a text file with one per line."]
Figures = Annotated[Path | None, "Also write the page's figures into this folder, as SVG and PNG.", check_folder]


def read_sigma(given: str | float) -> float | str:
    """A number, or ``auto``."""
    return given if given == "auto" else _number(given)


# -- groups ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Added:
    """The noise that a defender adds.

    Args:
        sigma: Standard deviation of Gaussian noise, in the units of the inputs; a store knows its own, and `calibrate`
            takes `auto`: the holdout chooses.
        noise: Any noise as name:number, in place of `--sigma`: `gaussian:0.25`, `laplace:0.35`, `uniform:0.9`,
            `ablation:75`, `bands:4`.
    """

    sigma: Annotated[Any, typer.Option(parser=read_sigma, metavar="FLOAT")] = None
    noise: str | None = None

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
    """For whom, how surely and despite what: the clauses of a promise.

    Args:
        delta: Promise with confidence 1 - delta over the calibration data, not on average over them.
        per: Promise for every `class`, or for every group in a file with one per line.
        clusters: With `--per class`: pool classes that behave alike on the holdout.
        poisoned: Calibration points that may have been replaced, added or removed.
        calibration_epsilon: How far calibration inputs may have been moved before their noise was drawn.
        drift: Total variation between the population at calibration and the one of queries.
        label_weights: Per class, its share of queries over that at calibration, separated by commas.
    """

    delta: float | None = None
    per: str | None = None
    clusters: Literal["auto"] | None = None
    poisoned: int = 0
    calibration_epsilon: float = 0.0
    drift: float = 0.0
    label_weights: str | None = None

    def promise(self, rows: Any = None) -> Promise:
        """The promise asked for; ``rows`` are those of the data that are used, whose groups are meant."""
        said = {name: getattr(self, name) for name in CLAUSES if hasattr(self, name)}
        if self.per not in (None, "class"):
            said["per"] = read_groups(Path(self.per), rows)
        if self.label_weights is not None:
            said["label_weights"] = self.label_weights.split(",")
        return Promise(**said)


@dataclass(frozen=True)
class Asked(Promised, Added):
    """What is promised under which noise.

    Args:
        norm: What epsilon measures: `l2`, `l1`, `linf`, `l0` (changed pixels) or `patch` (its side); the noise's own by
            default.
    """

    norm: str | None = None


@dataclass(frozen=True)
class Question(Asked):
    """What is asked of a method beside alpha and epsilon: shared by ``calibrate``, ``evaluate``, ``plan`` and ``audit``.

    Args:
        beta: Monte Carlo budget of RSCP+, 0.001 by default.
    """

    beta: float | None = None

    def arguments(self, rows: Any = None) -> dict[str, Any]:
        """What :func:`keepcover.calibrate`, :func:`keepcover.evaluate` and ``make_plan`` take by the same names."""
        return {"norm": self.norm, "promise": self.promise(rows)}

    def method(self, name: str) -> Method:
        """A method by name, with those of these options that it has."""
        plain = get_method(name)
        return get_method(name, beta=self.beta) if self.beta is not None and "beta" in plain.options() else plain

    def methods(
        self, named: list[str] | None, usual: Iterable[str], noise: Noise, task: Task, promises: Sequence[Promise]
    ) -> list[Method]:
        """The methods named; without, those of the usual ones that make sets for the task and the promises under the noise."""
        if named:
            return [*map(self.method, named)]
        fit = [one for one in map(self.method, usual) if not (one.unfit(noise) or task.unfit(one))]
        return [one for one in fit if not any(map(one.refuses, promises))]


@dataclass(frozen=True)
class Data:
    """Labelled data, or a part of them.

    Args:
        data: `digits`, `cifar10`, `cifar100`, `mnist`, `fashion-mnist`, a folder of class folders, or a .npz or
            .safetensors file with `images` and `labels` (a class each, a table [n, K] of several, or a map [n, height,
            width] of pixels), or `inputs` and `targets`, or a .csv file; `predict` needs no labels.
        data_dir: Folder of official files, as `keepcover data` writes it.
        part: k/m: the k-th of m random disjoint parts of the data, the same on every run.
        target: Column of a .csv file to predict; the last by default.
    """

    data: str
    data_dir: Path | None = None
    part: str | None = None
    target: str | None = None

    def labelled(self) -> Labelled:
        data = load_data(self.data, self.data_dir, target=self.target)
        return data[part_rows(len(data), self.part)]

    def inputs(self, labelled: bool = False) -> Inputs:
        """Inputs with their row numbers; labels may be missing unless they are asked for."""
        return load_inputs(self.data, self.data_dir, self.part, labelled, self.target)

    def __str__(self) -> str:
        return Path(self.data).name + (f", part {self.part}" if self.part else "")


@dataclass(frozen=True)
class Model:
    """A model of the user's, and where it runs.

    Args:
        model: A built-in model (`small-cnn`, `cifar-resnet20/56/110`, `wrn-D-W`, `resnet50`) with `--weights`, an
            `.onnx` or `.pt2` file, a Hugging Face folder, or `package.module:function`; `denoised:MODEL` puts the
            bundled denoiser before it, `denoised@FILE:MODEL` one that you have trained.
        weights: Weights of a built-in model: a safetensors or torch file, or the name of committed ones; BASE+HEAD puts
            a trained head on them.
        model_output: What an ONNX file returns.
        fingerprint: A string that stands for a model without a fingerprint, the same at calibration and afterwards.
        device: cpu or cuda; the model's own by default.
    """

    model: str
    weights: str | None = None
    model_output: Literal["logits", "probabilities"] = "logits"
    fingerprint: str | None = None
    device: str | None = None

    def load(self, classes: int) -> Classifier:
        return load_model(self.model, self.weights, classes, self.device, self.model_output)

    def predictor(self, saved: Path, batch_size: int | None = None) -> Predictor:
        """A saved predictor with this model."""
        how = (self.weights, self.device, self.model_output, batch_size, self.fingerprint)
        return load_predictor(saved, self.model, *how)


@dataclass(frozen=True)
class Numerics:
    """How noisy images go through the model.

    Args:
        autocast: Mixed precision; part of what is certified.
        channels_last: Memory format of the model's input.
        compile: Run the model through torch.compile.
    """

    batch_size: BatchSize = None
    autocast: Literal["bfloat16", "float16"] | None = None
    channels_last: bool = False
    compile: bool = False

    def smoother(self, model: Classifier, noise: Noise, device: str | None) -> Smoother:
        return Smoother(model, noise, device=device, **{**vars(self), "autocast": AUTOCAST[self.autocast]})


@dataclass(frozen=True)
class Meaning:
    """What outputs mean: shared by ``calibrate``, ``evaluate`` and ``audit``.

    Args:
        task: What the model returns: logits of one class, numbers, logits of several labels, or logits of pixels.
        of: With `segmentation`: classes to make masks of, names or numbers separated by commas; all by default.
        ignore: With `segmentation`: the number in the labels that stands for no class.
    """

    task: Literal["classification", "regression", "multilabel", "segmentation"] = "classification"
    score: Score = None
    of: str | None = None
    ignore: int | None = None

    def known(self, class_names: Any = None) -> Task:
        """The task, with the names of its classes where it has classes."""
        of = None if self.of is None else [int(one) if one.isdecimal() else one for one in self.of.split(",")]
        return get_task(self.task, score=self.score, class_names=class_names or None, of=of, ignore=self.ignore)


@dataclass(frozen=True)
class Level:
    """At which of its levels a predictor answers.

    Args:
        alpha: One of the predictor's alphas; its first by default.
        epsilon: One of the predictor's epsilons; its first by default.
    """

    alpha: float | None = None
    epsilon: float | None = None


@dataclass(frozen=True)
class Query(Level):
    """How a saved predictor is asked.

    Args:
        groups: A file with the group of every input of the data, one per line.
        unknown: What an unknown group gets: an error, or the widest sets.
    """

    groups: Path | None = None
    unknown: Literal["error", "widest"] = "error"
    batch_size: BatchSize = None
    seed: Secret = None

    def arguments(self, rows: Any) -> dict[str, Any]:
        """What ``predict`` and ``predict_all`` take, of inputs with these numbers."""
        groups = None if self.groups is None else read_groups(self.groups, rows)
        return {"ids": rows, "seed": self.seed, "groups": groups, "unknown": self.unknown}


# -- values ------------------------------------------------------------------------------------------------------------


def given(options: dict[str, Any]) -> dict[str, Any]:
    """Those of the options that were given."""
    return {name: value for name, value in options.items() if value is not None}


def config(given: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a command as a manifest keeps them: groups by their options, files by their names."""
    groups = [vars(value) if is_dataclass(value) else {name: value} for name, value in given.items()]
    return {name: one.name if isinstance(one, Path) else one for group in groups for name, one in group.items()}


def typed(group: Any, *but: str) -> str:
    """The options of a group as they were typed, to be pasted again.

    Example:
        >>> typed(Data("my photos", part="2/4"))
        "--data 'my photos' --part 2/4"
    """
    said = [(one.name, getattr(group, one.name)) for one in fields(group) if getattr(group, one.name) != one.default]
    words = [(name.replace("_", "-"), value) for name, value in said if name not in but]
    return " ".join(f"--{name}" if value is True else f"--{name} {shlex.quote(str(value))}" for name, value in words)


def read_groups(path: Path, rows: Any = None) -> list[str]:
    """Groups from a text file, one per line; those of ``rows`` where the file speaks of all the data."""
    if not path.is_file():
        raise InputError(f"expected a text file with one group per line, and there is none at {path}; or --per class")
    lines = _lines(path, "group")
    if "" in map(str.strip, lines):
        empty = [*map(str.strip, lines)].index("") + 1
        raise InputError(
            f"expected one group per line in {path}, and line {empty} is empty; name a group of its own for such rows"
        )
    if rows is None or len(lines) == len(rows):
        return lines
    return [lines[row] for row in rows.tolist() if row < len(lines)]


def read_names(given: str | None) -> tuple[str, ...]:
    """Class names from a list or a file."""
    try:
        lines = _lines(Path(given or ""), "name")
    except OSError:  # no file of that name, so it is a list
        lines = (given or "").split(",")
    return tuple(line.strip() for line in lines if line.strip())


def _lines(path: Path, of: str) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise InputError(f"expected one {of} per line in UTF-8, got other bytes in {path}; save it as UTF-8") from None
