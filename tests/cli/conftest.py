"""What several commands read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import save_file

from tests.cli.runner import noisy_logits


@pytest.fixture(scope="session")
def logits_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("logits") / "noisy.safetensors"
    logits, labels = noisy_logits()
    save_file({"logits": logits, "labels": labels}, path)
    np.savez(path.with_suffix(".npz"), logits=logits.numpy(), labels=labels.numpy())
    return path
