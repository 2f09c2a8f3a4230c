"""Weights into models, whole networks or their last layers: safetensors, or torch files read with ``weights_only=True``.

Nothing is ever unpickled freely.
"""

from __future__ import annotations

import copy
import os
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from keepcover.engine.fingerprint import fingerprint
from keepcover.errors import InputError, refusing
from keepcover.sealing import UNREADABLE, pack, unpack
from keepcover.store.logits_file import refuse_packed


def find_weights(name: str | Path) -> Path:
    """A weights file by path, or by name: looked for in ``$KEEPCOVER_WEIGHTS`` and in the ``weights`` of a checkout.

    The package itself carries those of its denoiser alone: others are found by path or through the variable.
    """
    given = Path(name)
    if given.is_file():
        return given
    named = os.environ.get("KEEPCOVER_WEIGHTS")
    folders = [*([Path(named)] if named else []), Path(__file__).resolve().parents[3] / "weights"]
    if given.name == str(name):  # a bare name, not a path that went wrong
        files = (folder / f"{given.name}{suffix}" for folder in folders for suffix in ("", ".safetensors"))
        if found := next(filter(Path.is_file, files), None):
            return found
    known = ", ".join(sorted(file.stem for folder in folders for file in folder.glob("*.safetensors")))
    missing = f"no weights at {name}; give a path, or set KEEPCOVER_WEIGHTS to their folder"
    raise InputError(f"{missing}. Known by name here: {known or 'none'}")


def load_weights(model: nn.Module, path: str | Path, new_head: bool = False) -> nn.Module:
    """Load a checkpoint (a path, or a name that :func:`find_weights` knows) into a model, in float32 and eval mode.

    Accepts plain state dicts, those wrapped as ``{"state_dict": ...}``, and the ``module.`` / ``1.`` prefixes that data
    parallelism and an outer normalisation layer leave behind. The model's own normalisation constants stay. With
    ``new_head`` so does a last layer for another number of classes than the checkpoint's.
    """
    path = find_weights(path)
    with refusing(f"{path} is not a readable checkpoint"):
        state: Any = unpack(path, sealed=False)[0] if path.suffix == ".safetensors" else _torch_file(path)
    if isinstance(state, dict) and "state_dict" in state:
        state = state["state_dict"]
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in state.items()
    ):
        raise InputError(f"{path} holds no state dict of tensors")
    state, own = from_bytes(state), model.state_dict()
    # Prefixes are stripped only where that helps: a plain nn.Sequential has a layer called "1." of its own.
    plain = {re.sub(r"^((module|1)\.)+", "", name): value for name, value in state.items()}
    given = state if len(set(state) - set(own)) <= len(set(plain) - set(own)) else plain
    constants = {name for name in own if name.split(".")[0] == "normalize"}
    if new_head:
        head = {f"{last_linear(model)[0]}.{part}" for part in ("weight", "bias")} & set(own) & set(given)
        if any(given[name].shape != own[name].shape for name in head):
            given, constants = {name: given[name] for name in given if name not in head}, constants | head
    wrong = {"missing": sorted(set(own) - set(given) - constants), "unknown": sorted(set(given) - set(own))}
    if any(wrong.values()):
        found = [f"{len(names)} {what}{f' (first {names[0]})' if names else ''}" for what, names in wrong.items()]
        raise InputError(f"{path} does not fit {type(model).__name__}: {', '.join(found)}")
    for name, value in given.items():
        if own[name].shape != value.shape:
            shapes = f"{tuple(value.shape)}, {type(model).__name__} expects {tuple(own[name].shape)}"
            raise InputError(f"{path}: {name} has shape {shapes}; is the number of classes right?")
        if value.dtype == torch.int8 and own[name].is_floating_point():
            raise InputError(f"{path}: {name} is stored in 8 bits, and its scales are missing")
    model.load_state_dict({name: value.to(own[name].dtype) for name, value in given.items()}, strict=False)
    return model.eval()


def weights_bytes(model: nn.Module, about: dict[str, Any], bits: int = 16) -> bytes:
    """The model's weights as a safetensors file, in float16 or kernels in 8 bits; normalisation constants belong to the
    architecture and stay out.
    """
    stored = {name: value for name, value in model.state_dict().items() if not name.startswith("normalize.")}
    stored = {name: value.half() if value.is_floating_point() else value for name, value in stored.items()}
    if bits not in BITS:
        raise InputError(f"expected weights in 8 or 16 bits, got {bits}")
    if bits == 8:
        own = model.named_parameters(remove_duplicate=False)  # buffers may hold anything: masks of infinities, grids
        stored |= as_bytes({name: value for name, value in own if name in stored})
    return pack(stored, about)


BITS, SCALE = (8, 16), ".scale_of_int8"


def as_bytes(state: dict[str, Tensor]) -> dict[str, Tensor]:
    r"""Matrices and kernels of a state dict as int8, :math:`w \approx s_o\,b` with one scale :math:`s_o` per output.

    Half the size of float16. Rounding changes a few answers, so the network to measure is the one that :func:`from_bytes` gives back.

    Example:
        >>> stored = as_bytes({"weight": torch.tensor([[1.0, -0.5], [0.0, 0.0]]), "bias": torch.ones(2)})
        >>> {name: value.tolist() for name, value in from_bytes(stored).items()}
        {'weight': [[1.0, -0.5039370059967041], [0.0, 0.0]]}
    """
    stored = {}
    for name, value in state.items():
        if value.is_floating_point() and value.ndim > 1 and value.numel():
            # A GPU divides by 127 as it multiplies by 1/127, and scales of such rows are others when they are stored again.
            rows = value.detach().cpu().float().flatten(1)
            scale = rows.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / 127
            stored |= {name: (rows / scale).round().to(torch.int8).view(value.shape), name + SCALE: scale.flatten()}
    return stored


def from_bytes(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict with every tensor that :func:`as_bytes` stored as it was, up to rounding; others are left alone."""
    found = {name: value for name, value in state.items() if not name.endswith(SCALE)}
    for name in sorted(name.removesuffix(SCALE) for name in set(state) - set(found)):
        scale, value = state[name + SCALE], found.get(name)
        if value is None or value.dtype != torch.int8:
            raise InputError(f"expected scales of tensors of int8 alone, got one for {name!r}")
        if scale.ndim != 1 or scale.shape != value.shape[:1]:
            raise InputError(f"expected one scale per output of {name} {tuple(value.shape)}, got {tuple(scale.shape)}")
        if scale.dtype != torch.float32 or not bool((scale.isfinite() & (scale > 0)).all()):
            raise InputError(f"expected scales of {name} that are positive and finite, in float32")
        found[name] = value.float() * scale.view(-1, *[1] * (value.ndim - 1))
    return found


def _torch_file(path: Path) -> Any:
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            refuse_packed(archive, path.stat().st_size, str(path))
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise InputError(f"{path} holds more than tensors and is refused; save its state dict as safetensors") from None


# -- the last linear layer: what conformal training replaces -----------------------------------------------------------


def last_linear(model: nn.Module) -> tuple[str, nn.Linear]:
    """Name and layer of the classifier's final layer: the last linear layer that the module registers.

    Example:
        >>> last_linear(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))[0]
        '2'
    """
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not found:
        raise InputError(f"{type(model).__name__} has no linear layer to train")
    return found[-1]


def backbone(model: nn.Module) -> nn.Module:
    """A copy of ``model`` without its last linear layer: images in, features out, in eval mode.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> backbone(model)(torch.zeros(1, 4)).shape
        torch.Size([1, 8])
    """
    name, _ = last_linear(model)
    if not name:
        raise InputError("the model is a single linear layer: there is no backbone to freeze")
    body = copy.deepcopy(model).eval()
    body.set_submodule(name, nn.Identity())
    return body


@torch.no_grad()
def check_head_is_last(model: nn.Module, images: Tensor) -> None:
    """Refuse a model whose output is not that of its last linear layer, called once."""
    _, head = last_linear(model)
    given: list[Any] = []
    hook = head.register_forward_hook(lambda _module, _inputs, output: given.append(output))
    try:
        wanted = model(images)
    finally:
        hook.remove()
    if len(given) != 1 or given[0].ndim != 2 or not torch.equal(given[0], wanted):
        found = f"{type(model).__name__} does something after its last linear layer, or uses it elsewhere"
        advice = "train the whole network, or make the linear layer the last step"
        raise InputError(f"{found}; its backbone cannot be frozen by itself: {advice}")


def head_bytes(model: nn.Module) -> bytes:
    """The model's last layer as a small safetensors file, float16, that remembers the backbone it belongs to."""
    _, head = last_linear(model)
    state = {name: value.half() for name, value in head.state_dict().items()}
    return pack(state, {"backbone": fingerprint(backbone(model))})


def load_head(model: nn.Module, path: str | Path) -> nn.Module:
    """Put a trained head in place of the model's last linear layer, in place; refused over another backbone."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"no head at {path}")
    with refusing(f"{path} is not a readable head", *UNREADABLE):
        state, about = unpack(path, sealed=False)
    name, head = last_linear(model)
    own = head.state_dict()
    wanted, found = (", ".join(f"{key} {tuple(part[key].shape)}" for key in sorted(part)) for part in (own, state))
    if wanted != found:
        layer = f"the layer {name!r} of {type(model).__name__}"
        raise InputError(f"{path} does not fit {layer}: expected {wanted}, got {found}")
    if about.get("backbone") not in (None, fingerprint(backbone(model))):
        raise InputError(f"{path} was trained over another backbone; load the weights that its card names first")
    head.load_state_dict({key: value.to(own[key].dtype) for key, value in state.items()})
    return model
