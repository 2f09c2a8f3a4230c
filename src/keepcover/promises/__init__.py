"""Promises: the marginal one, and the clauses that make it say more."""

from __future__ import annotations

from keepcover.promises.base import Promise, for_queries, of_truth
from keepcover.promises.calibration_epsilon import Moved
from keepcover.promises.clause import CLAUSES, Clause, Sample
from keepcover.promises.clusters import Clusters
from keepcover.promises.delta import Confidence
from keepcover.promises.drift import Drift
from keepcover.promises.label_weights import LabelWeights
from keepcover.promises.per import PerClass, PerGroup
from keepcover.promises.poisoned import Poisoned

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
