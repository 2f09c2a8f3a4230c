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
from holdfast.methods import METHODS, Setting, get_method
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
    attack: str = "none"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Request:
    """One method to run: ``draws`` per query (all there are by default), other calibration draws, PTT's temperature."""

    method: str
    epsilon: float
    transform: str = "none"
    draws: int | None = None
    calibration_draws: int | None = None
    T: float = 1 / 400


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


Kind = tuple[str, float]  # of scores: plain, order (for methods that only compare) or ptt, with its temperature


class _Scored:
    """Noisy scores of every image, computed once per kind and shared by methods and splits; PTT is fitted on a holdout."""

    def __init__(self, logits: Tensor, labels: Tensor, score: Score, alpha: float, uniforms: Tensor) -> None:
        self.u, self.v = uniforms.to(logits.device)
        self.logits, self.labels, self.score, self.alpha = logits, labels.to(logits.device), score, alpha
        self._cache: dict[tuple[Kind, int], tuple[Draws, Draws]] = {}
        self._holdout: Tensor | None = None

    def _apply(self, function: Callable[[Tensor, Tensor], Tensor]) -> Draws:
        n, draws, classes = self.logits.shape
        out = torch.empty(n, classes, draws, device=self.logits.device)
        step = max(1, (2_000_000 if out.device.type == "cpu" else 100_000_000) // (draws * classes))
        for at in range(0, n, step):
            part = slice(at, at + step)
            out[part] = function(self.logits[part].float(), self.u[part, None]).transpose(1, 2)
        if out.isnan().any():
            raise InputError(f"score {self.score.name!r} returned NaN; a NaN has no rank, so it carries no guarantee")
        return Draws(out)

    def fit(self, holdout: Tensor) -> None:
        """Forget what was fitted on another holdout."""
        if self._holdout is not holdout:
            self._cache = {key: value for key, value in self._cache.items() if key[0][0] != "ptt"}
            self._holdout = holdout

    def draws(self, kind: Kind, count: int) -> tuple[Draws, Draws]:
        """The first ``count`` draws of every label, and of the true label."""
        if (kind, count) not in self._cache:
            name, temperature = kind
            if count < self.logits.shape[1]:
                every = self.draws(kind, self.logits.shape[1])[0].first(count)
            elif name == "ptt":
                order, held = self.draws(("order", 0.0), count)[0], self._holdout
                ptt = PTT.fit(order.values[held, self.labels[held], 0], self.alpha, temperature)
                every = Draws(ptt(order.values))
            elif name == "order":
                every = self._apply(self.score.order)
            elif type(self.score).order is Score.order:
                every = self.draws(("order", 0.0), count)[0]
            else:
                every = self._apply(self.score)
            self._cache[kind, count] = every, every.of_label(self.labels)
        return self._cache[kind, count]


class _Runner:
    """One method on one kind of scores: fitted, then judged split by split on statistics computed once for all images."""

    def __init__(self, request: Request, scored: _Scored, setting: Callable[[int], Setting]) -> None:
        self.method, self.transform = get_method(request.method), request.transform
        self.scored, self.setting = scored, setting
        compares = self.method.compares_only
        self.kind = ("ptt", request.T) if self.transform == "ptt" else ("order" if compares else "plain", 0.0)
        self.results: dict[str, list[tuple[float, float, bool]]] = {}

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
            held = Draws(every.values[split.holdout].cpu())
            holdout = Holdout(held, labels[split.holdout].cpu())
        self.rule = self.method.fit(self.setting(len(self.calibration_points(split))), holdout)
        self.rule.guarantee()  # refuses impossible combinations before the work
        _, true = self.scored.draws(self.kind, self.rule.calibration_draws)
        every, _ = self.scored.draws(self.kind, self.rule.test_draws)
        if isinstance(self.rule, CountRule):
            _ = true.ascending, every.ascending  # sorted once, looked up for every rule
        self.calibration_statistic = self.rule.calibration_statistic(true)
        self.test_statistic = self.rule.test_statistic(every, self.scored.v)
        self.true_statistic = self.test_statistic.gather(1, labels[:, None])[:, 0]

    def judge(self, split: Split, attack: str, test: Tensor) -> None:
        threshold = self.rule.threshold(self.calibration_statistic[self.calibration_points(split)])
        mask = self.test_statistic[test] <= threshold
        covered = self.true_statistic[test] <= threshold
        found = (float(mask.sum() / len(mask)), float(covered.double().mean()), bool(mask.all()))
        self.results.setdefault(attack, []).append(found)

    def rows(self) -> list[Row]:
        rows, s = [], self.rule.setting
        for attack, results in self.results.items():
            sizes, coverages, trivial = zip(*results, strict=True)
            rows.append(
                Row(
                    self.method.name, self.scored.score.name, self.transform, self.method.certified, s.alpha, s.epsilon, s.sigma,
                    self.rule.test_draws, self.rule.calibration_draws, len(sizes), Spread.of(sizes), Spread.of(coverages),
                    sum(trivial), attack,
                )
            )  # fmt: skip
        return rows


def _check_draws(available: int, *wanted: int | None) -> None:
    for asked in wanted:
        if asked is not None and not 1 <= asked <= available:
            raise InputError(f"asked for {asked} draws, the file has {available}; ask for 1 to {available}")


@dataclass(frozen=True)
class Attacked:
    """Noisy logits [m, N, K] of attacked versions of some images, the attack's name and the images' positions [m]."""

    name: str
    positions: Int[Tensor, " m"]
    logits: Float[Tensor, "m draws k"]


def evaluate_requests(
    logits: Float[Tensor, "n draws k"],
    labels: Int[Tensor, " n"],
    requests: Sequence[Request],
    *,
    sigma: float,
    alpha: float = 0.1,
    beta: float = 0.001,
    score: str | Score = "hps",
    splits: int = 50,
    holdout: int = 500,
    redraw_holdout: bool = False,
    attacked: Attacked | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> list[list[Row]]:
    """The rows of every request on the same splits of the same noisy logits: one for clean test points, and one for
    attacked ones where ``attacked`` holds some: calibration stays clean, and a split's test points are those it attacks.
    """
    logits, labels = check_logits(logits, labels)
    n, available, classes = logits.shape
    for request in requests:
        _check_draws(available, request.draws, request.calibration_draws)
        if request.transform not in ("none", "ptt"):
            raise InputError(f"expected transforms among none and ptt, got {request.transform!r}")
    uniforms = torch.rand(2, n, generator=torch.Generator().manual_seed(seed))
    where = torch.full((n,), -1)
    if attacked is not None:
        # Attacked versions stand behind the clean images, each with its image's label and uniforms.
        where[attacked.positions] = torch.arange(n, n + len(attacked.positions))
        more, _ = check_logits(attacked.logits, labels[attacked.positions])
        logits = torch.cat([logits, more.to(logits.device, logits.dtype)])
        labels = torch.cat([labels, labels[attacked.positions]])
        uniforms = torch.cat([uniforms, uniforms[:, attacked.positions]], dim=1)
    scored = _Scored(logits, labels, get_score(score), alpha, uniforms)

    def runner(request: Request) -> _Runner:
        draws, cal = request.draws or available, request.calibration_draws or request.draws or available
        return _Runner(request, scored, lambda n: Setting(alpha, request.epsilon, sigma, draws, n, classes, cal, beta))

    runners = [runner(request) for request in requests]
    for index, plain in enumerate(random_splits(n, splits, holdout, seed, redraw_holdout)):
        hit = where[plain.test]
        tests = {"none": plain.test} if attacked is None else {"none": plain.test, attacked.name: hit[hit >= 0]}
        split = plain.to(logits.device)
        if index == 0 or redraw_holdout:
            scored.fit(split.holdout)
        for at, run in enumerate(runners):
            if index == 0 or (redraw_holdout and run.depends_on_holdout):
                run.fit(split)
            for attack, test in tests.items():
                run.judge(split, attack, test.to(logits.device))
            if progress:
                progress(index * len(runners) + at + 1, splits * len(runners))
    return [run.rows() for run in runners]


def evaluate_methods(
    logits: Float[Tensor, "n draws k"],
    labels: Int[Tensor, " n"],
    *,
    sigma: float,
    epsilon: float,
    methods: Sequence[str] = tuple(METHODS),
    transforms: Sequence[str] = ("none", "ptt"),
    draws: int | None = None,
    calibration_draws: int | None = None,
    **options: Any,
) -> list[Row]:
    """Every method on the same splits of the same noisy logits; ``options`` are those of :func:`evaluate_requests`.

    Methods that only compare scores run without PTT when both transforms are asked for: a monotone map cannot shrink
    their sets. Methods that need more draws than asked for are left out. ``exact_asymmetric`` calibrates on all draws there are unless ``calibration_draws`` says otherwise.
    """
    logits, labels = check_logits(logits, labels)
    available = logits.shape[1]
    _check_draws(available, draws, calibration_draws)
    draws = draws or available
    requests = [
        Request(
            name, epsilon, transform, draws, calibration_draws or (available if name == "exact_asymmetric" else draws)
        )
        for name in methods
        for transform in transforms
        if (transform == "none" or not get_method(name).compares_only or len(transforms) == 1)
        and (draws >= get_method(name).least_draws or len(methods) == 1)
    ]
    return [row for rows in evaluate_requests(logits, labels, requests, sigma=sigma, **options) for row in rows]
