"""What keepcover raises and warns: bad input is one exception type, dangerous input one warning type."""

from __future__ import annotations


class InputError(ValueError):
    """Input that cannot carry a guarantee; the message says what was expected, what was found and what to do."""


class KeepcoverWarning(UserWarning):
    """Input that is accepted but is known to ruin results (train mode, wrong pixel range, useless accuracy)."""


def install(extra: str) -> str:
    """How to get an optional part of the library: every message that names one ends with this.

    Example:
        >>> install("serve")
        "pip install '.[serve]' in a checkout"
    """
    return f"pip install '.[{extra}]' in a checkout"
