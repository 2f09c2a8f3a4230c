"""Writing and reading stored logits, beside plain files of the same bytes.

Writing ends on the disk on both sides (fsync). The store also computes a SHA-256 of every chunk, reads it back once written
and compares it before it is read; the pages are in the system's cache on both sides.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.material import logits_like_a_network
from benchmarks.timing import Options, beside, in_turn
from keepcover.engine.smoother import Smoother
from keepcover.store import LogitStore, StoreKey


def measure(options: Options) -> dict[str, Any]:
    n, draws, classes = options.pick((128, 16, 10), (2048, 256, 100))
    logits, labels = logits_like_a_network(n, draws, classes)
    half = logits.half()
    del logits
    bytes_in_all = half.numel() * half.element_size()
    owner = Smoother(nn.Sequential(nn.Flatten(), nn.Linear(4, classes)), 0.25, progress=False)
    key = StoreKey.of(owner, (torch.zeros(n, 1, 2, 2), labels), seed=0)
    with tempfile.TemporaryDirectory() as root:
        plain = Path(root) / "plain"
        plain.mkdir()
        store = LogitStore.open(root, key, draws=draws, progress=False)
        chunks = store.missing(draws)
        parts = [
            half[chunk.rows.start : chunk.rows.stop, chunk.draws.start : chunk.draws.stop].contiguous()
            for chunk in chunks
        ]

        def write() -> None:
            fresh = LogitStore.open(root, key, draws=draws, restart=True, progress=False)
            for chunk, part in zip(chunks, parts, strict=True):
                fresh.write(chunk, part, labels[chunk.rows.start : chunk.rows.stop])

        def write_plain() -> None:
            for at, part in enumerate(parts):
                with (plain / str(at)).open("wb") as file:
                    file.write(part.numpy().tobytes())
                    file.flush()
                    os.fsync(file.fileno())

        def read() -> torch.Tensor:
            return LogitStore.at(store.folder, progress=False).read()

        def read_plain() -> list[bytes]:
            return [(plain / str(at)).read_bytes() for at in range(len(parts))]

        times = in_turn(
            {"write": write, "plain write": write_plain, "read": read, "plain read": read_plain}, options.repeats
        )
        assert torch.equal(read(), half)
    sizes = {"images": n, "draws": draws, "classes": classes, "files": len(chunks), "MB": bytes_in_all / 1e6}
    rows = [
        beside(f"store, {what}", times[what], f"plain files, {what}", times[f"plain {what}"], sizes)
        for what in ("write", "read")
    ]
    return {"rows": [{**row, "MB_per_second": bytes_in_all / 1e6 / row["seconds"]} for row in rows]}
