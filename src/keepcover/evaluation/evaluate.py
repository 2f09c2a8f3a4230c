"""Methods over random calibration/test halves of noisy outputs: one loop, over one source.

Of every point only statistics remain that thresholds are compared with, so splits are arithmetic and memory does not grow
with points x draws where the source is read from disk or from the network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from keepcover.errors import InputError
from keepcover.evaluation.random_splits import Split, random_splits
from keepcover.evaluation.rows import Observed, Row, Seen
from keepcover.methods import Asked, Method, Rule, get_method, usable
from keepcover.noise import Noise, Threat, get_noise
from keepcover.prediction.collecting import Kept
from keepcover.prediction.question import Shape
from keepcover.prediction.source import Piece, Source, source_of
from keepcover.promises import Promise, Sample, for_queries, of_truth
from keepcover.scores import PTT, Draws, Items, Reading, Score, Tally
from keepcover.tasks import Classification, Task, get_task

TRANSFORMS = ("none", "ptt")
MANY = 256  # draws beyond which picking one order statistic is cheaper than sorting for a few


@dataclass(frozen=True)
class Attacked:
    """Attacked versions of some points, in the order of ``positions``, and the attack's name."""

    name: str
    positions: Tensor
    source: Source


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

    def asked(self, source: Source, n: int, task: Task, shape: Shape) -> Asked:
        """The question to the method, on outputs with so many draws and n calibration points."""
        draws = source.draws if self.draws is None else self.draws
        usual = min(source.draws, self.method.usual_calibration_draws(draws))
        per_point = usual if self.calibration_draws is None else self.calibration_draws
        for wanted in (draws, per_point):
            if not 1 <= wanted <= source.draws:
                raise InputError(f"asked for {wanted} draws, there are {source.draws}; ask for 1 to {source.draws}")
        threat = Threat(source.noise, self.epsilon, self.norm, shape)
        return Asked(self.alpha, threat, draws, n, task.candidates, per_point, self.promise)


def entries(
    methods: Sequence[str | Method], transforms: Sequence[str] = TRANSFORMS, draws: int | None = None, **shared: Any
) -> list[Entry]:
    """Every method under every transform that can matter to it: methods that only compare scores have none.

    Example:
        >>> [(e.method.name, e.method.transform is not None) for e in entries(["exact", "rscp"], epsilon=0.1)]
        [('exact', False), ('rscp', False), ('rscp', True)]
    """
    if unknown := set(transforms) - set(TRANSFORMS):
        raise InputError(f"expected transforms among none and ptt, got {min(unknown)!r}")
    listed = [get_method(method) for method in methods]
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
    promise: Promise | Sequence[Promise] | None = None,
    methods: Sequence[str | Method] | None = None,
    transforms: Sequence[str] = TRANSFORMS,
    task: str | Task = "classification",
    score: str | Score | Callable[..., Tensor] | None = None,
    draws: int | None = None,
    calibration_draws: int | None = None,
    splits: int = 50,
    holdout: int = 500,
    redraw_holdout: bool = False,
    calibration: int | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> list[Row]:
    """Methods on the same random splits of the same noisy outputs: mean size and coverage of each.

    Args:
        outputs: [n, N, ...], a tensor, an array, a store or a :class:`Source`; a store brings its truth and its noise.
        truth: of every point.
        epsilon, sigma, noise, norm, shape, alpha, task, score: as for :func:`keepcover.calibrate_outputs`.
        promise: one, or several whose rows follow one another; the groups of a promise per group are those of all points.
        methods: names or methods with their options; all that hold under the noise by default.
        transforms: ``none`` and ``ptt`` for methods that average scores.
        draws: model evaluations per query; all there are by default.
        calibration_draws: of calibration points; each method's usual number by default.
        splits, holdout: random halves of what a holdout leaves, which is fixed unless ``redraw_holdout``.
        calibration: calibration points per split; half of what the holdout leaves by default.
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
    known, where = get_task(task, score=score), None if shape is None else tuple(shape)
    shared = {"epsilon": epsilon, "calibration_draws": calibration_draws, "alpha": alpha, "task": known, "norm": norm}
    chosen = usable(source.noise, known) if methods is None else methods
    promises = map(Promise.of, promise if isinstance(promise, list | tuple) else [promise])
    wanted = source.draws if draws is None else draws
    listed = [entry for one in promises for entry in entries(chosen, transforms, wanted, promise=one, **shared)]
    split: dict[str, Any] = {"splits": splits, "redraw_holdout": redraw_holdout, "calibration": calibration}
    found = evaluate_entries(source, listed, holdout=holdout, seed=seed, shape=where, progress=progress, **split)
    return list(chain.from_iterable(found))


def evaluate_entries(
    source: Source,
    listed: Sequence[Entry],
    *,
    splits: int = 50,
    holdout: int = 500,
    redraw_holdout: bool = False,
    calibration: int | None = None,
    seed: int = 0,
    attacked: Attacked | None = None,
    shape: Shape = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[list[Row]]:
    """The rows of every entry: one for clean test points, and one for attacked ones where there are some. Calibration stays
    clean, and a split's attacked points are those of its test points that have an attacked version.
    """
    if redraw_holdout and not source.kept:
        raise InputError("a new holdout for every split reads the outputs once per split: that needs them in memory")
    every = list(random_splits(source.points, splits, holdout, seed, redraw_holdout, calibration))
    # The statistics of attacked points stand behind those of the clean ones, with those points' uniforms.
    moved = torch.zeros(0, dtype=torch.int64) if attacked is None else attacked.positions
    points, where = torch.cat([torch.arange(source.points), moved]), torch.full((source.points,), -1)
    where[moved] = source.points + torch.arange(len(moved))
    # What randomises scores and boundaries: two numbers per point, independent of its noise.
    uniform = torch.rand(2, source.points, generator=torch.Generator().manual_seed(seed))[:, points]
    # Groups that one promise speaks of are looked at under the others too.
    groups = next((entry.promise.groups for entry in listed if entry.promise.groups is not None), None)
    runners = [(Runner if e.task.single else Curves)(e, source, shape, points, groups) for e in listed]
    kept: list[Scored] = []
    for number, some in enumerate([[split] for split in every] if redraw_holdout else [every]):
        fresh = [run for run in runners if number == 0 or run.needs_holdout]
        held = Held(source, some[0].holdout, uniform, {run.entry.task for run in fresh})
        for run in fresh:
            run.fit(held, some[0])
        for scored in kept or held.and_rest(attacked):
            for run in fresh:
                run.keep(scored)
            scored.forget()
            if source.kept and number == 0:
                kept.append(scored)
        for at, split in enumerate(some):
            hit = where[split.test]
            for place, run in enumerate(runners):
                run.judge(split, split.test)
                if attacked is not None:
                    run.judge(split, hit[hit >= 0], attacked.name)
                if progress:
                    progress(max(number, at) * len(runners) + place + 1, splits * len(runners))
    return [run.rows() for run in runners]


# -- noisy outputs on their way: read piece by piece, the holdout first ------------------------------------------------


class Scored:
    """Noisy outputs of some points, and their scores: computed once per task and reading, shared by methods and splits."""

    def __init__(self, piece: Piece, uniform: Tensor) -> None:
        self.rows, self.outputs, self.truth = piece
        self.u, self.v = uniform[:, self.rows].to(self.outputs.device)
        self._scores: dict[tuple[Task, Reading], tuple[Any, Items]] = {}

    def known(self, task: Task) -> Tensor:
        """The truth, checked."""
        return task.check_truth(self.truth, len(self.rows)).to(self.outputs.device)

    def scores(self, task: Task, reading: Reading) -> tuple[Any, Any]:
        """What sets are made of, and the items of the truth."""
        if (task, reading) not in self._scores:
            transform = reading.transform
            if transform is None:
                every = task.prepare(self.outputs, reading, self.u)
                own = task.items(self.outputs, self.known(task), reading, self.u)
            else:  # from the order, which several transforms share
                every, own = self.scores(task, Reading(order=True))
                every = Draws(transform(every.values), unit=True)
                own = replace(own, draws=Draws(transform(own.draws.values), unit=True))
            self._scores[task, reading] = every, own
        return self._scores[task, reading]

    def forget(self) -> None:
        """Drop what a transform made: another holdout fits another."""
        self._scores = {key: made for key, made in self._scores.items() if key[1].transform is None}


class Held:
    """The holdout of a source, as every task keeps it: ``holdouts`` by task, each with the task that has seen the outputs.

    Where reading costs something the holdout is read once and stays in memory, unless no task needs all of it: then it is thinned as
    it is read, and read again with the other points.
    """

    def __init__(self, source: Source, rows: Tensor, uniform: Tensor, tasks: set[Task]) -> None:
        self.source, self.rows, self.uniform = source, rows, uniform
        self.pieces: list[Scored] | None = [] if not source.kept and any(task.single for task in tasks) else None
        kept, seen = {task: Kept() for task in tasks}, {task: task for task in tasks}
        for piece in source.read(rows):
            scored = Scored(piece, uniform)
            for task in tasks:
                seen[task] = known = task.seen(scored.outputs)
                truth = scored.known(known)
                items = None if task.single else known.items(scored.outputs, truth, Reading(order=True), scored.u)
                kept[task].add(known, scored.outputs, truth, scored.u, items)
            if self.pieces is not None:
                self.pieces.append(scored)
        self.holdouts: dict[Task, Any] = {task: kept[task].holdout(seen[task]) for task in tasks}

    def and_rest(self, attacked: Attacked | None) -> Iterator[Scored]:
        """Every point of the source once, then the attacked ones, with the truth of the clean ones.

        The holdout is not read again where it is in memory and reading costs something.
        """
        rows, seen = torch.arange(self.source.points), []
        rest = rows if self.pieces is None else rows[~torch.isin(rows, self.rows)]
        for scored in chain(self.pieces or (), (Scored(piece, self.uniform) for piece in self.source.read(rest))):
            if attacked is not None:
                seen.append((scored.rows, torch.as_tensor(scored.truth).cpu()))
            yield scored
        if attacked is None:
            return
        order, truth = (torch.cat(part) for part in zip(*seen, strict=True))
        truth = truth[order.argsort()]
        for piece in attacked.source.read(torch.arange(attacked.source.points)):
            own = truth[attacked.positions[piece.rows]]
            yield Scored(Piece(self.source.points + piece.rows, piece.outputs, own), self.uniform)


# -- what is kept of every point, and judged ---------------------------------------------------------------------------


class Runner:
    """One entry: fitted on a holdout, then judged split by split on the statistics that it keeps of all points, so that
    thresholds and sets of any split are arithmetic.
    """

    rule: Rule

    def __init__(self, entry: Entry, source: Source, shape: Shape, points: Tensor, groups: Any) -> None:
        self.entry, self.source, self.shape = replace(entry, method=entry.method.suited(entry.task)), source, shape
        self.needs_holdout = self.entry.method.needs_holdout or entry.promise.needs_holdout
        self.task, self.total, groups = entry.task, len(points), entry.promise.groups or groups
        self.groups = 0 if groups is None else len(groups.per)
        self.kept: dict[str, Tensor] = {}
        self.observed: dict[str, Observed] = {}
        if groups is not None:
            if groups.codes is None or len(groups.codes) != source.points:
                raise InputError(f"expected the group of each of {source.points} points, Promise(per=groups)")
            self.kept["group"] = groups.codes[points]

    def _calibration(self, split: Split) -> Tensor:
        return split.calibration if self.needs_holdout else split.calibration_with_holdout

    def fit(self, held: Held, split: Split) -> None:
        """Choose the rule; runners of one task share the holdout and what is computed from it."""
        entry, holdout = self.entry, held.holdouts[self.entry.task]
        self.task = holdout.task
        asked = entry.asked(self.source, len(self._calibration(split)), self.task, self.shape)
        entry.method.check(asked, self.task)
        chosen_on = holdout if self.needs_holdout else None
        self.rule = entry.method.fit(asked.settled(chosen_on), chosen_on)

    def keep(self, scored: Scored) -> None:
        """Statistics of one piece, into their places among those of all points."""
        for name, part in self.found(scored, self.task.seen(scored.outputs)).items():
            if name not in self.kept or self.kept[name].shape[1:] != part.shape[1:]:
                self.kept[name] = part.new_empty(self.total, *part.shape[1:], device="cpu")
            self.kept[name][scored.rows] = part.cpu()

    def judge(self, split: Split, test: Tensor, attack: str = "none") -> None:
        """Calibrate on the split and look at some points."""
        seen = self.judged(self._calibration(split), test)
        self.observed.setdefault(attack, Observed()).add(seen, self.task.candidates, self.groups)

    def rows(self) -> list[Row]:
        """One row per attack, the clean one first."""
        promise = self.rule.guarantee(self.task)
        return [Row(promise, seen, attack, self.entry.method.name) for attack, seen in self.observed.items()]

    def found(self, scored: Scored, task: Task) -> dict[str, Tensor]:
        """What is kept of one piece: the statistics that thresholds are made of and compared with."""
        rule = self.rule
        prepared, items = scored.scores(task, rule.reading)
        own, test = items.draws.first(rule.calibration_draws), items.draws.first(rule.test_draws)
        if rule.counting is not None and test.count <= MANY:  # sorted once, looked up for every rule
            _ = own.ascending, prepared.first(rule.test_draws).ascending if hasattr(prepared, "first") else None
        label = task.label_of(scored.known(task))
        summary, true = task.summary(prepared, rule, scored.v), rule.test_statistic(test, scored.v)
        found = {"calibration": rule.statistic(own), "summary": summary, "true": true}
        return found if label is None else {**found, "label": label}

    def judged(self, calibration: Tensor, test: Tensor) -> Seen:
        """Calibrate on some points and look at others."""
        kept, task, rule = self.kept, self.task, self.rule
        known = Sample(kept["true"], label=kept.get("label"), group=kept.get("group"))
        threshold = rule.thresholds(replace(known, statistic=kept["calibration"])[calibration])
        own = known[test]
        inside = task.inside(kept["summary"][test], rule, for_queries(threshold, own.group))
        size, covered = task.sizes(inside), own.statistic <= of_truth(threshold, own.label, own.group)
        full = task.candidates is not None and bool((size == task.candidates).all())
        return Seen(test, size, covered, full or bool(torch.isposinf(threshold).all()), own.label, own.group)


class Curves(Runner):
    """Several things to cover per point: what each loses, misses and keeps at every threshold of the grid."""

    def found(self, scored: Scored, task: Task) -> dict[str, Tensor]:
        rule = self.rule
        prepared, items = scored.scores(task, rule.reading)
        losses, missed = rule.losses(items.first(rule.calibration_draws)), self._missed(items, rule, scored.v)
        size = task.sizes_on_grid(task.summary(prepared, rule, scored.v), rule).float()
        return {"calibration": losses, "missed": missed, "size": size}

    def _missed(self, items: Items | Tally, rule: Rule, v: Tensor) -> Tensor:
        """The share that every point misses with the draws of a query."""
        if not isinstance(items, Items):
            return rule.losses(items).float()
        statistic = rule.test_statistic(items.draws.first(rule.test_draws), v[items.weights[1]])
        return replace(items, draws=Draws(statistic[:, None])).losses((0.0, 1.0)).float()

    def judged(self, calibration: Tensor, test: Tensor) -> Seen:
        kept, rule, grid = self.kept, self.rule, self.task.thresholds
        losses = kept["calibration"]
        sample = Sample(losses, torch.ones(len(losses), dtype=torch.int64), grid, group=kept.get("group"))
        threshold, own = rule.thresholds(sample[calibration]), sample[test]
        at = torch.searchsorted(grid, for_queries(threshold, own.group).reshape(-1, 1)).expand(len(test), 1)
        size, missed = (kept[name][test].gather(1, at)[:, 0].double() for name in ("size", "missed"))
        return Seen(test, size, 1 - missed, bool(torch.isposinf(threshold).all()), None, own.group)
