"""Suites for new members of the four seams: laws, worst cases, round trips and bad input, for anyone who adds one.

Each raises ``AssertionError`` with the law that broke. Random numbers are fixed by ``seed``; statistical checks reject a
correct member with probability at most 1e-6 each.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keepcover.bounds import bernstein, clopper_pearson, conformal_rank, exact_level
from keepcover.errors import InputError
from keepcover.guarantee import Guarantee
from keepcover.methods import Asked, Holdout, Method, Rule, saved_method
from keepcover.methods.exact import Exact, ExactAsymmetric
from keepcover.methods.one_draw import OneDrawControl
from keepcover.noise import Gaussian, Noise, Stream, Threat, get_noise, get_norm
from keepcover.promises import Promise
from keepcover.scores import Draws, Items, Reading
from keepcover.tasks import Classification, Task

FALSE_ALARM = 1e-6


def _law(holds: Any, words: str) -> None:
    if not bool(holds):
        raise AssertionError(words)


def _refused(action: Callable[[], Any], words: str) -> None:
    try:
        action()
    except InputError:
        return
    raise AssertionError(words)


# -- noise -------------------------------------------------------------------------------------------------------------


def check_noise(
    noise: Noise,
    epsilon: float,
    *,
    norm: str | None = None,
    shape: tuple[int, ...] = (3,),
    draws: int = 20_000,
    seed: int = 0,
) -> None:
    """A noise: a value that survives JSON, keyed draws, and an ``up`` that attacks reach but do not exceed.

    Args:
        noise: the member.
        epsilon, norm: an attack that it certifies.
        shape: of the inputs it is tried on.
        draws: noise vectors per probability that is estimated.

    Example:
        >>> check_noise(Gaussian(0.5), 0.25)
    """
    threat = Threat(noise, epsilon, norm, shape)
    _law(get_noise(json.loads(json.dumps(noise.config()))) == noise, "config() does not survive JSON")
    _law(get_noise(noise.spec) == noise and hash(noise) == hash(get_noise(noise.spec)), "spec does not name the noise")
    q = noise.grid()
    _law(q[0] == 0 and q[-1] == 1 and (np.diff(q) > 0).all(), "grid() does not ascend from 0 to 1")
    up = threat.up(q)
    _law(up[-1] == 1 and (up <= 1).all() and (up >= q).all(), "up leaves [q, 1], or up(1) is not 1")
    _law((np.diff(up) >= 0).all(), "up decreases somewhere")
    weaker = int(epsilon / 2) if epsilon == int(epsilon) else epsilon / 2
    _law((Threat(noise, weaker, norm, shape).up(q) <= up + 1e-12).all(), "a larger attack reaches less")
    if noise.concave:
        middle = threat.up((q[:-1] + q[1:]) / 2)
        _law((middle >= (up[:-1] + up[1:]) / 2 - 1e-9).all(), "up is not concave, and says it is")
    for bad in (-0.1, 1.1, math.nan):
        _refused(lambda bad=bad: threat.up(bad), f"up({bad}) is accepted")
    _refused(lambda: Threat(noise, epsilon, "no such norm"), "a norm that it does not certify is accepted")
    if noise.deterministic:
        return _few_touched(threat, shape, seed)
    _keyed(noise, shape, seed)
    return _not_exceeded(threat, shape, draws, seed)


def _seen(noise: Noise, images: Tensor, stream: Stream, ids: Tensor, draws: range) -> Tensor:
    """What the model reads, with a number far away where something is absent, so that it can be compared."""
    return noise.noisy(images, stream, ids, draws).nan_to_num(nan=-9.0)


def _few_touched(threat: Threat, shape: tuple[int, ...], seed: int) -> None:
    """Random attacks change no more of the evaluations than up(0), and some change so many."""
    noise, generator = threat.noise, torch.Generator().manual_seed(seed)
    total = noise.positions(shape)
    images = torch.rand(1000, *shape, generator=generator)
    moved = images + get_norm(str(threat.norm)).random(images, threat.epsilon, generator)
    ids, every = torch.arange(len(images)), range(total)
    here = _seen(noise, images, Stream(seed, "test"), ids, every)
    _law(torch.equal(here, _seen(noise, images, Stream(seed + 1, "test"), ids + 1, every)), "it is not deterministic")
    changed = (here != _seen(noise, moved, Stream(seed, "test"), ids, every)).flatten(2).any(dim=2).sum(dim=1)
    most, stated = int(changed.max()), float(threat.up(0.0))
    _law(most == round(stated * total), f"attacks change up to {most} of {total} evaluations, up(0) is {stated:.3f}")


def _keyed(noise: Noise, shape: tuple[int, ...], seed: int) -> None:
    stream, ids = Stream(seed, "test"), torch.tensor([5, 3, 2**40])
    images = torch.rand(3, *shape, generator=torch.Generator().manual_seed(seed))
    whole = _seen(noise, images, stream, ids, range(6))
    _law(whole.shape[:2] == (3, 6), "noisy() does not return [b, draws, ...]")
    part = _seen(noise, images[1:2], stream, ids[1:2], range(2, 4))
    _law(torch.equal(whole[1:2, 2:4], part), "noise depends on what else is asked for: it is not keyed by id and draw")
    _law(not torch.equal(whole[:, 0], whole[:, 1]), "two draws share their noise")
    same = _seen(noise, images[:1].expand(3, *shape), stream, ids, range(6))
    _law(not torch.equal(same[0], same[1]), "two inputs share their noise")
    other = _seen(noise, images, Stream(seed, "calibration"), ids, range(6))
    _law(not torch.equal(whole, other), "two roles share their noise")


def _not_exceeded(threat: Threat, shape: tuple[int, ...], draws: int, seed: int) -> None:
    """Half-spaces along axes and random directions, before and after moves of the largest allowed length."""
    generator = torch.Generator().manual_seed(seed)
    size, norm = math.prod(shape), get_norm(str(threat.norm))
    stream, ids, clean = Stream(seed, "test"), torch.arange(1), torch.full((1, *shape), 0.5)
    directions = torch.cat([torch.eye(size)[:2], torch.randn(4, size, generator=generator)])
    checks = len(directions) * 4
    for direction in directions:
        move = norm.project(norm.direction(direction.view(1, *shape)) * threat.epsilon, threat.epsilon)
        drawn = (threat.noise.noisy(clean + k * move, stream, ids + k, range(draws)).nan_to_num() for k in (0, 1))
        before, after = (x.flatten(2)[0].double() @ direction.double() for x in drawn)
        for level in (0.5, 0.9, 0.99, 1.0):  # the last is what the clean noise never shows
            at = before.quantile(level)
            q = float(clopper_pearson(int((before > at).sum()), draws, FALSE_ALARM / checks)[1])
            reached = float(clopper_pearson(int((after > at).sum()), draws, FALSE_ALARM / checks)[0])
            _law(reached <= threat.up(q), f"an attack lifts a set of probability {q:.3f} to {reached:.3f}")


# -- promises ----------------------------------------------------------------------------------------------------------


def check_promise(promise: Promise, *, alpha: float = 0.1, points: Sequence[int] = (50, 200, 1000)) -> None:
    """A promise: a value that survives JSON, asks at least what the marginal promise asks, and says so.

    Example:
        >>> check_promise(Promise())
    """
    _law(Promise(**json.loads(json.dumps(promise.config()))) == promise, "config() does not survive JSON")
    level = promise.level(alpha)
    _law(isinstance(level, Fraction) and 0 < level <= exact_level(alpha), "the level is not an exact share of alpha")
    least = promise.points_needed(level)
    for n in points:
        rank = promise.rank(n, level)
        _law(rank >= conformal_rank(n, exact_level(alpha)), f"at n = {n} the rank is below the marginal one")
        _law(rank >= promise.rank(n, level * 2), f"at n = {n} a stricter level has a smaller rank")
        _law((rank <= n) == (n >= least), f"points_needed says {least}, and {n} points disagree")
        budgets = [promise.budget(n, level, top) for top in (1.0, 1.5, 3.0)]
        _law(budgets == sorted(budgets, reverse=True), f"at n = {n} larger losses leave a larger budget")
        most = float(exact_level(alpha)) * (n + 1) - 1 + 1e-9
        _law(budgets[0] <= most, f"at n = {n} the budget exceeds the marginal one")
    promised = Guarantee("exact", True, alpha, Threat(Gaussian(1.0), 0.5), 4, max(least, 1000), promise=promise)
    said = str(promised) != str(replace(promised, promise=Promise()))
    _law(said or not promise.clauses, "the clause is not in the sentence")
    _law(all(promised.assumptions), "an assumption is empty")
    _refused(lambda: Promise(no_such_clause=1), "a clause that does not exist is accepted")


# -- tasks -------------------------------------------------------------------------------------------------------------


def check_task(task: Task, outputs: Tensor, truth: Tensor, *, seed: int = 0) -> None:
    """A task: what must not be missed is what sets are measured against, sets grow with the threshold, and the holdout's
    estimate of their size is their size.

    Args:
        task: the member, before it has seen outputs.
        outputs: noisy outputs [n, N, ...] with at least 4 draws.
        truth: of every point.

    Example:
        >>> logits = torch.randn(60, 8, 3, generator=torch.Generator().manual_seed(0))
        >>> check_task(Classification("aps"), logits, torch.arange(60) % 3)
    """
    n, draws = outputs.shape[:2]
    task = task.seen(outputs)
    truth = task.check_truth(truth, n)
    _refused(lambda: task.check_truth(truth[:-1], n), "the truth of too few points is accepted")
    u = task.uniform(Stream(seed, "test"), torch.arange(n))
    again = type(task).from_config(json.loads(json.dumps(task.config())), getattr(task, "score", None))
    _law(again == task, "config() does not survive JSON")
    again.check_probe(task.probe())
    reading, v = Reading(order=True), torch.zeros(n)
    items, prepared = task.items(outputs, truth, reading, u), task.prepare(outputs, reading, u)
    _law(items.points == n, "items belong to another number of points")
    _law(task.single or items.several, "several things per point have weights")
    asked = Asked(0.1, Threat(Gaussian(1.0), 0.1), draws, n, task.candidates, draws)
    rules, judged = (_one_thing if task.single else _several_things)(items, asked)
    sets: Any = ()
    for rule in rules:
        summary, smaller = task.summary(prepared, rule, v), None
        for level in (0.2, 0.5, 0.8):
            t, held = judged(rule, level)
            inside = task.inside(summary, rule, t)
            sets = task.sets(inside, rule.guarantee(task))
            agree = torch.allclose(sets.covers(truth).double(), held.double(), atol=1e-9)
            _law(agree, "a set misses what its rule keeps, or keeps what it misses")
            size = task.sizes(inside)
            _law(smaller is None or (size >= smaller).all(), "a larger threshold gives a smaller set")
            twice = task.sizes(task.union(inside, inside))
            _law(torch.allclose(twice, size), "the union of a set with itself is another set")
            if not task.single:
                on_grid = task.sizes_on_grid(summary, rule)[:, int(torch.searchsorted(items.grid, float(t)))]
                _law(torch.allclose(on_grid, size.double(), atol=1e-6), "sizes_on_grid() is not the size")
            if rule.test_draws == draws:
                expected, mean = Holdout(task, outputs, truth, u), float(size.double().mean())
                expected.__dict__["thresholds"] = np.array([float(t), np.inf])
                estimate = expected.size(draws, (rule.counting or (0, 0.0))[0])[0]
                _law(math.isclose(mean, estimate, rel_tol=1e-5, abs_tol=1e-6), "profile() is not the size")
            smaller = size
    _law(len(sets.rows()) == len(sets) == n, "rows() has another number of sets")


Judged = tuple[list[Rule], Callable[[Rule, float], tuple[Tensor, Tensor]]]


def _one_thing(items: Items, asked: Asked) -> Judged:
    """Count rules of all draws; a threshold for every level, and whether each point's truth is kept there."""
    _law(items.draws.count == asked.draws, "items have another number of draws than outputs")
    _law(not items.several and len(items.draws) == asked.n, "one item per point has as many items as points")

    def judged(rule: Rule, level: float) -> tuple[Tensor, Tensor]:
        own = rule.test_statistic(items.draws, torch.zeros(asked.n))
        t = own.double().quantile(level)
        return t, own <= t

    return [Exact().rule(asked, kappa=kappa, c=0) for kappa in (0, asked.draws // 2)], judged


def _several_things(items: Any, asked: Asked) -> Judged:
    """Rules that the task allows; a threshold of the grid for every level, and the share that each point keeps there."""
    rules: list[Rule] = [OneDrawControl().rule(asked)]
    if isinstance(items, Items):
        (weight, owner), half = items.weights, asked.draws // 2
        sums = torch.bincount(owner, weight.double())
        _law((weight > 0).all() and (sums <= 1 + 1e-9).all(), "the items of a point weigh more than 1, or nothing")
        step = tuple(float(j > half) for j in range(asked.draws + 1))
        rules.append(ExactAsymmetric().rule(asked, kappa=half, g=step))

    def judged(rule: Rule, level: float) -> tuple[Tensor, Tensor]:
        curve = rule.losses(items.first(rule.test_draws))
        _law((curve.diff(dim=1) <= 1e-9).all(), "a larger threshold loses more")
        at = min(int((curve.mean(dim=0) > 1 - level).sum()), curve.shape[1] - 2)
        return items.grid[at], 1 - curve[:, at]

    return rules, judged


# -- methods -----------------------------------------------------------------------------------------------------------


def check_method(
    method: Method,
    *,
    alpha: float = 0.1,
    epsilon: float = 0.5,
    draws: int = 8,
    points: int = 200,
    trials: int = 1500,
    seed: int = 0,
) -> None:
    """A method: its rule survives JSON, decides as it says, and covers 1 - alpha in its exact worst case.

    Scores are x + noise, half-spaces, which an attack of ``epsilon`` moves as far as it can move anything; x is a point mass, a
    wide law or a mixture. An uncertified method must cover without the attack.

    Example:
        >>> from keepcover.methods import RCP1
        >>> check_method(RCP1(), trials=400)
    """
    generator = torch.Generator().manual_seed(seed)
    task = Classification(score=torch.sigmoid).seen(torch.zeros(1, 1, 2))
    laws: list[Callable[[int], Tensor]] = [
        torch.zeros,
        lambda n: 2 * torch.randn(n, generator=generator),
        lambda n: 4.0 * (torch.rand(n, generator=generator) < alpha).float(),
    ]
    per_point = method.usual_calibration_draws(draws)
    asked = Asked(alpha, Threat(Gaussian(1.0), epsilon), draws, points, 2, per_point)
    for law in laws:

        def noisy(n: int, count: int, move: float = 0.0, law: Any = law) -> Tensor:
            return (law(n) + move)[:, None] + torch.randn(n, count, generator=generator)

        held = torch.stack([noisy(300, per_point), torch.full((300, per_point), 3.0)], dim=2)
        rule = method.fit(asked, Holdout(task, held, torch.zeros(300, dtype=torch.int64)))
        _round_trip(rule, noisy(points, per_point))
        covered = torch.zeros(trials, dtype=torch.float64)
        for trial in range(trials):
            threshold = rule.threshold(_read(rule, noisy(points, rule.calibration_draws)))
            moved = noisy(50, rule.test_draws, epsilon if method.certified else 0.0)
            v = torch.rand(50, generator=generator)
            covered[trial] = (rule.test_statistic(_read(rule, moved).draws, v) <= threshold).double().mean()
        slack, mean = float(bernstein(float(covered.var()), trials, FALSE_ALARM)), float(covered.mean())
        _law(mean >= 1 - alpha - slack, f"{method.name} covers {mean:.3f} of attacked points, not {1 - alpha}")


def _read(rule: Rule, scores: Tensor) -> Items:
    """Unbounded scores as a rule reads them."""
    order = rule.reading.order
    return rule.read(Items.single(Draws(scores if order else scores.sigmoid(), unit=not order)))


def _round_trip(rule: Rule, scores: Tensor) -> None:
    options, asked, chosen = json.loads(json.dumps([rule.method.options(), rule.asked.config(), rule.parameters()]))
    listed = {key: tuple(value) if isinstance(value, list) else value for key, value in chosen.items()}
    again = saved_method(rule.name, options).rule(Asked.from_config(asked), rule.transform, **listed)
    _law(again == rule, "options, question and parameters do not survive JSON")
    items = _read(rule, scores)
    threshold = rule.threshold(items)
    _law(again.threshold(items) == threshold, "the same rule gives another threshold")
    _law(rule.supports(items, float(threshold)), "the rule does not support its own threshold")
    _law(0 <= rule.p_value(900, 1000, items.points) <= 1, "the p-value of an audit is no probability")
    some = Draws(items.draws.values[:5, None, : rule.test_draws], items.draws.unit)
    shown = rule.explain(some, threshold, lambda s: 1 - s)
    _law(shown.support.shape[:2] == (5, 1) and bool(shown.words), "explain() does not speak of every candidate")
