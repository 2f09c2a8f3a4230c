"""Methods over random calibration/test halves of precomputed noisy logits. No network runs here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from holdfast.draws import Draws
from holdfast.errors import InputError
from holdfast.methods import METHODS, Method, Setting, get_method
from holdfast.methods.exact import CountRule
from holdfast.metrics import Spread, check_labels
from holdfast.scores import Score, get_score
from holdfast.transforms import PTT
from holdfast.tuning import Holdout


@dataclass(frozen=True)
class Row:
    """One method's line: sizes and coverages are means and standard deviations over splits."""

    method: str
    score: str
    transform: str
    certified: bool
    alpha: float
    epsilon: float
    sigma: float
    draws: int
    calibration_draws: int
    splits: int
    size: Spread
    coverage: Spread
    trivial_splits: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Split:
    """Disjoint index sets. ``more`` is what methods that never look at the holdout calibrate on."""

    holdout: Tensor
    calibration: Tensor
    test: Tensor

    @property
    def more(self) -> Tensor:
        return torch.cat([self.calibration, self.holdout])


def random_splits(n: int, count: int, holdout: int, seed: int, redraw_holdout: bool = False) -> Iterator[Split]:
    """A holdout, fixed per seed unless redrawn, and random halves of the rest.

    Example:
        >>> split = next(random_splits(10_000, 1, holdout=500, seed=0))
        >>> len(split.holdout), len(split.calibration), len(split.test)
        (500, 4750, 4750)
    """
    if not 0 < holdout <= n - 2:
        raise InputError(f"expected a holdout of 1 to {n - 2} of the {n} points, got {holdout}")
    if count < 1:
        raise InputError(f"expected at least one split, got {count}")
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(n, generator=generator)
    held, rest = order[:holdout], order[holdout:]
    for _ in range(count):
        if redraw_holdout:
            order = torch.randperm(n, generator=generator)
            held, rest = order[:holdout], order[holdout:]
        mixed = rest[torch.randperm(len(rest), generator=generator)]
        yield Split(held, mixed[: len(rest) // 2], mixed[len(rest) // 2 :])


def check_logits(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Noisy logits [n, N, K] and labels [n], or an error."""
    if logits.ndim != 3 or not logits.is_floating_point():
        raise InputError(f"expected float logits [images, draws, classes], got {logits.dtype} {tuple(logits.shape)}")
    if min(logits.shape) < 1 or logits.shape[2] < 2:
        raise InputError(f"expected at least 1 image, 1 draw and 2 classes, got shape {tuple(logits.shape)}")
    if not logits.isfinite().all():
        bad = int((~logits.isfinite()).flatten(1).any(dim=1).nonzero()[0, 0])
        raise InputError(f"logits contain NaN or infinity, first at image {bad}; no guarantee survives a NaN")
    return logits, check_labels(labels, len(logits), logits.shape[2])


class Scored:
    """Noisy scores of some images, computed once per kind and shared by methods and splits.

    Kinds: ``plain`` scores, ``order`` (for methods that only compare) and ``ptt``, fitted on a holdout. ``uniform`` holds
    two numbers per image: one for randomised scores, one for randomised boundaries.
    """

    def __init__(
        self, logits: Tensor, labels: Tensor, score: Score, alpha: float, uniform: Float[Tensor, "2 n"]
    ) -> None:
        self.u, self.v = uniform.to(logits.device)
        self.logits, self.labels, self.score, self.alpha = logits, labels.to(logits.device), score, alpha
        self.ptt: PTT | None = None
        self._cache: dict[tuple[str, int], tuple[Draws, Draws]] = {}

    def _apply(self, function: Callable[[Tensor, Tensor], Tensor]) -> Draws:
        n, draws, classes = self.logits.shape
        out = torch.empty(n, classes, draws, device=self.logits.device)
        step = max(1, 2_000_000 // (draws * classes))
        for at in range(0, n, step):
            part = slice(at, at + step)
            out[part] = function(self.logits[part].float(), self.u[part, None]).transpose(1, 2)
        if out.isnan().any():
            raise InputError(f"score {self.score.name!r} returned NaN; a NaN has no rank, so it carries no guarantee")
        return Draws(out)

    def fit(self, holdout: Tensor) -> PTT:
        """Fit PTT on these of the images, one draw each, and forget what was transformed by another."""
        order = self.draws("order", self.logits.shape[1])[0]
        self.ptt = PTT.fit(order.values[holdout, self.labels[holdout], 0], self.alpha)
        self._cache = {key: value for key, value in self._cache.items() if key[0] != "ptt"}
        return self.ptt

    def draws(self, kind: str, count: int) -> tuple[Draws, Draws]:
        """The first ``count`` draws of every label, and of the true label."""
        if (kind, count) not in self._cache:
            if count < self.logits.shape[1]:
                every = self.draws(kind, self.logits.shape[1])[0].first(count)
            elif kind == "ptt":
                assert self.ptt is not None
                every = Draws(self.ptt(self.draws("order", count)[0].values))
            elif kind == "order":
                every = self._apply(self.score.order)
            elif type(self.score).order is Score.order:
                every = self.draws("order", count)[0]
            else:
                every = self._apply(self.score)
            self._cache[kind, count] = every, every.of_label(self.labels)
        return self._cache[kind, count]


def uniforms(n: int, seed: int) -> Float[Tensor, "2 n"]:
    """The numbers that randomise scores and boundaries: two per image, independent of its noise."""
    return torch.rand(2, n, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Statistics:
    """What a method keeps of images: of their true label at calibration, of every label and the true one at test."""

    calibration: Tensor
    test: Tensor
    true: Tensor


class Runner:
    """One method on one kind of scores: fitted on a holdout, then judged split by split on its statistics of all images."""

    statistics: Statistics

    def __init__(self, method: type[Method], transform: str, score: str, setting: Callable[[int], Setting]) -> None:
        self.method, self.transform, self.score, self.setting = method, transform, score, setting
        self.kind = "ptt" if transform == "ptt" else "order" if method.compares_only else "plain"
        self.results: list[tuple[float, float, bool]] = []

    @property
    def depends_on_holdout(self) -> bool:
        return self.method.uses_holdout or self.transform == "ptt"

    def calibration_points(self, split: Split) -> Tensor:
        return split.calibration if self.depends_on_holdout else split.more

    def fit(self, scored: Scored, holdout: Tensor, split: Split) -> None:
        """Choose the rule. ``holdout`` says which of the scored images are the holdout of the split."""
        held = None
        if self.method.uses_holdout:
            every, _ = scored.draws(self.kind, scored.logits.shape[1])
            held = Holdout(every[holdout], scored.labels[holdout])
        self.rule = self.method.fit(self.setting(len(self.calibration_points(split))), held)
        self.rule.guarantee()  # refuses impossible combinations before the work

    def measure(self, scored: Scored) -> Statistics:
        """The statistics of these images under the rule."""
        _, true = scored.draws(self.kind, self.rule.calibration_draws)
        every, _ = scored.draws(self.kind, self.rule.test_draws)
        if isinstance(self.rule, CountRule):
            _ = true.ascending, every.ascending  # sorted once, looked up for every rule
        test = self.rule.test_statistic(every, scored.v)
        return Statistics(
            self.rule.calibration_statistic(true), test, test.gather(1, scored.labels[:, None])[:, 0]
        )  # fmt: skip

    def judge(self, split: Split) -> None:
        known = self.statistics
        threshold = self.rule.threshold(known.calibration[self.calibration_points(split)])
        mask = known.test[split.test] <= threshold
        covered = known.true[split.test] <= threshold
        self.results.append((float(mask.sum() / len(mask)), float(covered.double().mean()), bool(mask.all())))

    def row(self) -> Row:
        sizes, coverages, trivial = zip(*self.results, strict=True)
        s = self.rule.setting
        return Row(
            self.method.name, self.score, self.transform, self.method.certified, s.alpha, s.epsilon, s.sigma,
            self.rule.test_draws, self.rule.calibration_draws, len(sizes), Spread.of(sizes), Spread.of(coverages), sum(trivial),
        )  # fmt: skip


def make_runners(
    methods: Sequence[str], transforms: Sequence[str], score: Score, *, alpha: float, epsilon: float, sigma: float, beta: float,
    draws: int | None, calibration_draws: int | None, available: int, classes: int,
) -> list[Runner]:  # fmt: skip
    """The methods to run on noisy logits with ``available`` draws; see :func:`evaluate_methods`."""
    draws = available if draws is None else draws
    for asked in (draws, draws if calibration_draws is None else calibration_draws):
        if not 1 <= asked <= available:
            raise InputError(f"asked for {asked} draws, the file has {available}; ask for 1 to {available}")
    for transform in transforms:
        if transform not in ("none", "ptt"):
            raise InputError(f"expected transforms among none and ptt, got {transform!r}")

    def runner(name: str, transform: str) -> Runner:
        cal = calibration_draws or (available if name == "exact_asymmetric" else draws)
        return Runner(
            get_method(name), transform, score.name, lambda n: Setting(alpha, epsilon, sigma, draws, n, classes, cal, beta)
        )  # fmt: skip

    return [
        runner(name, transform)
        for name in methods
        for transform in transforms
        if (transform == "none" or not get_method(name).compares_only or len(transforms) == 1)
        and (draws >= get_method(name).least_draws or len(methods) == 1)
    ]


def evaluate_methods(
    logits: Float[Tensor, "n draws k"],
    labels: Int[Tensor, " n"],
    *,
    sigma: float,
    epsilon: float,
    alpha: float = 0.1,
    beta: float = 0.001,
    score: str | Score = "hps",
    methods: Sequence[str] = tuple(METHODS),
    transforms: Sequence[str] = ("none", "ptt"),
    draws: int | None = None,
    calibration_draws: int | None = None,
    splits: int = 50,
    holdout: int = 500,
    redraw_holdout: bool = False,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> list[Row]:
    """Every method on the same splits of the same noisy logits.

    Methods that only compare scores run without PTT when both transforms are asked for: a monotone map cannot shrink
    their sets. Methods that need more draws than asked for are left out. ``exact_asymmetric`` calibrates on all draws there are unless ``calibration_draws`` says otherwise.
    """
    logits, labels = check_logits(logits, labels)
    n, available, classes = logits.shape
    kind = get_score(score)
    runners = make_runners(
        methods, transforms, kind, alpha=alpha, epsilon=epsilon, sigma=sigma, beta=beta, draws=draws,
        calibration_draws=calibration_draws, available=available, classes=classes,
    )  # fmt: skip
    scored = Scored(logits, labels, kind, alpha, uniforms(n, seed))
    for index, split in enumerate(random_splits(n, splits, holdout, seed, redraw_holdout)):
        if (index == 0 or redraw_holdout) and any(run.kind == "ptt" for run in runners):
            scored.fit(split.holdout)
        for at, run in enumerate(runners):
            if index == 0 or (redraw_holdout and run.depends_on_holdout):
                run.fit(scored, split.holdout, split)
                run.statistics = run.measure(scored)
            run.judge(split)
            if progress:
                progress(index * len(runners) + at + 1, splits * len(runners))
    return [run.row() for run in runners]
