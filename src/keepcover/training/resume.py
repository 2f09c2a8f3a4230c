"""Checkpoints of training: written under a temporary name first, checksummed, read only where they belong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from keepcover.errors import InputError
from keepcover.files import write_file
from keepcover.sealing import pack, unpack


@dataclass(frozen=True)
class Checkpoint:
    """Where a run stands: its tensors, the epochs done and the seconds spent."""

    state: Mapping[str, Tensor]
    epoch: int
    seconds: float

    def save(self, path: Path, recipe: Mapping[str, Any]) -> None:
        """Replace ``path`` in one step: a kill leaves the old checkpoint or the new one."""
        write_file(path, pack(self.state, {"epoch": self.epoch, "seconds": self.seconds, "recipe": recipe}))

    @classmethod
    def load(cls, path: Path, recipe: Mapping[str, Any], expected: Mapping[str, Tensor]) -> Checkpoint | None:
        """The checkpoint at ``path``; None where there is none, an error where it belongs to another run."""
        if not path.is_file():
            return None
        try:
            state, facts = unpack(path)
        except (SafetensorError, OSError, ValueError) as error:
            raise InputError(f"{path} is not a readable checkpoint ({error}); delete it to start over") from None
        if facts.get("recipe") != json.loads(json.dumps(recipe)):
            raise InputError(
                f"{path} belongs to another recipe, other data or other base weights; delete it to start over, or train into another file"
            )
        shapes = {name: value.shape for name, value in state.items()}
        if shapes != {name: value.shape for name, value in expected.items()}:
            raise InputError(f"{path} belongs to another architecture; delete it or train into another file")
        return cls(state, int(facts["epoch"]), float(facts["seconds"]))


def checkpoint_path(out: str | Path) -> Path:
    """Where the checkpoint of a run that writes ``out`` lies.

    Example:
        >>> checkpoint_path("weights/model.safetensors").name
        'model.checkpoint.safetensors'
    """
    out = Path(out)
    if out.suffix != ".safetensors":
        raise InputError(f"expected an output file that ends in .safetensors, got {out.name}")
    return out.with_suffix(".checkpoint.safetensors")
