"""Promises: the marginal one, and the clauses that make it say more."""

from keepcover.promises.base import Clause, Promise

CLAUSES: dict[str, type[Clause]] = {}

__all__ = ["CLAUSES", "Clause", "Promise"]
