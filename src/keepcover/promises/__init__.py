"""Promises: the marginal one, and the clauses that make it say more."""

from __future__ import annotations

from keepcover.promises.amounts import Confidence, Drift, Moved, Poisoned
from keepcover.promises.base import CLAUSES, Clause, Promise, Sample, for_queries, of_truth
from keepcover.promises.per import Clusters, LabelWeights, PerClass, PerGroup

# In this order: confidence chooses a rank or a sum, of which poisoned points are then paid.
CLAUSES.update((kind.keyword, kind) for kind in (Confidence, PerClass, Clusters, Poisoned, Moved, Drift, LabelWeights))

__all__ = [
    "CLAUSES",
    "Clause",
    "Clusters",
    "Confidence",
    "Drift",
    "LabelWeights",
    "Moved",
    "PerClass",
    "PerGroup",
    "Poisoned",
    "Promise",
    "Sample",
    "for_queries",
    "of_truth",
]
