"""Laws beyond the Gaussian half-space: label shift under attack, moved inputs under any noise, and what weights of zero do."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy import ndarray
from scipy import stats

from keepcover.errors import InputError
from keepcover.methods import METHODS, Asked, Exact, ExactAsymmetric, Holdout, Rule
from keepcover.methods.bands import AllBands, BandsRule
from keepcover.methods.exact import HullRule, MajorantRule
from keepcover.noise import Ablation, Bands, Gaussian, Laplace, Threat, Uniform
from keepcover.promises import Promise, Sample, for_queries, of_truth
from keepcover.scores import Draws
from keepcover.tasks import Classification

ALPHA = 0.1

# -- label shift, attacked -----------------------------------------------------------------------------------------------

SIGMA, EPSILON = 1.0, 0.5
CENTRES = torch.tensor([-1.0, 1.5])  # the second class is hard
SHARES, SHIFTED = np.array([0.9, 0.1]), np.array([0.4, 0.6])
WEIGHTS = tuple((SHIFTED / SHARES).tolist())


def attacked_miss(rule: Rule, t: ndarray) -> float:
    """Given the thresholds of both labels, how often an attacked query of the shifted population is missed, exactly."""
    assert rule.counting is not None
    q = stats.norm.sf((t - CENTRES.numpy() - EPSILON) / SIGMA)  # a half-space, moved as far as can be
    return float(SHIFTED @ stats.binom.sf(rule.counting[0], rule.test_draws, q))


def rules(name: str, n: int, promise: Promise) -> Rule:
    draws = 1 if name == "rcp1" else 4
    asked = Asked(ALPHA, Threat(Gaussian(SIGMA), EPSILON), draws, n, 2, draws, promise)
    if name == "rcp1":
        return METHODS["rcp1"].fit(asked)
    if name == "exact":
        return Exact().rule(asked, kappa=2, c=0)
    generator = torch.Generator().manual_seed(1)
    label = (torch.rand(400, generator=generator) < 0.1).long()
    true = CENTRES[label][:, None] + torch.randn(400, 4, generator=generator)
    outputs = torch.stack([true, torch.full_like(true, 5.0)], dim=2)
    held = Holdout(Classification(lambda s: s).seen(outputs), outputs, torch.zeros(400, dtype=torch.int64))
    return ExactAsymmetric().fit(asked, held)


@pytest.mark.parametrize("name", ["rcp1", "exact", "exact_asymmetric"])
def test_attacked_queries_of_a_shifted_population_are_covered(name: str) -> None:
    """400 calibration sets; given each the miss rate is exact. Five standard errors: below 1e-6."""
    n, trials, generator = 150, 400, torch.Generator().manual_seed(0)
    found = {}
    weighted, plain = rules(name, n, Promise(label_weights=WEIGHTS)), rules(name, n, Promise())
    for kind, rule in (("weighted", weighted), ("forgetful", plain)):
        missed = []
        for _ in range(trials):
            label = (torch.rand(n, generator=generator) < SHARES[1]).long()
            true = CENTRES[label][:, None] + SIGMA * torch.randn(n, rule.calibration_draws, generator=generator)
            t = rule.thresholds(Sample(rule.statistic(Draws(true)), label=label))
            missed.append(attacked_miss(rule, t.expand(2).numpy()))
        found[kind] = np.mean(missed), np.std(missed) / math.sqrt(trials)
    mean, error = found["weighted"]
    assert mean <= ALPHA + 5 * error
    mean, error = found["forgetful"]  # the mutant: as if nothing had shifted
    assert mean > ALPHA + 5 * error


@pytest.mark.parametrize("name", ["rcp1", "exact", "exact_asymmetric"])
def test_a_class_of_weight_zero_counts_for_nothing(name: str) -> None:
    """Its points change no threshold; were all weight on a class without points, that class is in every set."""
    rule = rules(name, 200, Promise(label_weights=(1.0, 0.0)))
    generator, label = torch.Generator().manual_seed(3), torch.arange(200) % 2
    true = torch.randn(200, rule.calibration_draws, generator=generator)
    t = rule.thresholds(Sample(rule.statistic(Draws(true)), label=label))
    true[label == 1] += 100.0
    again = rule.thresholds(Sample(rule.statistic(Draws(true)), label=label))
    assert torch.equal(t, again)
    own = replace(rule, asked=replace(rule.asked, n=100, promise=Promise()))
    assert float(t[0]) == own.threshold_of(Sample(own.statistic(Draws(true[label == 0]))))
    none = rules(name, 200, Promise(label_weights=(0.0, 1.0)))
    only = rule.statistic(Draws(true[label == 0]))
    assert none.thresholds(Sample(only, label=torch.zeros(100, dtype=torch.int64)))[1] == math.inf


@pytest.mark.parametrize("groups", [None, ("north", "south")])
@pytest.mark.parametrize("name", ["rcp1", "exact", "exact_asymmetric"])
def test_the_query_weighs_as_much_as_its_candidate_label(name: str, groups: Any) -> None:
    """Label by label the definition, with every t that matters tried: the candidate's own weight is lost with certainty."""
    n, weights = 60, np.array([0.25, 6.0])
    rule = rules(name, n, Promise(label_weights=tuple(weights), per=None if groups is None else {"groups": groups}))
    generator, group = torch.Generator().manual_seed(7), torch.arange(n) % 2
    label = (torch.rand(n, generator=generator) < 0.3).long()
    scores = CENTRES[label][:, None] + torch.randn(n, rule.calibration_draws, generator=generator)
    found = rule.thresholds(Sample(rule.statistic(Draws(scores)), label=label, group=group)).view(-1, 2)
    assert found[0, 0] != found[0, 1]  # the mutant: one weight for every candidate
    for at, row in enumerate(found.tolist()):
        mine = torch.ones(n, dtype=torch.bool) if groups is None else group == at
        w = weights[label[mine].numpy()]
        for own, t in zip(weights, row, strict=True):
            fitting = []
            for tried in scores[mine].flatten().double().unique().tolist():
                count = (scores[mine] > tried).sum(dim=1).numpy()
                if isinstance(rule, MajorantRule):
                    lost, most, level = np.array(rule.g)[count], rule.g[-1], ALPHA
                else:
                    lost, most, level = (count > rule.c).astype(float), 1.0, rule.level  # type: ignore[attr-defined]
                if w @ lost + own * most <= level * (w.sum() + own):
                    fitting.append(tried)
            assert t == min(fitting, default=math.inf)


def test_clusters_have_the_points_of_their_classes_alone() -> None:
    """The mutants: points of another cluster, or a label that is compared with another cluster's threshold."""
    score, label = torch.rand(300, generator=torch.Generator().manual_seed(0)), torch.arange(300) % 3
    score = score + label
    asked = Asked(ALPHA, Threat(Gaussian(1.0), 0.0), 1, 300, 3, 1, Promise(per="class", clusters=(1, 0, 1)))
    found = METHODS["cp"].fit(asked).thresholds(Sample(score, label=label))
    alone = replace(asked, promise=Promise())
    own = [METHODS["cp"].fit(alone).threshold_of(Sample(score[some])) for some in (label != 1, label == 1)]
    assert found.tolist() == [own[0], own[1], own[0]]


# -- moved calibration inputs under any noise ----------------------------------------------------------------------------

GRID = np.unique(np.concatenate([[0.0, 1.0], np.geomspace(1e-9, 0.5, 1000), 1 - np.geomspace(1e-9, 0.5, 1000)]))
MOVED: dict[str, tuple[Threat, float]] = {
    "gaussian": (Threat(Gaussian(0.5), 0.25), 0.1),
    "uniform": (Threat(Uniform(1.0), 0.05), 0.03),
    "laplace": (Threat(Laplace(0.5), 0.2), 0.1),
    "ablation": (Threat(Ablation(5), 2, shape=(1, 10, 10)), 1),
}


def exactly(name: str, q: ndarray, epsilon: float) -> ndarray:
    """up, from the formulas of the mathematics page rather than from the library."""
    if name == "gaussian":
        return stats.norm.cdf(stats.norm.ppf(q) + epsilon / 0.5)
    if name == "uniform":
        return np.minimum(1.0, q + epsilon / 2)
    if name == "laplace":
        rho = epsilon / 0.5
        with np.errstate(divide="ignore"):
            middle = 1 - math.exp(-rho) / (4 * q)
        low, high = q * math.exp(rho), 1 - (1 - q) * math.exp(-rho)
        return np.where(q <= math.exp(-rho) / 2, low, np.where(q <= 0.5, middle, high))
    return np.minimum(1.0, q + 1 - math.comb(100 - int(epsilon), 5) / math.comb(100, 5))


def most_missed(name: str, rule: Any, level: float) -> float:
    """The largest E h over all populations with E f(down) at most ``level``: the upper hull of the curve, by brute force."""
    threat, moved = MOVED[name]
    down = np.clip(1 - exactly(name, 1 - GRID, moved), 0.0, 1.0)
    f = stats.binom.sf(rule.c, rule.calibration_draws, down)
    h = stats.binom.sf(rule.kappa, rule.test_draws, exactly(name, GRID, threat.epsilon))
    above = h[f <= level].max(initial=0.0)
    low, high = f <= level, f > level  # the best mixture of two points, one on each side of the level
    share = (level - f[low][:, None]) / (f[high] - f[low][:, None])
    return max(above, float(((1 - share) * h[low][:, None] + share * h[high]).max(initial=0.0)))


@pytest.mark.parametrize("name", MOVED)
@pytest.mark.parametrize(("draws", "per_point", "c", "kappa"), [(16, 16, 5, 5), (8, 32, 12, 3), (1, 1, 0, 0)])
def test_no_population_misses_more_where_calibration_inputs_were_moved(
    name: str, draws: int, per_point: int, c: int, kappa: int
) -> None:
    threat, moved = MOVED[name]
    asked = Asked(ALPHA, threat, draws, 1000, 2, per_point, Promise(calibration_epsilon=moved))
    rule = HullRule(Exact(), asked, kappa=kappa, c=c)
    if rule.level == 0:
        assert most_missed(name, rule, 1e-9) > 0.8 * ALPHA  # nothing certifies
        return
    assert most_missed(name, rule, rule.level) <= ALPHA * (1 + 1e-6)
    forgetful = replace(rule, asked=replace(asked, promise=Promise()))  # the mutant
    assert most_missed(name, rule, forgetful.level) > ALPHA * (1 + 1e-3)


@pytest.mark.parametrize("name", MOVED)
def test_a_majorant_holds_where_calibration_inputs_were_moved(name: str) -> None:
    threat, moved = MOVED[name]
    generator = torch.Generator().manual_seed(0)
    true = torch.where(torch.rand(300, generator=generator) < 0.1, 1.0, -2.0)[:, None] + torch.randn(
        300, 16, generator=generator
    )
    outputs = torch.stack([true, torch.full_like(true, 3.0)], dim=2)
    held = Holdout(Classification(lambda s: s).seen(outputs), outputs, torch.zeros(300, dtype=torch.int64))
    down = np.clip(1 - exactly(name, 1 - GRID, moved), 0.0, 1.0)
    for promise, holds in ((Promise(calibration_epsilon=moved), True), (Promise(), False)):  # the second is the mutant
        rule = ExactAsymmetric().fit(Asked(ALPHA, threat, 8, 1000, 2, 16, promise), held)
        assert isinstance(rule, MajorantRule)
        expected = stats.binom.pmf(np.arange(17), 16, down[:, None]) @ np.array(rule.g)
        worst = stats.binom.sf(rule.kappa, 8, exactly(name, GRID, threat.epsilon))
        assert bool((expected >= worst - 1e-9).all()) == holds


def test_bands_of_moved_calibration_points_are_allowed_for_by_the_clause() -> None:
    """A patch of one column on calibration points lowers t; a rule that forgets it loses a clean point that another patch hits."""
    columns, generator = 12, torch.Generator().manual_seed(4)
    values = torch.randn(300, columns, generator=generator)
    lowered = values.clone()
    lowered[:, 5:7] = -torch.inf
    lost = {}
    for kind, promise in (("kept", Promise(calibration_epsilon=1)), ("forgetful", Promise())):
        asked = Asked(ALPHA, Threat(Bands(2), 2, shape=(1, 4, columns)), columns, 60, 2, columns, promise)
        rule = BandsRule(AllBands(), asked, c=1)
        t, misses = rule.statistic(Draws(lowered)), 0
        for at in range(columns):
            attacked = values.clone()
            attacked[:, [(at + i) % columns for i in range(rule.window)]] = torch.inf
            misses += int((rule.test_statistic(Draws(attacked)) > t).sum())
        lost[kind] = misses
    assert lost["kept"] == 0
    assert lost["forgetful"] > 0


def test_a_move_is_measured_as_the_threat_is() -> None:
    with pytest.raises(InputError, match="calibration_epsilon is measured as epsilon is: expected a whole number"):
        _ = Asked(ALPHA, MOVED["ablation"][0], 8, 1000, 2, 8, Promise(calibration_epsilon=0.5)).counts


# -- whose threshold -----------------------------------------------------------------------------------------------------


def test_an_unknown_group_has_the_widest_threshold_of_every_label() -> None:
    """Label by label, so that a query of any known group that does not say which is covered too."""
    thresholds = torch.tensor([[1.0, 5.0], [2.0, 4.0], [0.0, math.inf]])
    group, label = torch.tensor([0, 1, 2, -1, -1]), torch.tensor([0, 1, 1, 0, 1])
    assert for_queries(thresholds, group)[3:].tolist() == [[2.0, math.inf]] * 2
    assert (for_queries(thresholds, group)[3] >= thresholds).all()
    assert of_truth(thresholds, label, group).tolist() == [1.0, 4.0, math.inf, 2.0, math.inf]


def test_with_many_classes_every_one_has_its_own_points() -> None:
    classes, n = 1000, 40_000
    label = torch.randint(classes, (n,), generator=torch.Generator().manual_seed(0))
    score = torch.rand(n, generator=torch.Generator().manual_seed(1)) + label
    asked = Asked(ALPHA, Threat(Gaussian(1.0), 0.0), 1, n, classes, 1, Promise(per="class", poisoned=2, delta=0.2))
    rule = METHODS["cp"].fit(asked)
    found = rule.thresholds(Sample(score, label=label))
    for k in range(0, classes, 97):
        own = score[label == k].sort().values
        rank = asked.promise.rank(len(own), asked.promise.level(ALPHA))
        assert float(found[k]) == (float(own[rank - 1]) if rank <= len(own) else math.inf)
