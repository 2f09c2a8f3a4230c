"""The interval of the worst class holds for all classes at once: points and splits are both in it."""

from __future__ import annotations

import numpy as np
import torch
from scipy import stats

from keepcover.evaluation.rows import Breakdown
from keepcover.tasks import Proportion
from keepcover.tasks.metrics import measure

CLASSES, POINTS, HALF, SPLITS, TRIALS = 20, 60, 30, 5, 200


def outside(level: float) -> int:
    """In how many worlds of fresh points some class's interval misses its true coverage, 0.9, over random halves."""
    rng, wrong = np.random.default_rng(0), 0
    of = torch.arange(CLASSES).repeat_interleave(POINTS - HALF)
    for _ in range(TRIALS):
        score, seen = rng.random((CLASSES, POINTS)), Breakdown()
        for _ in range(SPLITS):
            tested = rng.random((CLASSES, POINTS)).argsort(axis=1)[:, HALF:]
            covered = torch.from_numpy(np.take_along_axis(score, tested, axis=1) <= 0.9).flatten()
            points = torch.from_numpy(tested + POINTS * np.arange(CLASSES)[:, None]).flatten()
            seen.add(torch.ones(len(of), dtype=torch.int64), covered, of, CLASSES, points)
        found = [seen.proportion(k, level) for k in range(CLASSES)]
        wrong += any(not one.low <= 0.9 <= one.high for one in found)
    return wrong


def test_the_intervals_of_all_classes_hold_at_once() -> None:
    """5 % of worlds at most; a binomial test at 1e-6. The mutant, an interval for each class on its own, is told."""
    most = stats.binom.isf(1e-6, TRIALS, 0.05)
    assert outside(0.05) <= most
    assert outside(0.05 * CLASSES) > most


def test_a_point_that_two_splits_test_is_one_point() -> None:
    seen, of = Breakdown(), torch.zeros(10, dtype=torch.int64)
    for _ in range(3):
        seen.add(torch.ones(10, dtype=torch.int64), torch.arange(10) < 9, of, 1, torch.arange(10))
    assert seen.proportion(0).count == 10
    assert seen.proportion(0).low < 0.6  # as wide as ten points make it, not thirty


def test_one_measurement_has_intervals_for_all_classes_and_all_groups_at_once() -> None:
    labels = torch.arange(90) % 3
    mask = torch.nn.functional.one_hot(labels, 3).bool()
    mask[:30:2] = False
    groups = ["a", "b", "c", "d", "e"] * 18
    found = measure(mask, labels, groups=groups)
    hit = mask.any(dim=1)
    for k in range(3):
        mine = labels == k
        assert found.by_class[k] == Proportion.of(int(hit[mine].sum()), int(mine.sum()), 0.05 / 3)
    for name in "abcde":
        mine = torch.tensor([one == name for one in groups])
        assert found.by_group[name] == Proportion.of(int(hit[mine].sum()), 18, 0.05 / 5)
