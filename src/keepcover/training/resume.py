"""Checkpoints of training: written under a temporary name first, checksummed, read only where they belong."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keepcover.errors import InputError, refusing
from keepcover.files import check_folder, write_file
from keepcover.sealing import UNREADABLE, pack, unpack


@dataclass(frozen=True)
class Checkpoint:
    """Where a run stands: its tensors, the epochs done and to do in all, and the seconds spent."""

    state: Mapping[str, Tensor]
    epoch: int
    epochs: int
    seconds: float

    def save(self, path: Path, recipe: Mapping[str, Any]) -> None:
        """Replace ``path`` in one step: a kill leaves the old checkpoint or the new one."""
        facts = {"epoch": self.epoch, "epochs": self.epochs, "seconds": self.seconds, "recipe": recipe}
        write_file(path, pack(self.state, facts))

    @classmethod
    def load(cls, path: Path, recipe: Mapping[str, Any], expected: Mapping[str, Tensor]) -> Checkpoint | None:
        """The checkpoint at ``path``; None where there is none, an error where it belongs to another run."""
        if not path.is_file():
            return None
        with refusing(f"{path} is not a readable checkpoint", *UNREADABLE, advice="delete it to start over"):
            state, facts = unpack(path)
        if facts.get("recipe") != json.loads(json.dumps(recipe)):
            raise InputError(
                f"{path} belongs to another recipe, other data or other base weights; delete it to start over, or train into another file"
            )
        shapes = {name: value.shape for name, value in state.items()}
        if shapes != {name: value.shape for name, value in expected.items()}:
            raise InputError(f"{path} belongs to another architecture; delete it or train into another file")
        return cls(state, int(facts["epoch"]), int(facts["epochs"]), float(facts["seconds"]))


def checkpoint_for(out: Path, resume: bool) -> Path:
    """Where the checkpoint of a run that writes ``out`` lies; that both can be written is checked before any work is done.

    An earlier checkpoint is deleted unless the run is to go on from it.
    """
    if out.suffix != ".safetensors":
        raise InputError(f"expected an output file that ends in .safetensors, got {out.name}")
    checkpoint = out.with_suffix(".checkpoint.safetensors")
    check_folder(out.parent, out.name, out.with_suffix(".json").name, checkpoint.name)
    if not resume:
        checkpoint.unlink(missing_ok=True)
    return checkpoint


def write_results(
    out: Path, content: bytes, card: Mapping[str, Any], seconds: float, device: torch.device
) -> dict[str, Any]:
    """Write trained weights and, beside them, their card with cost and checksum; the checkpoint has done its service."""
    cuda = device.type == "cuda"
    whole = {
        **card,
        "seconds": round(seconds, 1),
        "hardware": torch.cuda.get_device_name(device) if cuda else f"{torch.get_num_threads()} CPU threads",
        "torch": torch.__version__,
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    write_file(out, content)
    write_file(out.with_suffix(".json"), (json.dumps(whole, indent=1) + "\n").encode())
    out.with_suffix(".checkpoint.safetensors").unlink(missing_ok=True)
    return whole
