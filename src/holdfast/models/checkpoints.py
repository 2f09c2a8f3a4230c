"""Weights into models: safetensors, or torch files read with ``weights_only=True``. Nothing is ever unpickled freely."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from holdfast.errors import InputError


def load_weights(model: nn.Module, path: str | Path) -> nn.Module:
    """Load a checkpoint into a model, in float32 and eval mode, and say what does not fit.

    Accepts plain state dicts, those wrapped as ``{"state_dict": ...}``, and the ``module.`` / ``1.`` prefixes that data
    parallelism and an outer normalisation layer leave behind. The model's own normalisation constants stay.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"no weights at {path}")
    try:
        state: Any = (
            load_file(path)
            if path.suffix == ".safetensors"
            else torch.load(path, map_location="cpu", weights_only=True)
        )
    except (SafetensorError, OSError, EOFError, RuntimeError, ValueError, KeyError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"{path} is not a readable checkpoint ({reason})") from None
    except Exception as error:  # a pickle that asks for more than tensors
        raise InputError(
            f"{path} holds more than tensors and is refused; save its state dict as safetensors ({type(error).__name__})"
        ) from None
    if isinstance(state, dict) and "state_dict" in state:
        state = state["state_dict"]
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise InputError(f"{path} holds no state dict of tensors")
    own = model.state_dict()
    # Prefixes are stripped only where that helps: a plain nn.Sequential has a layer called "1." of its own.
    plain = {_plain(name): value for name, value in state.items()}
    given = state if len(set(state) - set(own)) <= len(set(plain) - set(own)) else plain
    constants = {name for name in own if name.split(".")[0] == "normalize"}
    missing, unknown = sorted(set(own) - set(given) - constants), sorted(set(given) - set(own))
    if missing or unknown:
        raise InputError(
            f"{path} does not fit {type(model).__name__}: {len(missing)} missing"
            + (f" (first {missing[0]})" if missing else "") + f", {len(unknown)} unknown" + (f" (first {unknown[0]})" if unknown else "")
        )  # fmt: skip
    for name, value in given.items():
        if own[name].shape != value.shape:
            raise InputError(
                f"{path}: {name} has shape {tuple(value.shape)}, {type(model).__name__} expects {tuple(own[name].shape)}; "
                "is the number of classes right?"
            )
    model.load_state_dict({name: value.to(own[name].dtype) for name, value in given.items()}, strict=False)
    return model.eval()


def _plain(name: str) -> str:
    while name.startswith(("module.", "1.")):
        name = name.split(".", 1)[1]
    return name
