"""Promises: the marginal one, and the clauses that make it say more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keepcover.promises.base import Clause, Promise

CLAUSES: dict[str, Callable[[Any], Clause]] = {}

__all__ = ["CLAUSES", "Clause", "Promise"]
