"""The last linear layer of a classifier: what conformal training replaces."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from keepcover.engine.fingerprint import fingerprint
from keepcover.errors import InputError, refusing
from keepcover.sealing import UNREADABLE, pack, unpack


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
        raise InputError(
            f"{type(model).__name__} does something after its last linear layer, or uses it elsewhere; its backbone cannot be "
            "frozen by itself: train the whole network, or make the linear layer the last step"
        )


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
