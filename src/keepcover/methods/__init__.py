"""The methods, by the names that the command line, JSON and saved predictors use."""

from __future__ import annotations

from keepcover.errors import InputError
from keepcover.methods.base import Method, Setting
from keepcover.methods.bincp import BinCP, BinCPSharp, BinCPThreshold
from keepcover.methods.cas import CAS, CASTestTime
from keepcover.methods.cp import SmoothedCP, SplitCP
from keepcover.methods.exact import RCP1, Exact, ExactAsymmetric
from keepcover.methods.rscp import RSCP, RSCPPlusBernstein, RSCPPlusHoeffding

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        SplitCP,
        SmoothedCP,
        RSCP,
        RSCPPlusHoeffding,
        RSCPPlusBernstein,
        Exact,
        ExactAsymmetric,
        RCP1,
        BinCP,
        BinCPSharp,
        BinCPThreshold,
        CAS,
        CASTestTime,
    )
}


def get_method(name: str) -> type[Method]:
    """A method by name.

    Example:
        >>> get_method("exact").certified, get_method("rscp").certified
        (True, False)
    """
    if name not in METHODS:
        raise InputError(f"expected a method among {', '.join(METHODS)}, got {name!r}")
    return METHODS[name]


__all__ = [
    "CAS",
    "METHODS",
    "RCP1",
    "RSCP",
    "BinCP",
    "BinCPSharp",
    "BinCPThreshold",
    "CASTestTime",
    "Exact",
    "ExactAsymmetric",
    "Method",
    "RSCPPlusBernstein",
    "RSCPPlusHoeffding",
    "Setting",
    "SmoothedCP",
    "SplitCP",
    "get_method",
]
