"""Methods over random calibration/test halves of precomputed noisy logits. No network runs here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from holdfast.datasets.splits import Split, random_splits
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


class _Scored:
    """Noisy scores of every image, computed once per kind and shared by methods and splits.

    Kinds: ``plain`` scores, ``order`` (for methods that only compare) and ``ptt``, fitted on the current holdout.
    """

    def __init__(self, logits: Tensor, labels: Tensor, score: Score, alpha: float, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.u, self.v = torch.rand(2, len(logits), generator=generator)
        self.logits, self.labels, self.score, self.alpha = logits, labels, score, alpha
        self._cache: dict[tuple[str, int], tuple[Draws, Draws]] = {}
        self._holdout: Tensor | None = None

    def _apply(self, function: Callable[[Tensor, Tensor], Tensor]) -> Draws:
        n, draws, classes = self.logits.shape
        out = torch.empty(n, classes, draws)
        step = max(1, 2_000_000 // (draws * classes))
        for at in range(0, n, step):
            part = slice(at, at + step)
            out[part] = function(self.logits[part].float(), self.u[part, None]).transpose(1, 2)
        if out.isnan().any():
            raise InputError(f"score {self.score.name!r} returned NaN; a NaN has no rank, so it carries no guarantee")
        return Draws(out)

    def fit(self, holdout: Tensor) -> None:
        """Forget what was fitted on another holdout."""
        if self._holdout is not holdout:
            self._cache = {key: value for key, value in self._cache.items() if key[0] != "ptt"}
            self._holdout = holdout

    def draws(self, kind: str, count: int) -> tuple[Draws, Draws]:
        """The first ``count`` draws of every label, and of the true label."""
        if (kind, count) not in self._cache:
            if count < self.logits.shape[1]:
                every = self.draws(kind, self.logits.shape[1])[0].first(count)
            elif kind == "ptt":
                order, held = self.draws("order", count)[0], self._holdout
                ptt = PTT.fit(order.values[held, self.labels[held], 0], self.alpha)
                every = Draws(ptt(order.values))
            elif kind == "order":
                every = self._apply(self.score.order)
            elif type(self.score).order is Score.order:
                every = self.draws("order", count)[0]
            else:
                every = self._apply(self.score)
            self._cache[kind, count] = every, every.of_label(self.labels)
        return self._cache[kind, count]


class _Runner:
    """One method on one kind of scores: fitted, then judged split by split on statistics computed once for all images."""

    def __init__(
        self, method: type[Method], transform: str, scored: _Scored, setting: Callable[[int], Setting]
    ) -> None:
        self.method, self.transform, self.scored, self.setting = method, transform, scored, setting
        self.kind = "ptt" if transform == "ptt" else "order" if method.compares_only else "plain"
        self.results: list[tuple[float, float, bool]] = []

    @property
    def depends_on_holdout(self) -> bool:
        return self.method.uses_holdout or self.transform == "ptt"

    def calibration_points(self, split: Split) -> Tensor:
        return split.calibration if self.depends_on_holdout else split.more

    def fit(self, split: Split) -> None:
        labels, available = self.scored.labels, self.scored.logits.shape[1]
        holdout = None
        if self.method.uses_holdout:
            every, _ = self.scored.draws(self.kind, available)
            holdout = Holdout(every[split.holdout], labels[split.holdout])
        self.rule = self.method.fit(self.setting(len(self.calibration_points(split))), holdout)
        self.rule.guarantee()  # refuses impossible combinations before the work
        _, true = self.scored.draws(self.kind, self.rule.calibration_draws)
        every, _ = self.scored.draws(self.kind, self.rule.test_draws)
        if isinstance(self.rule, CountRule):
            _ = true.ascending, every.ascending  # sorted once, looked up for every rule
        self.calibration_statistic = self.rule.calibration_statistic(true)
        self.test_statistic = self.rule.test_statistic(every, self.scored.v)
        self.true_statistic = self.test_statistic.gather(1, labels[:, None])[:, 0]

    def judge(self, split: Split) -> None:
        threshold = self.rule.threshold(self.calibration_statistic[self.calibration_points(split)])
        mask = self.test_statistic[split.test] <= threshold
        covered = self.true_statistic[split.test] <= threshold
        self.results.append((float(mask.sum() / len(mask)), float(covered.double().mean()), bool(mask.all())))

    def row(self) -> Row:
        sizes, coverages, trivial = zip(*self.results, strict=True)
        s = self.rule.setting
        return Row(
            self.method.name, self.scored.score.name, self.transform, self.method.certified, s.alpha, s.epsilon, s.sigma,
            self.rule.test_draws, self.rule.calibration_draws, len(sizes), Spread.of(sizes), Spread.of(coverages), sum(trivial),
        )  # fmt: skip


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
    draws = available if draws is None else draws
    for asked in (draws, draws if calibration_draws is None else calibration_draws):
        if not 1 <= asked <= available:
            raise InputError(f"asked for {asked} draws, the file has {available}; ask for 1 to {available}")
    kind = get_score(score)
    for transform in transforms:
        if transform not in ("none", "ptt"):
            raise InputError(f"expected transforms among none and ptt, got {transform!r}")
    scored = _Scored(logits, labels, kind, alpha, seed)

    def runner(name: str, transform: str) -> _Runner:
        cal = calibration_draws or (available if name == "exact_asymmetric" else draws)
        return _Runner(
            get_method(name), transform, scored, lambda n: Setting(alpha, epsilon, sigma, draws, n, classes, cal, beta)
        )

    runners = [
        runner(name, transform)
        for name in methods
        for transform in transforms
        if (transform == "none" or not get_method(name).compares_only or len(transforms) == 1)
        and (draws >= get_method(name).least_draws or len(methods) == 1)
    ]
    for index, split in enumerate(random_splits(n, splits, holdout, seed, redraw_holdout)):
        if index == 0 or redraw_holdout:
            scored.fit(split.holdout)
        for at, run in enumerate(runners):
            if index == 0 or (redraw_holdout and run.depends_on_holdout):
                run.fit(split)
            run.judge(split)
            if progress:
                progress(index * len(runners) + at + 1, splits * len(runners))
    return [run.row() for run in runners]
