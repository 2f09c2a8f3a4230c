"""Shared fixtures. Shapes and types of holdfast's own functions are checked at run time here, and only here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from jaxtyping import install_import_hook

install_import_hook("holdfast", "beartype.beartype")

# Tensors in tests are small and pytest runs on every core: one thread each, or they wait for one another.
torch.set_num_threads(1)

# Real weights, noisy logits and data for development: beside the checkout, or wherever HOLDFAST_ASSETS points.
ASSETS = Path(os.environ.get("HOLDFAST_ASSETS", Path(__file__).resolve().parents[2] / "shared"))


@pytest.fixture(scope="session")
def golden_folder() -> Path:
    return Path(__file__).parent / "golden"


@pytest.fixture(scope="session")
def assets() -> Path:
    if not ASSETS.is_dir():
        pytest.skip(f"needs development assets (weights, CIFAR); none at {ASSETS}, set HOLDFAST_ASSETS to their folder")
    return ASSETS


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
