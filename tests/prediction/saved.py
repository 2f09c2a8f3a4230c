"""Saved predictors in the hands of an author who knows the format: changed, and sealed again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor


def contents(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata and the tensors of a safetensors file, unchecked."""
    with safe_open(path, framework="pt") as file:
        return file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any], seal: bool = True) -> None:
    """Change the manifest; with ``seal``, make its checksum right again."""
    metadata, tensors = contents(path)
    manifest = json.loads(metadata["keepcover"])
    change(manifest)
    text = json.dumps(manifest, sort_keys=True)
    metadata = {"keepcover": text, "sha256": hashlib.sha256(text.encode()).hexdigest() if seal else metadata["sha256"]}
    save_file(tensors, path, metadata)
