"""Files of noisy logits: what is no data is refused unread."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest

from keepcover.errors import InputError
from keepcover.store import logits_file
from keepcover.store.logits_file import names_in, read_arrays


def test_arrays_that_explode_are_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros shrink to a thousandth. Up to a gigabyte that is no harm; beyond, it is no data."""
    monkeypatch.setattr(logits_file, "ALWAYS", 1 << 20)
    noise = np.random.default_rng(0).normal(size=(100, 8, 3)).astype(np.float32)
    np.savez_compressed(tmp_path / "small.npz", logits=np.zeros((100, 8, 3), np.float32), labels=np.zeros(100, int))
    np.savez_compressed(tmp_path / "fine.npz", logits=np.tile(noise, (20, 1, 1)), labels=np.zeros(2000, int))
    for name in ("small.npz", "fine.npz"):
        assert read_arrays(tmp_path / name, "logits")[0].shape[1:] == (8, 3)
    np.savez_compressed(tmp_path / "bomb.npz", logits=np.zeros((20_000, 64, 8), np.float32), labels=np.zeros(9, int))
    for read in (names_in, lambda path: read_arrays(path, "labels")):
        with pytest.raises(InputError, match=r"bomb\.npz has \d+ bytes and would take .* GiB when read"):
            read(tmp_path / "bomb.npz")


def test_an_array_that_claims_more_than_it_has_is_one_line(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (35184372088832,), }"
        archive.writestr("logits.npy", b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + header.ljust(117) + b"\n")
    with pytest.raises(InputError, match="not a readable safetensors or npz file") as caught:
        read_arrays(tmp_path / "x.npz", "logits")
    assert "\n" not in str(caught.value)
