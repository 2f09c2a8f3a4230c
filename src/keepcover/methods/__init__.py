"""Methods, by the names that the command line, JSON and saved predictors use: each a theorem, fitted to a rule."""

from __future__ import annotations

from typing import Any

from keepcover.errors import InputError
from keepcover.methods.auto import Auto
from keepcover.methods.bands import AllBands
from keepcover.methods.base import Asked, Explanation, Method, Rule, with_options
from keepcover.methods.bincp import BinCP, BinCPSharp, BinCPThreshold
from keepcover.methods.cas import CAS, CASTestTime
from keepcover.methods.cp import SmoothedCP, SplitCP
from keepcover.methods.exact import Exact, ExactAsymmetric
from keepcover.methods.holdout import Holdout
from keepcover.methods.one_draw import RCP1, OneDrawControl
from keepcover.methods.rscp import RSCP, RSCPPlus
from keepcover.noise import Noise
from keepcover.scores import PTT
from keepcover.tasks import Task

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        SplitCP(),
        SmoothedCP(),
        RSCP(),
        RSCPPlus("hoeffding"),
        RSCPPlus("bernstein"),
        Exact(),
        ExactAsymmetric(),
        RCP1(),
        OneDrawControl(),
        AllBands(),
        BinCP(),
        BinCPSharp(),
        BinCPThreshold(),
        CAS(),
        CASTestTime(),
    )
}


def get_method(method: str | Method, **options: Any) -> Method:
    """A method as it is, or by name, with some of its options changed; ``auto`` is the better of the two certificates.

    Example:
        >>> get_method("exact").certified, get_method("rscp").certified
        (True, False)
        >>> get_method("rscp_plus_bernstein", beta=0.01).spent
        0.02
    """
    if isinstance(method, str):
        if method != "auto" and method not in METHODS:
            raise InputError(f"expected a method among auto, {', '.join(METHODS)}, got {method!r}")
        method = Auto() if method == "auto" else METHODS[method]
    if not isinstance(method, Method):
        raise InputError(f"expected a method or its name, got {type(method).__name__}")
    return with_options(method, **options) if options else method


def usable(noise: Noise, task: Task | None = None) -> list[str]:
    """The methods whose theorems hold under a noise, and that make sets for a task, by name.

    Example:
        >>> from keepcover.noise import Bands
        >>> "exact" in usable(Bands(4)), "bands" in usable(Bands(4))
        (False, True)
    """
    fit = [name for name, method in METHODS.items() if not method.unfit(noise)]
    return [name for name in fit if task is None or not task.unfit(METHODS[name])]


def saved_method(name: str, options: dict[str, Any]) -> Method:
    """A method of a saved predictor: its options are plain values there."""
    if isinstance(options.get("transform"), dict):
        options = {**options, "transform": PTT(**options["transform"])}
    return get_method(name, **options)


__all__ = [
    "CAS",
    "METHODS",
    "RCP1",
    "RSCP",
    "AllBands",
    "Asked",
    "Auto",
    "BinCP",
    "BinCPSharp",
    "BinCPThreshold",
    "CASTestTime",
    "Exact",
    "ExactAsymmetric",
    "Explanation",
    "Holdout",
    "Method",
    "OneDrawControl",
    "RSCPPlus",
    "Rule",
    "SmoothedCP",
    "SplitCP",
    "get_method",
    "saved_method",
    "usable",
    "with_options",
]
