"""Clauses whose value is one number: how surely, and despite how much."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from keepcover.errors import InputError
from keepcover.promises.base import Clause, number


class Amount(Clause):
    """A clause whose value is one number: :attr:`expected` says in words what :meth:`fits`."""

    @abstractmethod
    def fits(self, value: float) -> bool:
        """Whether the clause may have this value."""

    def __post_init__(self) -> None:
        if not self.fits(self.stated()):
            raise InputError(f"expected {self.expected}, got {self.stated()}")

    @classmethod
    def of(cls, value: Any) -> Clause:
        return cls(number(value, cls.expected))  # type: ignore[call-arg]
