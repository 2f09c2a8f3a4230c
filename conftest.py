"""Chance in tests, doctests included, falls the same way for whoever runs them.

Seeds of the operating system come from a generator instead, which starts anew with every fixture and every test. Services in
processes of their own still have fresh noise.
"""

from __future__ import annotations

import random
import secrets
from typing import Any

import pytest
import torch

_ENTROPY = random.Random()
secrets.randbits = _ENTROPY.getrandbits  # what keepcover.noise.fresh_seed asks


def _begin(name: str) -> None:
    """One seed and one thread, whatever ran before: tensors in tests are small and pytest runs on every core, so threads would
    wait for one another. A service that was built here left two, and training took 50 times as long.
    """
    _ENTROPY.seed(name)
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> None:
    if fixturedef.scope != "function":  # made for whichever test asks first
        _begin(f"{fixturedef.baseid}::{fixturedef.argname}[{getattr(request, 'param_index', 0)}]")


@pytest.fixture(autouse=True)
def _alike(request: pytest.FixtureRequest) -> None:
    _begin(request.node.nodeid)
