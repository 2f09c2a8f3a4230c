"""Methods over random calibration/test halves of noisy outputs: one loop, over one source.

Of every point only statistics remain that thresholds are compared with, so splits are arithmetic and memory does not grow
with points x draws where the source is read from disk or from the network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from keepcover.errors import InputError
from keepcover.evaluation.random_splits import Split, random_splits
from keepcover.evaluation.rows import Observed, Row
from keepcover.methods import METHODS, Asked, Holdout, Method, Rule, get_method
from keepcover.noise import Noise, Threat, get_noise
from keepcover.prediction.source import Piece, Source, source_of
from keepcover.promises import Promise
from keepcover.scores import PTT, Draws, Items, Reading, Score
from keepcover.tasks import Classification, Spread, Task, get_task

MANY = 256  # draws beyond which picking one order statistic is cheaper than sorting for a few


@dataclass(frozen=True)
class Entry:
    """One line to compute: a method with its budget under one threat.

    Attributes:
        method: with its options.
        epsilon: radius of the attack.
        draws: model evaluations per query; all there are by default.
        calibration_draws: of calibration points; the method's usual number by default, as far as there are so many.
        alpha: miscoverage.
        task: what outputs mean.
        promise: for whom, how surely and despite what.
        norm: in which epsilon is measured; the noise's own by default.
    """

    method: Method
    epsilon: float
    draws: int | None = None
    calibration_draws: int | None = None
    alpha: float = 0.1
    task: Task = field(default_factory=Classification)
    promise: Promise = Promise()
    norm: str | None = None

    def asked(self, source: Source, n: int, task: Task, shape: tuple[int, ...] | None) -> Asked:
        """The question to the method, on outputs with so many draws and n calibration points."""
        draws = source.draws if self.draws is None else self.draws
        usual = min(source.draws, self.method.usual_calibration_draws(draws))
        per_point = usual if self.calibration_draws is None else self.calibration_draws
        for wanted in (draws, per_point):
            if not 1 <= wanted <= source.draws:
                raise InputError(f"asked for {wanted} draws, there are {source.draws}; ask for 1 to {source.draws}")
        threat = Threat(source.noise, self.epsilon, self.norm, shape)
        return Asked(self.alpha, threat, draws, n, task.candidates, per_point, self.promise)


@dataclass(frozen=True)
class Attacked:
    """Attacked versions of some points, in the order of ``positions``, and the attack's name."""

    name: str
    positions: Tensor
    source: Source


def entries(
    methods: Sequence[str | Method] | None,
    transforms: Sequence[str] = ("none", "ptt"),
    draws: int | None = None,
    **shared: Any,
) -> list[Entry]:
    """Every method under every transform that can matter to it: methods that only compare scores have none.

    Example:
        >>> [(e.method.name, e.method.transform is not None) for e in entries(["exact", "rscp"], epsilon=0.1)]
        [('exact', False), ('rscp', False), ('rscp', True)]
    """
    for transform in transforms:
        if transform not in ("none", "ptt"):
            raise InputError(f"expected transforms among none and ptt, got {transform!r}")
    listed = [get_method(method) for method in (METHODS if methods is None else methods)]
    made = []
    for method in listed:
        if draws is not None and draws < method.least_draws and len(listed) > 1:
            continue
        own = [method]
        if not method.compares_only:
            ptt = method.transform or PTT()
            own = [replace(method, transform=None if name == "none" else ptt) for name in transforms]  # type: ignore[type-var]
        made += [Entry(one, draws=draws, **shared) for one in own]
    return made


def evaluate(
    outputs: Any,
    truth: Any = None,
    *,
    epsilon: float,
    sigma: float | None = None,
    noise: Noise | str | None = None,
    norm: str | None = None,
    shape: Sequence[int] | None = None,
    alpha: float = 0.1,
    promise: Promise | None = None,
    methods: Sequence[str | Method] | None = None,
    transforms: Sequence[str] = ("none", "ptt"),
    task: str | Task = "classification",
    score: str | Score | Callable[..., Tensor] | None = None,
    draws: int | None = None,
    calibration_draws: int | None = None,
    splits: int = 50,
    holdout: int = 500,
    redraw_holdout: bool = False,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> list[Row]:
    """Methods on the same random splits of the same noisy outputs: mean size and coverage of each.

    Args:
        outputs: [n, N, ...], a tensor, an array, a store or a :class:`Source`; a store brings its truth and its noise.
        truth: of every point.
        epsilon, sigma, noise, norm, shape, alpha, promise, task, score: as for :func:`keepcover.calibrate_outputs`.
        methods: names or methods with their options; all by default.
        transforms: ``none`` and ``ptt`` for methods that average scores.
        draws: model evaluations per query; all there are by default.
        calibration_draws: of calibration points; each method's usual number by default.
        splits, holdout: random halves of what a holdout leaves, which is fixed unless ``redraw_holdout``.
        seed: of splits and randomised scores.
        progress: called with (done, total) while splits are judged.

    Example:
        >>> logits = torch.randn(300, 4, 3) + 4 * torch.nn.functional.one_hot(torch.arange(300) % 3)[:, None]
        >>> rows = evaluate(logits, torch.arange(300) % 3, epsilon=0.1, sigma=0.2, methods=["rcp1"], splits=3, holdout=50)
        >>> rows[0].method, rows[0].splits
        ('rcp1', 3)
    """
    added = sigma if noise is None else noise
    source = source_of(outputs, truth, None if added is None else get_noise(added))
    known = get_task(task, **({} if score is None else {"score": score}))
    shared = {"epsilon": epsilon, "calibration_draws": calibration_draws, "alpha": alpha, "task": known, "norm": norm}
    listed = entries(
        methods, transforms, source.draws if draws is None else draws, promise=promise or Promise(), **shared
    )
    found = evaluate_entries(
        source,
        listed,
        splits=splits,
        holdout=holdout,
        redraw_holdout=redraw_holdout,
        seed=seed,
        progress=progress,
        shape=None if shape is None else tuple(shape),
    )
    return [row for rows in found for row in rows]


def evaluate_entries(
    source: Source,
    listed: Sequence[Entry],
    *,
    splits: int = 50,
    holdout: int = 500,
    redraw_holdout: bool = False,
    seed: int = 0,
    attacked: Attacked | None = None,
    shape: tuple[int, ...] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[list[Row]]:
    """The rows of every entry: one for clean test points, and one for attacked ones where there are some. Calibration stays
    clean, and a split's attacked points are those of its test points that have an attacked version.
    """
    if redraw_holdout and not source.kept:
        raise InputError("a new holdout for every split reads the outputs once per split: that needs them in memory")
    every = list(random_splits(source.points, splits, holdout, seed, redraw_holdout))
    uniform, where = uniforms(source.points, seed), torch.full((source.points,), -1)
    total = source.points
    if attacked is not None:  # their statistics stand behind those of the clean points, with those points' uniforms
        total += attacked.source.points
        where[attacked.positions] = torch.arange(source.points, total)
        uniform = torch.cat([uniform, uniform[:, attacked.positions]], dim=1)
    runners = [Runner(entry, source, shape, total) for entry in listed]
    kept: list[Scored] = []
    for number, some in enumerate([[split] for split in every] if redraw_holdout else [every]):
        fresh = [run for run in runners if number == 0 or run.entry.method.needs_holdout]
        held = _read(source, some[0].holdout, uniform)
        holdouts: dict[Task, Holdout] = {}
        for run in fresh:
            run.fit(held, holdouts, some[0])
        new: list[Scored] = []
        for scored in kept or _scored(source, attacked, some[0], held, uniform):
            for run in fresh:
                run.keep(scored)
            scored.forget()
            if source.kept and number == 0:
                new.append(scored)
        kept = kept or new
        for at, split in enumerate(some):
            hit = where[split.test]
            for place, run in enumerate(runners):
                run.judge(split, split.test)
                if attacked is not None:
                    run.judge(split, hit[hit >= 0], attacked.name)
                if progress:
                    progress((max(number, at)) * len(runners) + place + 1, splits * len(runners))
    return [run.rows() for run in runners]


def uniforms(n: int, seed: int) -> Tensor:
    """The numbers that randomise scores and boundaries: two per point, independent of its noise, [2, n]."""
    return torch.rand(2, n, generator=torch.Generator().manual_seed(seed))


class Scored:
    """Noisy outputs of some points, and their scores: computed once per task and reading, shared by methods and splits."""

    def __init__(self, piece: Piece, uniform: Tensor) -> None:
        self.rows, self.outputs, self.truth = piece
        self.u, self.v = uniform[:, self.rows].to(self.outputs.device)
        self._prepared: dict[tuple[Task, Reading], Any] = {}
        self._items: dict[tuple[Task, Reading], Items] = {}

    def known(self, task: Task) -> Tensor:
        """The truth, checked."""
        return task.check_truth(self.truth, len(self.rows)).to(self.outputs.device)

    def prepared(self, task: Task, reading: Reading) -> Any:
        if (task, reading) not in self._prepared:
            if reading.transform is None:
                made = task.prepare(self.outputs, reading, self.u)
            else:  # from the order, which several transforms share
                made = Draws(reading.transform(self.prepared(task, Reading(order=True)).values), unit=True)
            self._prepared[task, reading] = made
        return self._prepared[task, reading]

    def items(self, task: Task, reading: Reading) -> Items:
        if (task, reading) not in self._items:
            if reading.transform is None:
                made = task.items(self.outputs, self.known(task), reading, self.u)
            else:
                own = self.items(task, Reading(order=True))
                made = replace(own, draws=Draws(reading.transform(own.draws.values), unit=True))
            self._items[task, reading] = made
        return self._items[task, reading]

    def forget(self) -> None:
        """Drop what a transform made: another holdout fits another."""
        for kept in (self._prepared, self._items):
            for key in [key for key in kept if key[1].transform is not None]:
                del kept[key]


def _read(source: Source, rows: Tensor, uniform: Tensor) -> Scored:
    """Some points as one."""
    parts = [(piece.outputs.cpu(), torch.as_tensor(piece.truth)) for piece in source.read(rows)]
    outputs, truth = (torch.cat(some) for some in zip(*parts, strict=True))
    return Scored(Piece(rows, outputs, truth), uniform)


def _scored(source: Source, attacked: Attacked | None, split: Split, held: Scored, uniform: Tensor) -> Iterable[Scored]:
    """Every point once: the holdout is not read again where reading costs something."""
    truth = torch.zeros(source.points, *held.truth.shape[1:], dtype=held.truth.dtype)
    rows = torch.arange(source.points)
    if not source.kept:
        yield held
        truth[held.rows] = held.truth
        rows = torch.cat([split.calibration, split.test]).sort().values
    for piece in source.read(rows):
        truth[piece.rows] = torch.as_tensor(piece.truth).to(truth.dtype).cpu()
        yield Scored(piece, uniform)
    if attacked is not None:
        for piece in attacked.source.read(torch.arange(attacked.source.points)):
            yield Scored(
                Piece(source.points + piece.rows, piece.outputs, truth[attacked.positions[piece.rows]]), uniform
            )


class Runner:
    """One entry: fitted on a holdout, then judged split by split on the statistics that it keeps of all points."""

    rule: Rule

    def __init__(self, entry: Entry, source: Source, shape: tuple[int, ...] | None, total: int) -> None:
        self.entry, self.source, self.shape, self.total = entry, source, shape, total
        self.task = entry.task
        self.kept: dict[str, Tensor] = {}
        self.observed: dict[str, Observed] = {}
        self.trivial: dict[str, int] = {}

    def _calibration(self, split: Split) -> Tensor:
        return split.calibration if self.entry.method.needs_holdout else split.calibration_with_holdout

    def fit(self, held: Scored, holdouts: dict[Task, Holdout], split: Split) -> None:
        """Choose the rule; runners of one task share the holdout and what is computed from it."""
        entry = self.entry
        self.task = entry.task.seen(held.outputs)
        if self.task not in holdouts:
            holdouts[self.task] = Holdout(self.task, held.outputs, held.known(self.task).cpu(), held.u)
        asked = entry.asked(self.source, len(self._calibration(split)), self.task, self.shape)
        entry.method.check(asked, self.task)
        self.rule = entry.method.fit(asked, holdouts[self.task] if entry.method.needs_holdout else None)

    def keep(self, scored: Scored) -> None:
        """Statistics of one piece, into their places among those of all points."""
        rule, task = self.rule, self.task.seen(scored.outputs)
        prepared = scored.prepared(task, rule.reading)
        items = scored.items(task, rule.reading).draws
        own, test = items.first(rule.calibration_draws), items.first(rule.test_draws)
        if rule.counting is not None and test.count <= MANY:  # sorted once, looked up for every rule
            _ = own.ascending, prepared.first(rule.test_draws).ascending if hasattr(prepared, "first") else None
        found = {
            "calibration": rule.statistic(own),
            "summary": task.summary(prepared, rule, scored.v),
            "true": rule.test_statistic(test, scored.v),
        }
        group = task.groups(scored.known(task))
        if group is not None:
            found["group"] = group
        for name, part in found.items():
            if name not in self.kept or self.kept[name].shape[1:] != part.shape[1:]:
                self.kept[name] = part.new_empty(self.total, *part.shape[1:], device="cpu")
            self.kept[name][scored.rows] = part.cpu()

    def judge(self, split: Split, test: Tensor, attack: str = "none") -> None:
        """Calibrate on the split and look at some points."""
        kept, rule = self.kept, self.rule
        rows = self._calibration(split)
        threshold = torch.tensor(rule.threshold_of(kept["calibration"][rows], len(rows)), dtype=torch.float64)
        inside = self.task.inside(kept["summary"][test], rule, threshold)
        size, covered = self.task.sizes(inside), kept["true"][test] <= threshold
        group = kept["group"][test] if "group" in kept else None
        self.observed.setdefault(attack, Observed()).add(size, covered, group, self.task.candidates)
        full = self.task.candidates is not None and bool((size == self.task.candidates).all())
        self.trivial[attack] = self.trivial.get(attack, 0) + (full or bool(torch.isposinf(threshold)))

    def rows(self) -> list[Row]:
        """One row per attack, the clean one first."""
        promise = self.rule.guarantee(self.task)
        return [
            Row(
                promise,
                len(seen.sizes),
                Spread.of(seen.sizes),
                Spread.of(seen.coverages),
                self.trivial[attack],
                attack,
                seen,
            )
            for attack, seen in self.observed.items()
        ]
