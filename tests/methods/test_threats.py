"""The promise under every noise, where the attack is the worst there can be, and the mistakes that would break it.

A point is a number x; the score of its true label is x - logit(u), u uniform, so that it exceeds t with a probability q that x
decides. The worst attack lifts every such probability to up(q) at once: u becomes the smallest q with up(q) >= u. ``up`` is
stated here a second time, from the definition of each noise. Repetitions are independent: each check is exactly binomial with
a false-alarm rate of 5e-8.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy import ndarray
from scipy import stats
from scipy.optimize import linprog
from torch import Tensor

from keepcover.bounds import Counts, hull_level
from keepcover.errors import InputError
from keepcover.methods import METHODS, AllBands, Asked, Exact, Rule, get_method
from keepcover.methods.bands import BandsRule, outside
from keepcover.noise import Ablation, Bands, Gaussian, Laplace, Noise, RandomBands, Threat, Uniform
from keepcover.noise.norms import Shape
from keepcover.promises import Promise, Sample
from keepcover.scores import Draws, Items
from tests.methods.worst import LAWS, Law, holdout_of, thresholds, two_points, violated

ALPHA, POINTS, REPETITIONS = 0.1, 120, 1000
IMAGE = (3, 32, 32)


def kept_share(total: int, keep: int, changed: int) -> float:
    """How likely a subset of ``keep`` of ``total`` meets the ``changed`` ones: one position after the other."""
    missed = 1.0
    for i in range(changed):
        missed *= (total - keep - i) / (total - i)
    return 1 - missed


def half_line(law: Any, epsilon: float) -> Callable[[ndarray], ndarray]:
    return lambda q: law.sf(law.isf(q) - epsilon)


def raised(mass: float) -> Callable[[ndarray], ndarray]:
    return lambda q: np.minimum(q + mass, 1.0)


WORST: dict[str, tuple[Threat, Callable[[ndarray], ndarray]]] = {
    "gaussian-linf": (
        Threat(Gaussian(0.25), 1 / 255, "linf", IMAGE),
        half_line(stats.norm(scale=0.25), math.sqrt(3 * 32 * 32) / 255),
    ),
    "gaussian-l1": (Threat(Gaussian(0.25), 0.125, "l1"), half_line(stats.norm(scale=0.25), 0.125)),
    "laplace": (Threat(Laplace(0.5), 0.25), half_line(stats.laplace(scale=0.5), 0.25)),
    "uniform": (Threat(Uniform(0.5), 0.06), raised(0.06)),
    "ablation": (Threat(Ablation(75), 3, "l0", IMAGE), raised(kept_share(1024, 75, 3))),
    "tokens": (Threat(Ablation(4), 1, "l0", (20,)), raised(kept_share(20, 4, 1))),
    "bands": (Threat(RandomBands(4), 5, "patch", IMAGE), raised(8 / 32)),
}
RULES: dict[str, tuple[str, int, int | None]] = {
    "exact": ("exact", 16, None),
    "exact_asymmetric": ("exact_asymmetric", 8, 16),
    "auto": ("auto", 4, 16),
    "rcp1": ("rcp1", 1, 1),
    "bincp": ("bincp", 64, None),
}


def scores(x: Tensor, u: Tensor) -> Tensor:
    return x - u.clamp(1e-300, 1 - 1e-16).logit()


def attacked(u: Tensor, up: Callable[[ndarray], ndarray]) -> Tensor:
    """The smallest q of a fine grid with up(q) >= u: what lies between two of its points goes to the attacker."""
    q = np.concatenate([[0.0], 1 / (1 + np.exp(-np.linspace(-40, 36, 40_001))), [1.0]])
    at = np.searchsorted(np.append(up(q[:-1]), 1.0), u.numpy())
    return torch.from_numpy(np.append(0.0, q)[at])  # at = 0 where u <= up(0): above everything


def draw(rule: Rule, values: Tensor) -> Draws:
    return rule.read(Items.single(Draws(values))).draws


def fit(name: str, threat: Threat, draws: int, per_point: int | None, law: Law, **more: Any) -> Rule:
    generator = torch.Generator().manual_seed(5)
    asked = Asked(ALPHA, threat, draws, POINTS, 2, per_point, **more)
    count = max(draws, asked.per_point)
    x = torch.stack([law((100,), generator), law((100,), generator) + 3], dim=1).double() * 3
    u = torch.rand(100, 2, count, generator=generator, dtype=torch.float64)
    held = holdout_of(scores(x[..., None], u), torch.zeros(100, dtype=torch.int64))
    return get_method(name).fit(asked, held)


def misses(rule: Rule, up: Callable[[ndarray], ndarray], law: Law, repetitions: int = REPETITIONS) -> int:
    """In how many repetitions the attacked query's label was left out."""
    generator = torch.Generator().manual_seed(0)
    n, cal, test = rule.asked.n, rule.calibration_draws, rule.test_draws
    x = 3 * law((repetitions, n, 1), generator).double()
    u = torch.rand(repetitions, n, cal, generator=generator, dtype=torch.float64)
    statistic = rule.statistic(draw(rule, scores(x, u).flatten(0, 1))).unflatten(0, (repetitions, n))
    u = attacked(torch.rand(repetitions, 1, test, generator=generator, dtype=torch.float64), up)
    query = 3 * law((repetitions, 1, 1), generator).double()
    v = torch.rand(repetitions, generator=generator)
    own = rule.test_statistic(draw(rule, scores(query, u)), v)[:, 0]
    return int((~(own.double() <= thresholds(rule, statistic))).sum())


@pytest.mark.parametrize("case", WORST)
@pytest.mark.parametrize("method", RULES)
def test_the_promise_holds_against_the_worst_attack(method: str, case: str) -> None:
    (threat, up), (name, draws, per_point) = WORST[case], RULES[method]
    for law in ("point", "mixture") if method == "exact" else ("mixture",):
        rule = fit(name, threat, draws, per_point, LAWS[law])
        found = misses(rule, up, LAWS[law], 300)
        assert not violated(found, 300, ALPHA), f"{found} of 300"


@pytest.mark.parametrize("case", ["ablation", "bands", "laplace", "gaussian-linf"])
def test_the_certificate_is_not_much_larger_than_the_attack_needs(case: str) -> None:
    """Somewhat more of the attack, and the promise of the exact rule breaks: it pays for what it is told and little else."""
    threat, _ = WORST[case]
    stronger = {
        "ablation": raised(kept_share(1024, 75, 5)),
        "bands": raised(12 / 32),
        "laplace": half_line(stats.laplace(scale=0.5), 0.7),
        "gaussian-linf": half_line(stats.norm(scale=0.25), 1.6 * math.sqrt(3 * 32 * 32) / 255),
    }[case]
    rule = fit("exact", threat, 16, None, LAWS["point"])
    assert violated(misses(rule, stronger, LAWS["point"]), REPETITIONS, ALPHA)


# -- mistakes ----------------------------------------------------------------------------------------------------------


class ForgetsTheRoot(Gaussian):
    """Linf as if it were L2."""

    def worst(self, q: ndarray, epsilon: float, norm: str, shape: Shape) -> Any:
        return super().worst(q, epsilon, "l2", shape)


class CountsChannels(Ablation):
    """Channels as pixels: three times as many, of which the same number is changed."""

    def worst(self, q: ndarray, epsilon: float, norm: str, shape: Shape) -> Any:
        return q + kept_share(math.prod(shape), self.keep, int(epsilon))


class ForgetsZero(Ablation):
    """What never happens on clean inputs never happens."""

    def worst(self, q: ndarray, epsilon: float, norm: str, shape: Shape) -> Any:
        return np.where(q < 0.02, q, super().worst(q, epsilon, norm, shape))


class CountsALongerText(Ablation):
    def worst(self, q: ndarray, epsilon: float, norm: str, shape: Shape) -> Any:
        return super().worst(q, epsilon, norm, (5 * shape[0],))


NEVER = two_points(-9.0, -9.0, 0.5)
MISTAKES: dict[str, tuple[Noise, str, Law]] = {
    "the root of d is dropped": (ForgetsTheRoot(0.25), "gaussian-linf", LAWS["point"]),
    "channels are pixels": (CountsChannels(75), "ablation", LAWS["point"]),
    "q = 0 is not raised": (ForgetsZero(75), "ablation", NEVER),
    "the count of a longer text": (CountsALongerText(4), "tokens", LAWS["point"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_up_are_caught(mistake: str) -> None:
    noise, case, law = MISTAKES[mistake]
    threat, up = WORST[case]
    draws = 1 if mistake.startswith("q = 0") else 16
    for one, caught in ((threat, False), (Threat(noise, threat.epsilon, threat.norm, threat.shape), True)):
        # With one draw only up(0) decides: honestly told, the rule keeps everything.
        rule = Exact().rule(Asked(ALPHA, one, 1, POINTS, 2, 1), c=0, kappa=0) if draws == 1 else None
        rule = rule or fit("exact", one, draws, None, law)
        assert violated(misses(rule, up, law), REPETITIONS, ALPHA) == caught


def test_masks_without_replacement_are_not_binomial() -> None:
    """Of 8 masks, 4 per point and query without replacement, an attack changes 2: the worst mixture of points, by a linear program
    over the exact hypergeometric laws, misses more than twice alpha at the level that binomial counts certify; with
    replacement it misses alpha.
    """
    masks, changed, draws = 8, 2, 4
    counts = Counts(Threat(RandomBands(1), changed, "patch", (1, 2, masks)), draws, draws)
    share = np.arange(masks + 1)
    after = np.minimum(share + changed, masks)
    worst = {"with": 0.0, "without": 0.0}
    for c, kappa in itertools.product(range(draws), range(draws)):
        level = hull_level(counts, c, kappa, ALPHA)
        if level == 0:
            continue
        laws = {
            "with": (stats.binom.sf(c, draws, share / masks), stats.binom.sf(kappa, draws, after / masks)),
            "without": (stats.hypergeom.sf(c, masks, share, draws), stats.hypergeom.sf(kappa, masks, after, draws)),
        }
        for kind, (f, h) in laws.items():
            found = linprog(-h, A_ub=[f], b_ub=[level], A_eq=[np.ones(masks + 1)], b_eq=[1.0])
            worst[kind] = max(worst[kind], -found.fun)
    assert worst["with"] <= ALPHA + 1e-9
    assert worst["without"] > 2 * ALPHA


# -- the patch rule ----------------------------------------------------------------------------------------------------

COLUMNS = 12


def bands_rule(epsilon: float = 3, width: int = 2, c: int = 1, n: int = 60, **more: Any) -> BandsRule:
    threat = Threat(Bands(width), epsilon, "patch", (1, 4, COLUMNS))
    return AllBands().rule(Asked(ALPHA, threat, COLUMNS, n, 2, COLUMNS, **more), c=c)


def test_outside_is_what_all_windows_say() -> None:
    generator = torch.Generator().manual_seed(0)
    for total, window, c in [(7, 2, 1), (8, 3, 0), (12, 4, 5), (5, 0, 2), (6, 5, 0), (2, 1, 0), (1, 0, 0)]:
        values = torch.randint(0, 6, (200, total), generator=generator).float()
        each = []
        for start in range(total):
            rest = [(start + window + i) % total for i in range(total - window)]
            each.append(values[:, rest].sort(dim=1, descending=True).values[:, c])
        assert torch.equal(outside(values, window, c, every=True), torch.stack(each).amax(dim=0))
        assert torch.equal(outside(values, window, c, every=False), torch.stack(each).amin(dim=0))


def worst_patch(rule: BandsRule, values: Tensor, threshold: float) -> Tensor:
    """Whether any window of scores, set to +inf, drives the label out."""
    lost = torch.zeros(len(values), dtype=torch.bool)
    for start in range(values.shape[1]):
        hit = values.clone()
        hit[:, [(start + i) % values.shape[1] for i in range(rule.window)]] = torch.inf
        lost |= rule.test_statistic(Draws(hit)) > threshold
    return lost


class TooNarrow(BandsRule):
    """Forgets that a patch is in bands that begin before it."""

    @property
    def window(self) -> int:
        return int(self.asked.threat.epsilon)


class CountsOnly(BandsRule):
    """At most c + a of all: valid, and larger sets."""

    def statistic(self, true: Draws) -> Tensor:
        return true.largest(self.c + 1)

    def test_statistic(self, draws: Draws, v: Tensor | None = None) -> Tensor:
        return draws.largest(self.c + self.window + 1)


def patched_misses(rule: BandsRule, window: int, repetitions: int = 1500) -> tuple[int, int]:
    """Misses of the true label under the worst patch, and how often a wrong label is kept."""
    generator, n = torch.Generator().manual_seed(3), rule.asked.n
    hard = torch.randn(repetitions, n + 1, 1, generator=generator)
    values = hard + 0.7 * torch.randn(repetitions, n + 1, COLUMNS, generator=generator)
    statistic = rule.statistic(Draws(values[:, 1:].flatten(0, 1))).unflatten(0, (repetitions, n))
    threshold = thresholds(rule, statistic)
    lost = torch.zeros(repetitions, dtype=torch.bool)
    for start in range(COLUMNS):
        hit = values[:, 0].clone()
        hit[:, [(start + i) % COLUMNS for i in range(window)]] = torch.inf
        lost |= rule.test_statistic(Draws(hit)) > threshold
    wrong = rule.test_statistic(Draws(values[:, 0] + 1.5)) <= threshold
    return int(lost.sum()), int(wrong.sum())


def test_the_patch_rule_keeps_its_promise_against_every_patch_at_once() -> None:
    rule = bands_rule()
    assert rule.window == 4
    lost, wrong = patched_misses(rule, 4)
    assert not violated(lost, 1500, ALPHA)
    counted, more = patched_misses(CountsOnly(AllBands(), rule.asked, c=1), 4)
    assert not violated(counted, 1500, ALPHA)
    assert wrong < more  # neighbours are worth knowing
    narrow, _ = patched_misses(TooNarrow(AllBands(), rule.asked, c=1), 4)
    assert violated(narrow, 1500, ALPHA)


def test_the_patch_rule_never_keeps_more_than_the_count() -> None:
    values = torch.randn(400, COLUMNS, generator=torch.Generator().manual_seed(1))
    rule = bands_rule()
    count = CountsOnly(AllBands(), rule.asked, c=1)
    assert (rule.statistic(Draws(values)) <= count.statistic(Draws(values))).all()
    assert (rule.test_statistic(Draws(values)) >= count.test_statistic(Draws(values))).all()


def test_bands_of_calibration_points_may_be_touched_too() -> None:
    """Under a promise that says so, as many more of a query's bands may exceed t."""

    class Tampered(Promise):
        def tampering(self, threat: Threat) -> Threat:
            return Threat(threat.noise, 1, threat.norm, threat.shape)

    rule = bands_rule(promise=Tampered())
    assert (rule.window, rule.tampered, rule.most) == (4, 2, COLUMNS - 7)
    values = torch.randn(500, COLUMNS, generator=torch.Generator().manual_seed(2))
    clean = rule.statistic(Draws(values))
    lowered = values.clone()
    lowered[:, 5:7] = -torch.inf  # what a patch on a calibration point can do: the quantile falls
    t = rule.statistic(Draws(lowered))
    assert (t < clean).any()
    for i in range(0, 500, 25):
        assert not worst_patch(rule, values[i : i + 1], float(t[i]))


def test_a_patch_in_every_band_leaves_full_sets() -> None:
    rule = bands_rule(epsilon=11, c=0)
    assert rule.most < 0
    assert rule.threshold_of(Sample(torch.zeros(60))) == math.inf


@pytest.mark.parametrize(
    ("options", "message"),
    [({"c": 8}, "0 <= c <= 7, got 8"), ({"epsilon": 1.5}, "whole number"), ({"width": 13}, "need images")],
)
def test_patch_rules_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        bands_rule(**options)


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.certified and name != "bands"])
def test_theorems_about_draws_refuse_what_is_not_random(name: str) -> None:
    assert "about random draws" in METHODS[name].unfit(Bands(2))
    assert not METHODS[name].unfit(RandomBands(2))
    assert "is random" in METHODS["bands"].unfit(RandomBands(2))


class Jumps(Gaussian):
    concave = False


@pytest.mark.parametrize("name", ["rcp1", "rscp_plus_hoeffding", "rscp", "exact", "bincp"])
def test_theorems_that_need_concavity_refuse_others(name: str) -> None:
    assert ("concave" in METHODS[name].unfit(Jumps(0.25))) == (name in ("rcp1", "rscp_plus_hoeffding", "rscp"))


@pytest.mark.parametrize("name", ["rscp_plus_hoeffding", "rscp_plus_bernstein"])
@pytest.mark.parametrize("case", ["laplace", "ablation"])
def test_means_keep_their_promise_where_up_is_concave(name: str, case: str) -> None:
    """Scores that are 0 or 1: the smoothed score is q itself, and the attack lifts it to up(q)."""
    threat, up = WORST[case]
    rule = get_method(name, transform=None, beta=0.02).rule(Asked(ALPHA, threat, 256, 60, 2, 256))
    generator, lost = torch.Generator().manual_seed(4), 0
    q = 0.3 * torch.rand(300, 61, generator=generator, dtype=torch.float64)
    u = torch.rand(300, 61, 256, generator=generator, dtype=torch.float64)
    clean = (u[:, 1:] < q[:, 1:, None]).float()
    hit = (u[:, :1] < torch.from_numpy(up(q[:, :1, None].numpy()))).float()
    for points, query in zip(clean, hit, strict=True):
        threshold = rule.threshold_of(Sample(rule.statistic(Draws(points, unit=True))))
        lost += bool(rule.test_statistic(Draws(query, unit=True))[0] > threshold)
    assert not violated(lost, 300, ALPHA)
