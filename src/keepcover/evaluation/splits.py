"""Methods over random calibration/test halves of precomputed noisy logits. No network runs here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keepcover.data.splits import Split, random_splits
from keepcover.errors import InputError
from keepcover.evaluation.observed import Observed
from keepcover.guarantee import Guarantee, warn_of_coverage
from keepcover.methods import METHODS, Setting, get_method
from keepcover.methods.exact import CountRule
from keepcover.methods.holdout import Holdout
from keepcover.scores.draws import Draws, in_pieces
from keepcover.scores.scores import Score, get_score
from keepcover.scores.transforms import PTT
from keepcover.tasks.metrics import Spread, check_labels


@dataclass(frozen=True)
class Row:
    """One method's line: sizes and coverages are means and standard deviations over splits.

    What every split saw, and the promise of the last one, are for pages; :meth:`to_dict` leaves them out.
    """

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
    guarantee: Guarantee | None = field(default=None, repr=False, compare=False)
    observed: Observed | None = field(default=None, repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        known = asdict(replace(self, guarantee=None, observed=None))
        return {key: value for key, value in known.items() if key not in ("guarantee", "observed")}


@dataclass(frozen=True)
class Request:
    """One method to run.

    Attributes:
        draws: model evaluations per query; all there are by default.
        calibration_draws: of calibration points; as many as per query by default, all there are for
            ``exact_asymmetric``, which lives on them.
        T: PTT's temperature.
    """

    method: str
    epsilon: float
    transform: str = "none"
    draws: int | None = None
    calibration_draws: int | None = None
    T: float = 1 / 400

    def setting(self, alpha: float, sigma: float, beta: float, available: int, classes: int, n: int) -> Setting:
        """What is asked of the method on logits with ``available`` draws and n calibration points."""
        draws = self.draws or available
        cal = self.calibration_draws or (available if self.method == "exact_asymmetric" else draws)
        return Setting(alpha, self.epsilon, sigma, draws, n, classes, cal, beta)


def requests_for(
    methods: Sequence[str],
    transforms: Sequence[str],
    epsilon: float,
    draws: int | None,
    calibration_draws: int | None,
    available: int,
) -> list[Request]:
    """Every method under every transform that can matter to it; see :func:`evaluate_methods`."""
    check_request(available, transforms, draws, calibration_draws)
    return [
        Request(name, epsilon, transform, draws, calibration_draws)
        for name in methods
        for transform in transforms
        if (transform == "none" or not get_method(name).compares_only or len(transforms) == 1)
        and ((draws or available) >= get_method(name).least_draws or len(methods) == 1)
    ]


def check_request(available: int, transforms: Sequence[str], *wanted: int | None) -> None:
    """Refuse transforms that do not exist and draws that are not there."""
    for transform in transforms:
        if transform not in ("none", "ptt"):
            raise InputError(f"expected transforms among none and ptt, got {transform!r}")
    for asked in wanted:
        if asked is not None and not 1 <= asked <= available:
            raise InputError(f"asked for {asked} draws, the file has {available}; ask for 1 to {available}")


def check_logits(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Noisy logits [n, N, K] and labels [n], or an error."""
    if logits.ndim != 3 or not logits.is_floating_point():
        raise InputError(f"expected float logits [images, draws, classes], got {logits.dtype} {tuple(logits.shape)}")
    if min(logits.shape) < 1 or logits.shape[2] < 2:
        raise InputError(f"expected at least 1 image, 1 draw and 2 classes, got shape {tuple(logits.shape)}")
    if not in_pieces(logits, lambda part: part.isfinite().all()[None]).all():
        bad = int((~logits.isfinite()).flatten(1).any(dim=1).nonzero()[0, 0])
        raise InputError(f"logits contain NaN or infinity, first at image {bad}; no guarantee survives a NaN")
    return logits, check_labels(labels, len(logits), logits.shape[2])


MANY = 256  # draws beyond which picking one order statistic is cheaper than sorting for a few

# -- scores, and what methods make of them -----------------------------------------------------------------------------

Kind = tuple[str, float]  # of scores: plain, order (for methods that only compare) or ptt, with its temperature


class Scored:
    """Noisy scores of some images, computed once per kind and shared by methods and splits.

    ``uniform`` holds two numbers per image: one for randomised scores, one for randomised boundaries. ``reference`` are
    the holdout scores that PTT ranks by, from :meth:`fit` or from elsewhere.
    """

    def __init__(
        self, logits: Tensor, labels: Tensor, score: Score, alpha: float, uniform: Float[Tensor, "2 n"]
    ) -> None:
        self.u, self.v = uniform.to(logits.device)
        self.logits, self.labels, self.score, self.alpha = logits, labels.to(logits.device), score, alpha
        self.reference: Tensor | None = None
        self._cache: dict[tuple[Kind, int], tuple[Draws, Draws]] = {}

    def _apply(self, function: Callable[[Tensor, Tensor], Tensor]) -> Draws:
        n, draws, classes = self.logits.shape
        out = torch.empty(n, classes, draws, device=self.logits.device)
        step = max(1, (2_000_000 if out.device.type == "cpu" else 100_000_000) // (draws * classes))
        for at in range(0, n, step):
            part = slice(at, at + step)
            out[part] = function(self.logits[part].float(), self.u[part, None]).transpose(1, 2)
        if not self.score.sound and out.isnan().any():
            raise InputError(f"score {self.score.name!r} returned NaN; a NaN has no rank, so it carries no guarantee")
        return Draws(out)

    def fit(self, holdout: Tensor) -> Tensor:
        """Take PTT's reference from these of the images, one draw each, and forget what another one transformed."""
        order = self.draws(("order", 0.0), self.logits.shape[1])[0]
        self.reference = order.values[holdout, self.labels[holdout], 0]
        self._cache = {key: value for key, value in self._cache.items() if key[0][0] != "ptt"}
        return self.reference

    def draws(self, kind: Kind, count: int) -> tuple[Draws, Draws]:
        """The first ``count`` draws of every label, and of the true label."""
        if (kind, count) not in self._cache:
            name, temperature = kind
            if count < self.logits.shape[1]:
                every = self.draws(kind, self.logits.shape[1])[0].first(count)
            elif name == "ptt":
                assert self.reference is not None
                ptt = PTT.fit(self.reference, self.alpha, temperature)
                every = Draws(ptt(self.draws(("order", 0.0), count)[0].values))
            elif name == "order":
                every = self._apply(self.score.order)
            elif type(self.score).order is Score.order:
                every = self.draws(("order", 0.0), count)[0]
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
    labels: Tensor


class Runner:
    """One method on one kind of scores: fitted on a holdout, then judged split by split on its statistics of all images."""

    statistics: Statistics

    def __init__(self, request: Request, score: str, setting: Callable[[int], Setting]) -> None:
        self.method, self.transform, self.score, self.setting = (
            get_method(request.method),
            request.transform,
            score,
            setting,
        )
        compares = self.method.compares_only
        self.kind: Kind = ("ptt", request.T) if self.transform == "ptt" else ("order" if compares else "plain", 0.0)
        self.observed: dict[str, Observed] = {}
        self.trivial: dict[str, int] = {}

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
            # Rules are chosen on the CPU, wherever the scores are.
            held = Holdout(Draws(every.values[holdout].cpu()), scored.labels[holdout].cpu())
        self.rule = self.method.fit(self.setting(len(self.calibration_points(split))), held)
        self.rule.guarantee()  # refuses impossible combinations before the work

    def measure(self, scored: Scored) -> Statistics:
        """The statistics of these images under the rule."""
        _, true = scored.draws(self.kind, self.rule.calibration_draws)
        every, _ = scored.draws(self.kind, self.rule.test_draws)
        if isinstance(self.rule, CountRule) and every.count <= MANY:
            _ = true.ascending, every.ascending  # sorted once, looked up for every rule
        test = self.rule.test_statistic(every, scored.v)
        own = test.gather(1, scored.labels[:, None])[:, 0]
        return Statistics(self.rule.calibration_statistic(true), test, own, scored.labels)

    def judge(self, split: Split, test: Tensor | None = None, attack: str = "none") -> None:
        """Calibrate on the split and look at its test points, or at other versions of them."""
        known, test = self.statistics, split.test if test is None else test
        threshold = self.rule.threshold(known.calibration[self.calibration_points(split)])
        mask = known.test[test] <= threshold
        covered = known.true[test] <= threshold
        self.observed.setdefault(attack, Observed()).add(mask, covered, known.labels[test])
        self.trivial[attack] = self.trivial.get(attack, 0) + bool(mask.all())

    def rows(self) -> list[Row]:
        """One row per attack, the clean one first."""
        rows, s = [], self.rule.setting
        promise = self.rule.guarantee(self.score, self.transform)
        for attack, seen in self.observed.items():
            rows.append(
                Row(
                    self.method.name,
                    self.score,
                    self.transform,
                    self.method.certified,
                    s.alpha,
                    s.epsilon,
                    s.sigma,
                    self.rule.test_draws,
                    self.rule.calibration_draws,
                    len(seen.sizes),
                    Spread.of(seen.sizes),
                    Spread.of(seen.coverages),
                    self.trivial[attack],
                    attack,
                    promise,
                    seen,
                )
            )
        return rows


def make_runners(
    requests: Sequence[Request], score: Score, *, alpha: float, sigma: float, beta: float, available: int, classes: int
) -> list[Runner]:
    """The methods to run on noisy logits with ``available`` draws."""
    warn_of_coverage(alpha)
    for request in requests:
        check_request(available, (request.transform,), request.draws, request.calibration_draws)

    def runner(request: Request) -> Runner:
        return Runner(request, score.name, lambda n: request.setting(alpha, sigma, beta, available, classes, n))

    return [runner(request) for request in requests]


# -- evaluation --------------------------------------------------------------------------------------------------------


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
    kind, uniform, where = get_score(score), uniforms(n, seed), torch.full((n,), -1)
    runners = make_runners(requests, kind, alpha=alpha, sigma=sigma, beta=beta, available=available, classes=classes)
    if attacked is not None:
        # Attacked versions stand behind the clean images, each with its image's label and uniforms.
        where[attacked.positions] = torch.arange(n, n + len(attacked.positions))
        more, _ = check_logits(attacked.logits, labels[attacked.positions])
        logits = torch.cat([logits, more.to(logits.device, logits.dtype)])
        labels = torch.cat([labels, labels[attacked.positions]])
        uniform = torch.cat([uniform, uniform[:, attacked.positions]], dim=1)
    scored = Scored(logits, labels, kind, alpha, uniform)
    for index, plain in enumerate(random_splits(n, splits, holdout, seed, redraw_holdout)):
        split, hit = plain.to(logits.device), where[plain.test]
        if (index == 0 or redraw_holdout) and any(run.transform == "ptt" for run in runners):
            scored.fit(split.holdout)
        for at, run in enumerate(runners):
            if index == 0 or (redraw_holdout and run.depends_on_holdout):
                run.fit(scored, split.holdout, split)
                run.statistics = run.measure(scored)
            run.judge(split)
            if attacked is not None:
                run.judge(split, hit[hit >= 0].to(logits.device), attacked.name)
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
    their sets. Methods that need more draws than asked for are left out.
    """
    logits, labels = check_logits(logits, labels)
    requests = requests_for(methods, transforms, epsilon, draws, calibration_draws, logits.shape[1])
    return [row for rows in evaluate_requests(logits, labels, requests, sigma=sigma, **options) for row in rows]
