"""Which function a predictor was calibrated with: its weights, its structure, and its logits of a few fixed inputs.

Weights alone do not tell a ReLU from a GELU, nor a class from a subclass that turns the logits round. The structure names
what differs; the logits see what no structure tells.
"""

from __future__ import annotations

import enum
import hashlib
import json
import math
import re
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from keepcover.engine.smoother import Classifier, Smoother
from keepcover.errors import InputError, KeepcoverWarning
from keepcover.noise import Stream
from keepcover.noise.stream import probes

Structure = dict[str, dict[str, Any]]  # of every module by its path: its class and its plain attributes

CLASS = "(class)"  # no attribute can be called that
_OWN = frozenset(vars(nn.Module())) | {"name_or_path"}  # what every module has, and where transformers read it from
_PLACE = re.compile(r"(cpu|cuda|mps|xpu)(:\d+)?|.*[/\\].*", re.DOTALL)  # devices and files differ between machines


def fingerprint(model: Classifier | str | Path) -> str | None:
    """SHA-256 of a module's state dict (names, dtypes, shapes and bytes) or of a model file. None for a plain callable.

    A model with a string attribute ``fingerprint`` is identified by that: adapters give the SHA-256 of their file. Wrappers
    of ``torch.compile`` and of data parallelism are looked through.

    Example:
        >>> a, b = nn.Linear(2, 2), nn.Linear(2, 2)
        >>> fingerprint(a) == fingerprint(nn.DataParallel(a)), fingerprint(a) == fingerprint(b)
        (True, False)
    """
    if isinstance(model, str | Path):
        return hashlib.sha256(Path(model).read_bytes()).hexdigest()
    model = unwrapped(model)
    own = getattr(model, "fingerprint", None)
    if isinstance(own, str) or not isinstance(model, nn.Module):
        return own if isinstance(own, str) else None
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        if not isinstance(value, Tensor):
            continue
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        flat = value.detach().cpu().clone(memory_format=torch.contiguous_format).flatten()
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def unwrapped(model: Classifier) -> Classifier:
    """The module inside ``torch.compile`` and data parallelism: they run the same function elsewhere or faster."""
    parallel = isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel)
    inner = model._modules.get("module" if parallel else "_orig_mod") if isinstance(model, nn.Module) else None
    return model if inner is None else unwrapped(inner)


def identifier(model: Classifier, given: str | None = None) -> str:
    """The string that stands for the model in a file: the one given, or its own."""
    found = given or fingerprint(model)
    if found is None:
        what = f"a saved predictor must know its model again, and a plain {type(model).__name__} has no fingerprint"
        yours = "a string of yours that changes with the model, the same at calibration and loading"
        raise InputError(f'{what}: give fingerprint="..." (--fingerprint), {yours}')
    return found


# -- structure ---------------------------------------------------------------------------------------------------------


def structure(model: Classifier) -> Structure:
    """Class and plain attributes of every module by its path; of a model with a ``fingerprint`` of its own only its class.

    Plain are numbers, strings, dtypes, names of functions, sequences and dictionaries of those, and tensors outside the state
    dict by their type, shape and moments. Devices and paths are left out.

    Example:
        >>> structure(nn.Sequential(nn.GELU("tanh")))["0"]
        {'(class)': 'torch.nn.modules.activation.GELU', 'approximate': 'tanh'}
    """
    model = unwrapped(model)
    if not isinstance(model, nn.Module) or isinstance(getattr(model, "fingerprint", None), str):
        return {"": {CLASS: _name(type(model))}}
    return {
        path: {CLASS: _name(type(module)), **dict(sorted(_attributes(module)))}
        for path, module in model.named_modules()
    }


def _name(of: Any) -> str:
    return f"{of.__module__}.{of.__qualname__}"


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    buffers = {name: module._buffers[name] for name in module._non_persistent_buffers_set}
    classes = type(module).__mro__[: type(module).__mro__.index(nn.Module)]
    shared = {name: value for one in reversed(classes) for name, value in vars(one).items() if not callable(value)}
    for name, value in {**shared, **vars(module), **buffers}.items():
        plain = None if name in _OWN or name.startswith("__") else _plain(value)
        if plain is not None:
            yield name, plain


def _plain(value: Any) -> Any:
    """A value as JSON; None for what has no canonical form, and for None, which is often a cache that is not filled yet."""
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        value = torch.as_tensor(value)
    if isinstance(value, Tensor):
        return _summary(value)
    if isinstance(value, enum.Enum | torch.dtype):
        return str(value)
    if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, float | complex):
        return repr(value)
    if isinstance(value, str):
        return None if _PLACE.fullmatch(value) else value
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType | type):
        return value.__qualname__
    if isinstance(value, list | tuple):
        items = [_plain(item) for item in value]
        return None if None in items else items
    if isinstance(value, dict) and all(isinstance(key, str | int) for key in value):
        entries = {str(key): _plain(item) for key, item in value.items()}
        return None if None in entries.values() else entries
    return None


def _summary(tensor: Tensor) -> dict[str, Any] | None:
    """Type, shape and three moments: not the bytes, because a table of sines differs in its last bits between machines."""
    if tensor.is_meta or tensor.is_quantized or tensor.layout != torch.strided:
        return None
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().cpu().double().flatten()
    flat = flat.nan_to_num(nan=0.5, posinf=1e6, neginf=-1e6)
    wave = torch.arange(len(flat), dtype=torch.float64).cos()
    moments = [float(flat.sum()), float(flat @ wave), float(flat.abs().sum())]
    return {"tensor": f"{tensor.dtype} {list(tensor.shape)}", "moments": moments}


def _same(expected: Any, found: Any) -> bool:
    if isinstance(expected, dict) and isinstance(found, dict) and {*expected, *found} == {"tensor", "moments"}:
        (*some, size), others = expected["moments"], found["moments"]
        near = all(math.isclose(a, b, rel_tol=0, abs_tol=1e-6 * size + 1e-12) for a, b in zip(some, others))
        return expected["tensor"] == found["tensor"] and near
    return type(expected) is type(found) and expected == found


def _difference(expected: Structure, found: Structure) -> str | None:
    """What differs between two structures, in words. An attribute that one of them lacks may be a cache, and is passed over."""
    for path in (*expected, *found):
        where = f"module {path!r}" if path else "the model"
        if path not in found or path not in expected:
            return f"it has {'no' if path in expected else 'another'} {where}"
        there, here = expected[path], found[path]
        if not _same_class(there[CLASS], here[CLASS]):
            return f"{where} is a {here[CLASS]}, expected {there[CLASS]}"
        for name in sorted(there.keys() & here.keys() - {CLASS}):
            if not _same(there[name], here[name]):
                return f"attribute {name!r} of {where} is {_short(here[name])}, expected {_short(there[name])}"
    return None


def _same_class(expected: Any, found: str) -> bool:
    """A class of a script is ``__main__``'s where it runs; one of ``package.module`` is ``module``'s where that is on the path.

    Ours go by their names alone: they may move between our files.
    """
    one, other = f".{expected}", f".{found}"
    scripted = any(name.startswith(".__main__.") for name in (one, other))
    ours = all(name.startswith(".keepcover.models.") for name in (one, other))
    by_name = one.split(".")[-1] == other.split(".")[-1]
    return by_name if scripted or ours else one.endswith(other) or other.endswith(one)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def structure_digest(smoother: Smoother, shape: tuple[int, ...]) -> str:
    """A hash of the structure of a smoother's model, the same before and after it has run and on every machine.

    Caches hold what the last inputs left there, so probes run first; counters change even so, and :class:`Identity` leaves
    them out.
    """
    probe_logits(smoother, probes(shape))
    kept = Identity.of(smoother, probes(shape)).structure
    return hashlib.sha256(json.dumps(_coarse(kept), sort_keys=True).encode()).hexdigest()


def _coarse(value: Any) -> Any:
    """Plain values without what may differ between machines: last digits of moments, and the module of a class."""
    if isinstance(value, dict) and value.keys() == {"tensor", "moments"}:
        *some, size = value["moments"]
        return [value["tensor"], f"{size:.3g}", *(round(moment / (size or 1.0), 3) + 0.0 for moment in some)]
    if isinstance(value, dict):
        return {key: item.split(".")[-1] if key == CLASS else _coarse(item) for key, item in value.items()}
    return [_coarse(item) for item in value] if isinstance(value, list) else value


# -- probes ------------------------------------------------------------------------------------------------------------


def probe_logits(smoother: Smoother, inputs: Tensor) -> Tensor | None:
    """The logits of probes without noise, under the smoother's numerics; None where the model takes no such inputs.

    Compiling is left out: it takes minutes and does not change the function beyond what is tolerated.
    """
    return _noisy(smoother.under(0.0, compile=False, progress=False), inputs, 1)


def _noisy(smoother: Smoother, inputs: Tensor, draws: int) -> Tensor | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KeepcoverWarning)  # of train mode: running the model warns of it
        try:
            return smoother.logits(inputs, draws, Stream(0, "test")).flatten(0, 1).cpu()
        except Exception:  # a function of the user's may raise anything at inputs that mean nothing to it
            return None


def tolerance(smoother: Smoother) -> float:
    """How far logits may lie apart between machines, as a share: TF32 and bfloat16 round that coarsely in deep networks."""
    model = smoother.model
    types_ = {p.dtype for p in model.parameters() if p.is_floating_point()} if isinstance(model, nn.Module) else set()
    coarse = smoother.autocast is not None or any(torch.finfo(dtype).bits < 32 for dtype in types_)
    return 0.5 if coarse else 0.05


@dataclass(frozen=True)
class Identity:
    """What a predictor knows of its model.

    Attributes:
        fingerprint: of the weights, or a string of the user's; None for a callable without either.
        structure: None where the user's string stands for it.
        inputs: the probes, fixed inputs; None where no input is known.
        outputs: of the probes; None where there are none or the model takes none.
    """

    fingerprint: str | None
    structure: Structure | None
    inputs: Tensor | None
    outputs: Tensor | None

    @classmethod
    def of(cls, smoother: Smoother, inputs: Tensor | None, given: str | None = None) -> Identity:
        """Of the model that a smoother runs; ``given`` is the user's string."""
        before = {} if given else structure(smoother.model)
        logits = None if inputs is None else probe_logits(smoother, inputs)
        after = {} if given else structure(smoother.model)
        # Counters and caches change as the model runs, so they do not decide what it computes.
        kept = {
            path: {name: value for name, value in has.items() if _same(value, after.get(path, {}).get(name))}
            for path, has in before.items()
        }
        return cls(given or fingerprint(smoother.model), None if given else kept, inputs, logits)

    def runs_plainly(self, smoother: Smoother) -> bool:
        """Whether a smoother adds the noise that :class:`Smoother` adds: a file can bring back no other."""
        if type(smoother) is Smoother:
            return True
        if self.inputs is None:
            return False
        own, plain = (_noisy(one, self.inputs, 2) for one in (smoother, smoother.under(smoother.noise, compile=False)))
        return own is not None and plain is not None and torch.allclose(own, plain, rtol=1e-3, atol=1e-3)

    def refuse_other(self, smoother: Smoother, given: str | None = None) -> None:
        """Raise unless the smoother runs this model; the error says what differs.

        Logits may differ by ``tolerance`` x (s + d), d their distance from the largest of their row and s their range, at
        most 1.
        """
        begin = "the model differs from the one calibrated: "
        advice = "load the model that was calibrated (or give its fingerprint= string), or calibrate again"
        found = identifier(smoother.model, given)
        known = None if given else self.structure
        if known is not None and (difference := _difference(known, structure(smoother.model))):
            raise InputError(f"{begin}{difference}; {advice}")
        if found != self.fingerprint:
            raise InputError(f"{begin}fingerprint {found[:12]}, expected {str(self.fingerprint)[:12]}; {advice}")
        if self.outputs is None or self.inputs is None:
            return
        logits = probe_logits(smoother, self.inputs)
        if logits is None or logits.shape != self.outputs.shape:
            gives = "no finite logits" if logits is None else f"logits {list(logits.shape)}"
            where = f"{len(self.outputs)} fixed inputs {list(self.inputs.shape[1:])}"
            raise InputError(f"{begin}on {where} it gives {gives}, expected {list(self.outputs.shape)}; {advice}")
        spread = min(1.0, float(self.outputs.max() - self.outputs.min()))
        allowed = tolerance(smoother) * (spread + self.outputs.amax(dim=1, keepdim=True) - self.outputs)
        excess = (logits - self.outputs).abs() - allowed
        if float(excess.max()) > 0:
            row, label = divmod(int(excess.argmax()), logits.shape[1])
            now, then, near = (float(values[row, label]) for values in (logits, self.outputs, allowed))
            what = (
                f"its logit of class {label} on fixed input {row} is {now:.4g}, expected {then:.4g} within {near:.2g}"
            )
            raise InputError(f"{begin}{what}; {advice}")
