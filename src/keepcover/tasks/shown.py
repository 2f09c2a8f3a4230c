"""Sets and tables as notebooks, data frames and JSON take them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from html import escape
from typing import Any, TypeVar

import numpy as np
from numpy import ndarray
from torch import Tensor

from keepcover.errors import InputError
from keepcover.guarantee import Guarantee

MOST = 20  # rows that a notebook shows
BINS = 32  # values that a trait has
Own = TypeVar("Own", bound="Shown")


def leading(values: ndarray) -> ndarray:
    """The sign, two bits of the exponent and two of the mantissa.

    Example:
        >>> leading(np.array([1.0, 1.3, 2.0, 32.0, -1.0, np.inf, np.nan]))
        array([ 4,  5,  8,  8, 20,  0,  0])
    """
    finite = np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
    mantissa, exponent = np.frexp(np.abs(finite))
    bits = 4 * (exponent % 4) + np.maximum(8 * mantissa - 4, 0).astype(int)
    return np.where(finite == 0, 0, bits) + BINS // 2 * (finite < 0)


def html_table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A plain table; every text is escaped.

    Example:
        >>> html_table(["a"], [["<b>"]])
        '<table><thead><tr><th>a</th></tr></thead><tbody><tr><td>&lt;b&gt;</td></tr></tbody></table>'
    """
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr></thead><tbody>{body}</tbody></table>"


def by_row(**columns: Sequence[Any]) -> list[dict[str, Any]]:
    """One dictionary per row of these columns.

    Example:
        >>> by_row(label=["cat", "dog"], size=[1, 2])
        [{'label': 'cat', 'size': 1}, {'label': 'dog', 'size': 2}]
    """
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


class Shown:
    """What every kind of sets can be turned into, from its rows and its guarantee: a dataclass whose first field has one row per
    set.
    """

    guarantee: Guarantee
    draws_used: Tensor | None

    @abstractmethod
    def rows(self) -> list[dict[str, Any]]:
        """One dictionary per set."""

    @property
    @abstractmethod
    def size(self) -> Tensor:
        """How much every set holds."""

    @property
    def traits(self) -> ndarray:
        """All that a monitor keeps of every set: ``[n, traits]`` of whole numbers below ``BINS``; the leading bits of its size."""
        return leading(self.size.double().cpu().numpy())[:, None]

    def answers(self) -> list[dict[str, Any]]:
        """One dictionary per set as a service sends it."""
        return self.rows()

    def arrays(self) -> dict[str, Tensor]:
        """What the sets are, as arrays with one row per set, by name."""
        first = fields(self)[0].name  # type: ignore[arg-type]
        return {first: getattr(self, first)}

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))  # type: ignore[arg-type]

    def __getitem__(self: Own, index: int | Tensor | slice) -> Own:
        """Some of the sets; an integer gives one, still as sets."""
        some = slice(index, index + 1 or None) if isinstance(index, int) else index
        own = {name: getattr(self, name) for name in (fields(self)[0].name, "draws_used")}  # type: ignore[arg-type]
        return replace(self, **{name: value[some] for name, value in own.items() if value is not None})  # type: ignore[type-var]

    def to_dict(self) -> dict[str, Any]:
        """The rows and what they promise, for JSON."""
        return {"guarantee": self.guarantee.to_dict(), "rows": self.rows()}

    def to_pandas(self) -> Any:
        """A data frame with one row per set; ``frame.attrs["guarantee"]`` is what they promise. Needs pandas."""
        try:
            import pandas  # pyright: ignore[reportMissingImports, reportMissingModuleSource]
        except ImportError:
            raise InputError("a data frame needs pandas; install it, or use to_dict() or rows()") from None
        frame = pandas.DataFrame(self.rows())
        frame.attrs["guarantee"] = str(self.guarantee)
        return frame

    @property
    def held(self) -> str:
        """Where the guarantee holds."""
        return f"certified within {self.guarantee.threat.reach}" if self.guarantee.certified else "on clean data only"

    def listed(self, head: str, lines: Iterable[str]) -> str:
        """A headline, some of the sets, and how many more there are."""
        shown = [f"  {i}: {line}" for i, line in enumerate(lines)]
        more = len(self) - len(shown)
        return "\n".join([head, *shown, *([f"  ... {more} more"] if more else [])])

    def _repr_html_(self) -> str:
        rows = self.rows()
        head = [name for name in (rows[0] if rows else ()) if name != "trivial"]
        table = html_table(["", *head], ([i, *(row[name] for name in head)] for i, row in enumerate(rows[:MOST])))
        more = f"<p>{len(rows) - MOST} more</p>" if len(rows) > MOST else ""
        return f"<p>{escape(repr(self).splitlines()[0])}</p>{table}{more}<p>{escape(str(self.guarantee))}</p>"
