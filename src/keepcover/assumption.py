"""What a promise rests on: a sentence, and how it is checked."""

from __future__ import annotations

from typing import Literal

By = Literal["library", "you", "none"]
CHECKED: dict[By, str] = {"library": "the library checks it", "you": "you check it", "none": "it cannot be checked"}


class Assumption(str):
    """A sentence that also says how it is checked; printed, compared or in JSON it is the sentence alone.

    Attributes:
        by: ``library`` where it is checked whenever it could break, ``you`` where you can see to it, ``none`` where it is
            taken on trust.
        how: what is done, or what there is to do.

    Example:
        >>> secret = Assumption("The seed is secret.", "library", "It comes from the operating system.")
        >>> print(secret, "How:", secret.how)
        The seed is secret. How: It comes from the operating system.
    """

    by: By
    how: str

    def __new__(cls, text: str, by: By = "you", how: str = "") -> Assumption:
        made = super().__new__(cls, text)
        made.by, made.how = by, how
        return made

    @classmethod
    def of(cls, text: str) -> Assumption:
        """The assumption itself; a plain sentence becomes one that is for you to check."""
        return text if isinstance(text, cls) else cls(text, "you", "It was stated without a way to check it.")

    def to_dict(self) -> dict[str, str]:
        return {"assumption": str(self), "checked": CHECKED[self.by], "how": self.how}
