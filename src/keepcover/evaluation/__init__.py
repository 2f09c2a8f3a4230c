"""Evaluation: methods over random splits of noisy outputs, what draws buy before data are seen, and where numbers come from."""

from keepcover.evaluation.evaluate import Attacked, Entry, entries, evaluate, evaluate_entries
from keepcover.evaluation.rows import Observed, Row
from keepcover.prediction.source import InMemory, Network, Source, Stored

__all__ = [
    "Attacked",
    "Entry",
    "InMemory",
    "Network",
    "Observed",
    "Row",
    "Source",
    "Stored",
    "entries",
    "evaluate",
    "evaluate_entries",
]
