"""Noise: what the defender adds to a query, what an attack can then do, and the keyed streams it is drawn from."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from keepcover.errors import InputError
from keepcover.noise.ablation import Ablation
from keepcover.noise.bands import Bands, RandomBands
from keepcover.noise.base import Noise, Threat
from keepcover.noise.gaussian import Gaussian
from keepcover.noise.laplace import Laplace
from keepcover.noise.norms import NORMS, Norm, get_norm
from keepcover.noise.stream import Stream, fresh_seed
from keepcover.noise.uniform import Uniform

NOISES: dict[str, type[Noise]] = {
    noise.name: noise for noise in (Gaussian, Laplace, Uniform, Ablation, Bands, RandomBands)
}


def get_noise(noise: Noise | str | float | dict[str, Any]) -> Noise:
    """A noise as it is, from a sigma, from ``name:number`` as on the command line, or from :meth:`Noise.config`.

    Example:
        >>> get_noise("gaussian:0.25") == get_noise(0.25) == Gaussian(0.25)
        True
    """
    if isinstance(noise, Noise):
        return noise
    if isinstance(noise, int | float):
        return Gaussian(noise)
    if isinstance(noise, dict):
        numbers = dict(noise)
        name, options = numbers.pop("name", None), numbers
    elif isinstance(noise, str):
        name, _, number = noise.partition(":")
        try:
            options = [float(part) for part in number.split(",")]
        except ValueError:
            raise InputError(f"expected noise as name:number, for instance gaussian:0.25, got {noise!r}") from None
    else:
        raise InputError(f"expected a Noise, a sigma or a text such as gaussian:0.25, got {type(noise).__name__}")
    if name not in NOISES:
        raise InputError(f"expected a noise among {', '.join(NOISES)}, got {name!r}")
    try:
        if isinstance(options, dict):
            return NOISES[name](**options)
        kinds = [str(f.type) for f in fields(NOISES[name])]  # type: ignore[arg-type]
        whole = [kind == "int" and number.is_integer() for kind, number in zip(kinds, options, strict=False)]
        return NOISES[name](*(int(number) if w else number for w, number in zip(whole, options, strict=True)))
    except InputError:  # a number of the right kind, and impossible
        raise
    except (TypeError, ValueError):
        takes = ", ".join(f.name for f in fields(NOISES[name]))  # type: ignore[arg-type]
        raise InputError(f"{name} noise takes {takes}, got {options}") from None


def get_threat(config: dict[str, Any]) -> Threat:
    """A threat from :meth:`Threat.config`.

    Example:
        >>> threat = Threat(Gaussian(0.5), 0.25)
        >>> get_threat(threat.config()) == threat
        True
    """
    shape = config["shape"]
    return Threat(
        get_noise(config["noise"]), config["epsilon"], config["norm"], None if shape is None else tuple(shape)
    )


__all__ = [
    "NOISES",
    "NORMS",
    "Ablation",
    "Bands",
    "Gaussian",
    "Laplace",
    "Noise",
    "Norm",
    "RandomBands",
    "Stream",
    "Threat",
    "Uniform",
    "fresh_seed",
    "get_noise",
    "get_norm",
    "get_threat",
]
