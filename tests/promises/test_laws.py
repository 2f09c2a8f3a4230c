"""What each promise says, as an exact law: no simulation, so every assertion is deterministic.

Scores are x + noise: half-spaces, which an attack of epsilon moves as far as it can move anything. A population is a mixture of
points x. A threshold that is the k-th of n statistics lies where a share B ~ Beta(n + 1 - k, k) of fresh statistics is above it,
so expectations over calibration draws are integrals over B. Every law has a mutant that breaks it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy import ndarray
from scipy import special, stats
from torch import Tensor

from keepcover.bounds import bernstein, hoeffding_bentkus
from keepcover.errors import InputError
from keepcover.methods import METHODS, Asked, Exact, ExactAsymmetric, Rule, get_method
from keepcover.methods.exact import MajorantRule
from keepcover.noise import Gaussian, Threat
from keepcover.promises import Promise, Sample
from keepcover.scores import Draws

ALPHA, SIGMA, EPSILON = 0.1, 1.0, 0.5
THREAT = Threat(Gaussian(SIGMA), EPSILON)
patient = settings(deadline=None, derandomize=True, max_examples=40)
GRID = np.linspace(-4, 4, 41)
# Centres x and their shares: a point, a wide law, and two points of which one is never missed; "worst" shares the two as it hurts.
POPULATIONS = {
    "point": (np.zeros(1), np.ones(1)),
    "wide": (GRID, stats.norm.pdf(GRID) / stats.norm.pdf(GRID).sum()),
    "worst": (np.array([-30.0, 0.0]), None),
}


def asked(n: int, promise: Promise, draws: int = 4, per_point: int = 4) -> Asked:
    return Asked(ALPHA, THREAT, draws, n, 2, per_point, promise)


def hull(n: int, promise: Promise) -> Rule:
    return Exact().rule(asked(n, promise), kappa=1, c=0)


def one(n: int, promise: Promise) -> Rule:
    return METHODS["rcp1"].fit(asked(n, promise, 1, 1))


def plain(n: int, promise: Promise) -> Rule:
    return METHODS["cp"].fit(replace(asked(n, promise, 1, 1), threat=Threat(Gaussian(SIGMA), 0.0)))


RULES = {"exact": hull, "rcp1": one, "cp": plain}


def rank(rule: Rule, n: int) -> float:
    """Which order statistic the rule's threshold is, told by points that are their own ranks."""
    return rule.threshold_of(Sample(torch.arange(1.0, n + 1, dtype=torch.float64)))


T = np.linspace(9, -9, 4001)


def given_threshold(rule: Rule, population: str, moved: float = 0.0) -> tuple[ndarray, ndarray]:
    """For the thresholds T: the share of calibration statistics above them, and the attacked miss rate."""
    centres, shares = POPULATIONS[population]
    assert rule.counting is not None
    kappa, _ = rule.counting
    apart = (T[:, None] - centres) / SIGMA
    above = stats.binom.sf(getattr(rule, "c", 0), rule.calibration_draws, stats.norm.sf(apart + moved / SIGMA))
    missed = stats.binom.sf(kappa, rule.test_draws, stats.norm.sf(apart - rule.asked.threat.epsilon / SIGMA))
    if shares is None:  # the shares under which most is missed at the rule's own level
        level = float(getattr(rule, "level", ALPHA))
        p = np.linspace(0.1, 1, 181)
        lost = [np.interp(level, share * above[:, 1], share * missed[:, 1]) for share in p]
        shares = np.array([1 - p[np.argmax(lost)], p[np.argmax(lost)]])
    return above @ shares, missed @ shares


def law(rule: Rule, k: float, n: int, population: str, moved: float = 0.0) -> tuple[float, float]:
    """The attacked miss rate on average over calibration draws, and how often it exceeds alpha, for the k-th of n."""
    if k > n:
        return 0.0, 0.0
    clean, missed = given_threshold(rule, population, moved)
    share = stats.beta(n + 1 - k, k).ppf((np.arange(4000) + 0.5) / 4000)
    worst = clean[np.searchsorted(missed, ALPHA)]  # the share above where the miss rate reaches alpha
    return float(np.interp(share, clean, missed).mean()), float(stats.beta(n + 1 - k, k).sf(worst))


# -- with confidence -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [60, 300, 4750])
@pytest.mark.parametrize("delta", [0.3, 0.05, 0.001])
@pytest.mark.parametrize("level", [Fraction(1, 10), Fraction(1, 25)])
def test_the_rank_of_a_confidence_is_the_smallest_that_the_beta_law_allows(
    n: int, delta: float, level: Fraction
) -> None:
    promise = Promise(delta=delta)
    k, marginal = promise.rank(n, level), Promise().rank(n, level)
    allowed = [stats.beta(n + 1 - j, j).sf(float(level)) if j <= n else 0.0 for j in (k - 1, k)]
    assert allowed[1] <= delta
    assert allowed[0] > delta or k == marginal
    if k > marginal and marginal <= n:
        assert stats.beta(n + 1 - marginal, marginal).sf(float(level)) > delta  # the mutant: the marginal rank


@patient
@given(st.integers(1, 200), st.sampled_from([0.3, 0.05]), st.integers(20, 300))
def test_a_confidence_needs_as_many_points_as_their_maximum_must_reach(n: int, delta: float, thousandths: int) -> None:
    """The largest of n has rank n: (1 - level)^n is at most delta from some n on, and below no threshold is finite."""
    level = Fraction(thousandths, 1000)
    promise = Promise(delta=delta)
    finite = (1 - float(level)) ** n <= delta and Promise().rank(n, level) <= n
    assert (promise.rank(n, level) <= n) == finite
    assert (promise.points_needed(level) <= n) == finite


@pytest.mark.parametrize("population", POPULATIONS)
@pytest.mark.parametrize("name", RULES)
def test_with_confidence_few_calibration_draws_miss_more_than_alpha(name: str, population: str) -> None:
    n, delta = 300, 0.05
    rule = RULES[name](n, Promise(delta=delta))
    mean, exceeded = law(rule, rank(rule, n), n, population)
    assert exceeded <= delta
    assert mean <= ALPHA
    marginal = RULES[name](n, Promise())
    if (
        name == "cp" or population == "worst" or (name, population) == ("rcp1", "point")
    ):  # the worst cases: close to delta
        assert exceeded > delta / 3
        assert law(marginal, rank(marginal, n), n, population)[1] > 5 * delta  # the mutant: the marginal rank


def sum_at_most(values: ndarray, weights: ndarray, n: int, most: float, step: float = 4e-3) -> float:
    """P[the sum of n independent values is at most ``most``], from above: values are rounded down to a grid."""
    cells = np.floor(values / step).astype(int)
    one_point = np.bincount(cells, weights=weights)
    spectrum = np.fft.rfft(one_point, 1 << int(n * cells.max() + 1).bit_length())
    total = np.fft.irfft(spectrum**n, 1 << int(n * cells.max() + 1).bit_length())
    return float(total[: int(most / step) + 1].sum())


def test_risk_control_with_confidence_spends_too_much_in_few_calibration_draws() -> None:
    """t is too small iff the losses at the t where the attacked miss rate is alpha fit into the budget."""
    n, delta, draws = 400, 0.05, 8
    for promise, kept in ((Promise(delta=delta), True), (Promise(), False)):  # the second is the mutant
        rule = ExactAsymmetric().fit(asked(n, promise, 2, draws), holdout())
        exceeded = []
        for p in np.linspace(0.1, 1, 10):  # so many points at 0, the others never missed
            q = stats.norm.sf(T / SIGMA)
            missed = p * stats.binom.sf(rule.kappa, 2, stats.norm.sf((T - EPSILON) / SIGMA))
            counts = p * stats.binom.pmf(np.arange(draws + 1), draws, q[np.searchsorted(missed, ALPHA)])
            counts[0] += 1 - p
            exceeded.append(sum_at_most(np.array(rule.g), counts, n, rule._budget(n)))
        assert (max(exceeded) <= delta) == kept


def holdout() -> Any:
    from keepcover.methods import Holdout
    from keepcover.tasks import Classification

    generator = torch.Generator().manual_seed(0)
    x = torch.where(torch.rand(400, generator=generator) < 0.15, 1.2, -1.5)[:, None]
    true = x + torch.randn(400, 8, generator=generator)
    outputs = torch.stack([true, torch.full_like(true, 3.0)], dim=2)
    return Holdout(Classification(lambda s: s).seen(outputs), outputs, torch.zeros(400, dtype=torch.int64))


@patient
@given(st.integers(0, 2**31), st.sampled_from([0.05, 0.2]))
def test_risk_control_with_confidence_takes_a_t_beyond_which_every_t_fits(seed: int, delta: float) -> None:
    """t = inf{t : UCB(t') <= alpha for all t' >= t}, by brute force over every t' that matters."""
    rule, scores = majorant(80, Promise(delta=delta)), noisy(seed, 80)
    g, top = np.array(rule.g), rule.g[-1]
    steps = np.unique(scores.numpy())
    mean = np.array([g[(scores.numpy() > t).sum(axis=1)].mean() for t in steps]) / top
    bound = np.array([special.bdtr(math.ceil(80 * m + 1e-9), 80, ALPHA / top) * math.e for m in mean])
    kl = special.rel_entr(mean, ALPHA / top) + special.rel_entr(1 - mean, 1 - ALPHA / top)
    fits = np.where(mean < ALPHA / top, np.minimum(bound, np.exp(-80 * kl)), 1.0) <= delta
    last = np.flatnonzero(~fits)
    expected = math.inf if len(last) == len(steps) or (~fits)[-1] else steps[0 if not len(last) else last[-1] + 1]
    own = rule.threshold_of(rule_sample(rule, scores))
    assert own == expected or (own == -math.inf and fits.all())


def test_a_bound_that_is_not_monotone_must_fit_everywhere_beyond_t() -> None:
    """The mutant: with an empirical Bernstein bound the smallest t that fits is not one beyond which every t fits, because a few
    smaller losses raise the variance more than they lower the mean. The library's bound grows with the sum alone."""
    n, delta, loss = 200, 0.1, 0.06
    losses = np.full((3, n), loss)  # at three growing t
    losses[1, :2], losses[2, : n // 2] = 0.0, 0.0
    bound = losses.mean(axis=1) + bernstein(losses.var(axis=1, ddof=1), n, delta)
    assert (bound <= bound[0]).tolist() == [True, False, True]
    sums = [hoeffding_bentkus(float(mean), n, 0.1) for mean in losses.mean(axis=1)]
    assert sums == sorted(sums, reverse=True)
    assert (np.diff([hoeffding_bentkus(share, n, 0.1) for share in np.linspace(0, 1, 200)]) >= 0).all()


# -- despite poisoned points ---------------------------------------------------------------------------------------------


def majorant(n: int, promise: Promise) -> MajorantRule:
    g = (0.0001, 0.02, 0.3, 0.9, 1.4)
    return MajorantRule(ExactAsymmetric(), asked(n, promise, 2, 4), kappa=0, gamma=0.0, g=g)


def rule_sample(rule: Rule, scores: Tensor, **known: Any) -> Sample:
    return Sample(rule.statistic(Draws(scores)), **known)


def noisy(seed: int, n: int, draws: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 1, generator=generator) + 2.0 * (torch.rand(n, 1, generator=generator) < 0.05)
    return (0.7 * x - 1 + torch.randn(n, draws, generator=generator)).double()


BUILT: dict[str, Callable[[int, Promise], Rule]] = {**RULES, "exact_asymmetric": majorant}


def poison(scores: Tensor, m: int, how: str) -> Tensor:
    """m points replaced, added or removed where it hurts most: the highest leave, what comes in is never missed."""
    order = scores.sort(dim=1).values.amax(dim=1).argsort(descending=True)  # whose largest draws are largest
    never = torch.full((m, scores.shape[1]), -1e9, dtype=scores.dtype)
    kept = scores if how == "added" else scores[order[m:]]
    return kept if how == "removed" else torch.cat([kept, never])


@pytest.mark.parametrize("name", BUILT)
@pytest.mark.parametrize("how", ["replaced", "added", "removed"])
@patient
@given(st.integers(0, 2**31), st.integers(1, 6), st.sampled_from([None, 0.1]))
def test_no_m_points_lower_the_threshold_of_a_promise_that_allows_for_them(
    name: str, how: str, seed: int, m: int, delta: float | None
) -> None:
    """Whatever is done to m points, t is at least what the untouched points give without them being allowed for."""
    n = 150
    scores = noisy(seed, n, 4 if name in ("exact", "exact_asymmetric") else 1)
    touched = poison(scores, m, how)
    clean = BUILT[name](n, Promise(delta=delta))
    own = BUILT[name](len(touched), Promise(delta=delta, poisoned=m))
    assert own.threshold_of(rule_sample(own, touched)) >= clean.threshold_of(rule_sample(clean, scores))


@pytest.mark.parametrize("name", BUILT)
@pytest.mark.parametrize("allowed", [0, 3])
def test_a_promise_that_forgets_a_poisoned_point_is_caught(name: str, allowed: int) -> None:
    """The mutants: forget the m, or allow for one fewer than were replaced."""
    n, m, broken = 150, 4, 0
    for seed in range(12):
        scores = noisy(seed, n, 4 if name in ("exact", "exact_asymmetric") else 1)
        clean, own = BUILT[name](n, Promise()), BUILT[name](n, Promise(poisoned=allowed))
        hit = poison(scores, m, "replaced")
        if name == "exact_asymmetric":  # the hardest place for the majorant: what is lost was all of g
            t = clean.threshold_of(rule_sample(clean, scores))
            worst = (scores > t).sum(dim=1).argsort(descending=True)[:m]
            scores[worst] = 50.0
            hit = scores.clone()
            hit[worst] = -1e9
        broken += own.threshold_of(rule_sample(own, hit)) < clean.threshold_of(rule_sample(clean, scores))
    assert broken > 6


def test_every_class_pays_for_all_poisoned_points() -> None:
    """Flipped labels take a point out of one class and put it into another: neither threshold may fall."""
    scores, label = noisy(3, 200, 1)[:, 0], torch.arange(200) % 2
    clean = one(200, Promise(per="class")).thresholds(Sample(scores, label=label))
    high = [int(scores.where(label == k, torch.tensor(-9.0)).argmax()) for k in (0, 1)]
    flipped, m = label.clone(), 2
    flipped[high] = 1 - label[high]
    rule = one(200, Promise(per="class", poisoned=m))
    assert (rule.thresholds(Sample(scores, label=flipped)) >= clean).all()
    lowered = one(200, Promise(per="class")).thresholds(Sample(scores[label == 0], label=label[label == 0]))
    assert lowered[1] == math.inf  # a class without points is in every set


# -- despite moved inputs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("population", POPULATIONS)
@pytest.mark.parametrize("name", ["exact", "rcp1"])
def test_moved_calibration_inputs_do_not_break_a_promise_that_allows_for_them(name: str, population: str) -> None:
    n, moved = 400, 0.3
    rule = RULES[name](n, Promise(calibration_epsilon=moved))
    mean, _ = law(rule, rank(rule, n), n, population, moved)
    assert mean <= ALPHA
    forgetful = RULES[name](n, Promise())  # the mutant: f(q) where f(down(q)) is meant
    if population == "worst":
        assert law(forgetful, rank(forgetful, n), n, population, moved)[0] > ALPHA
    confident = RULES[name](n, Promise(calibration_epsilon=moved, delta=0.05))
    assert law(confident, rank(confident, n), n, population, moved)[1] <= 0.05


def test_a_majorant_allows_for_moved_inputs() -> None:
    """E g(Bin(N, down(q))) >= h(q) for every q, with binomial laws of scipy's own."""
    q = np.concatenate([[0.0], np.geomspace(1e-9, 0.5, 400), 1 - np.geomspace(0.5, 1e-9, 400), [1.0]])
    attacked = stats.norm.cdf(stats.norm.ppf(q) + EPSILON / SIGMA)
    down = stats.norm.cdf(stats.norm.ppf(q) - 0.3 / SIGMA)
    for promise, enough in ((Promise(calibration_epsilon=0.3), True), (Promise(), False)):  # the second is the mutant
        rule = ExactAsymmetric().fit(asked(400, promise, 2, 8), holdout())
        expected = stats.binom.pmf(np.arange(9), 8, down[:, None]) @ np.array(rule.g)
        assert (expected >= stats.binom.sf(rule.kappa, 2, attacked) - 1e-9).all() == enough


def test_rscp_plus_undoes_the_move_of_calibration_inputs() -> None:
    """The clean mean is at most up_c of the moved one, so the threshold is up(up_c(tau + b))."""
    statistic = torch.linspace(0.01, 0.3, 300, dtype=torch.float64)
    method = get_method("rscp_plus_hoeffding", transform=None)
    rules = [method.fit(asked(300, promise, 64, 64)) for promise in (Promise(), Promise(calibration_epsilon=0.3))]
    plainly, moved = (float(stats.norm.ppf(rule.threshold_of(Sample(statistic)))) for rule in rules)
    assert moved == pytest.approx(plainly + 0.3, abs=1e-6)


# -- despite drift and label shift ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
def test_a_drifted_population_is_covered_by_a_promise_that_allows_for_it(name: str) -> None:
    """A share rho of the population turns into points that are always missed: total variation rho."""
    n, rho = 2000, 0.03
    for promise, kept in ((Promise(drift=rho), True), (Promise(), False)):  # the second is the mutant
        rule = RULES[name](n, promise)
        mean = max(law(rule, rank(rule, n), n, population)[0] for population in POPULATIONS)
        assert ((1 - rho) * mean + rho <= ALPHA) == kept
        assert not kept or (1 - rho) * mean + rho > 0.8 * ALPHA


MISS = np.array([0.05, 0.35])  # P[the score is 1, not 0 | class]
SHARES, SHIFTED = np.array([0.8, 0.2]), np.array([0.3, 0.7])
WEIGHTS = tuple((SHIFTED / SHARES).tolist())


def compositions(n: int, miss: ndarray) -> tuple[ndarray, ndarray]:
    """Every way to divide n calibration points into class and score, ``[m, 2, 2]``, and its probability."""
    three = np.array([c for c in product(range(n + 1), repeat=3) if sum(c) <= n])
    counts = np.column_stack([three, n - three.sum(axis=1)])
    cells = (SHARES[:, None] * np.stack([1 - miss, miss], axis=1)).ravel()
    log = special.gammaln(n + 1) - special.gammaln(counts + 1).sum(axis=1) + counts @ np.log(cells)
    return counts.reshape(-1, 2, 2), np.exp(log)


@pytest.mark.parametrize("name", ["cp", "exact_asymmetric"])
def test_a_label_shift_with_known_weights_is_covered(name: str) -> None:
    """P[miss] under the shifted shares, exactly, over all calibration sets of scores 0 and 1."""
    n, alpha = 19, 0.2
    counts, chance = compositions(n, MISS)

    def missed(promise: Promise) -> float:
        ask = Asked(alpha, Threat(Gaussian(SIGMA), 0.0), 1, n, 2, 1, promise)
        rule = METHODS["cp"].fit(ask) if name == "cp" else ExactAsymmetric().rule(ask, kappa=0, g=(0.0, 1.0))
        total = 0.0
        for here, weight in zip(counts, chance, strict=True):
            if weight > 1e-6:  # the others together cannot matter
                where = torch.arange(4).repeat_interleave(torch.tensor(here.ravel()))
                score = (where % 2).double() if name == "cp" else (where % 2).double()[:, None]
                t = rule.thresholds(Sample(score, label=where // 2)).expand(2).numpy()
                total += weight * float(MISS @ (SHIFTED * (t < 1)))
        return total

    assert 0.01 < missed(Promise(label_weights=WEIGHTS)) <= alpha
    assert missed(Promise()) > alpha  # the mutant: as if nothing had shifted


def test_a_rank_m_higher_does_not_make_up_for_poisoned_points_under_weights() -> None:
    """Why label_weights refuse poisoned: m points of the heavy class turn from missed to covered, and m more points, of the light
    class, are asked for."""
    n, m, alpha, miss = 60, 6, 0.3, np.array([0.05, 0.5])
    counts, chance = compositions(n, miss)
    for poisoned in (0, m):
        turned = np.minimum(counts[:, 1, 1], poisoned)
        below = counts[:, :, 0] @ np.array(WEIGHTS) + turned * WEIGHTS[1] - poisoned * WEIGHTS[0]
        total = counts.sum(axis=2) @ np.array(WEIGHTS)
        low = below[:, None] >= (1 - alpha) * (total[:, None] + np.array(WEIGHTS))  # the threshold of each label is 0
        assert (chance @ low @ (SHIFTED * miss) > alpha) == (poisoned > 0)
    for other in ({"poisoned": 1}, {"delta": 0.1}):
        with pytest.raises(InputError, match="do not hold together"):
            Promise(label_weights=WEIGHTS, **other)


# -- for everyone --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BUILT)
def test_a_threshold_per_class_or_group_comes_from_its_own_points(name: str) -> None:
    """Exactly what the points of the class give alone; mixed up classes, the mutant, give something else."""
    draws = 4 if name in ("exact", "exact_asymmetric") else 1
    scores, label = noisy(5, 240, draws), torch.arange(240) % 2
    scores[label == 1] += 1.0
    rule = BUILT[name](240, Promise())
    alone = [rule.threshold_of(rule_sample(rule, scores[label == k])) for k in (0, 1)]
    per_class = BUILT[name](240, Promise(per="class"))
    assert per_class.thresholds(rule_sample(per_class, scores, label=label)).tolist() == alone
    assert alone[0] != alone[1]
    grouped = BUILT[name](240, Promise(per=["north", "south"] * 120))
    assert grouped.thresholds(rule_sample(grouped, scores, group=label))[:, 0].tolist() == alone
    pooled = BUILT[name](240, Promise(per="class", clusters=(0, 0)))
    everything = rule.threshold_of(rule_sample(rule, scores))
    assert pooled.thresholds(rule_sample(pooled, scores, label=label)).tolist() == [everything] * 2


@pytest.mark.parametrize("population", POPULATIONS)
def test_every_class_is_covered_under_attack(population: str) -> None:
    """Class by class the same law as for all points, at its own number of points; the marginal rule leaves a class out."""
    for n in (25, 60, 300):
        rule = hull(10 * n, Promise(per="class"))
        assert law(rule, rank(rule, n), n, population)[0] <= ALPHA
    marginal = one(300, Promise())
    t = stats.norm.isf(marginal.level / 0.4)  # type: ignore[attr-defined]  # 40 % of the points are at 0, the others never missed
    assert stats.norm.sf(t - EPSILON) > 2 * ALPHA
