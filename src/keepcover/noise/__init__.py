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
        name, options = noise.get("name"), {key: number for key, number in noise.items() if key != "name"}
    elif isinstance(noise, str):
        name, _, numbers = noise.partition(":")
        try:
            options = [int(x) if x.is_integer() else x for x in map(float, numbers.split(","))]
        except ValueError:
            raise InputError(f"expected noise as name:number, for instance gaussian:0.25, got {noise!r}") from None
    else:
        raise InputError(f"expected a Noise, a sigma or a text such as gaussian:0.25, got {type(noise).__name__}")
    if name not in NOISES:
        raise InputError(f"expected a noise among {', '.join(NOISES)}, got {name!r}")
    try:
        return NOISES[name](**options) if isinstance(options, dict) else NOISES[name](*options)
    except TypeError:
        takes = ", ".join(f.name for f in fields(NOISES[name]))  # type: ignore[arg-type]
        raise InputError(f"{name} noise takes {takes}, got {options}") from None


def get_threat(config: dict[str, Any]) -> Threat:
    """A threat from :meth:`Threat.config`.

    Example:
        >>> threat = Threat(Gaussian(0.5), 0.25)
        >>> get_threat(threat.config()) == threat
        True
    """
    shape = config["shape"] and tuple(config["shape"])
    return Threat(get_noise(config["noise"]), config["epsilon"], config["norm"], shape)


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
