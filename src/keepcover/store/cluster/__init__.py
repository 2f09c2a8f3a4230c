"""How much of a cluster a run takes; nothing here needs Ray."""

from __future__ import annotations

import math
from dataclasses import dataclass

from keepcover.errors import InputError


@dataclass(frozen=True)
class Cluster:
    """Where the workers are, how many, and what each takes.

    Args:
        address: ``auto`` for the cluster this machine belongs to, ``host:port`` of its head, or ``ray://host:port`` of a
            client server. Without one, ``RAY_ADDRESS`` decides, or this machine alone is used, for this run.
        workers: how many; as many as the cluster has room for by default.
        cpus: cores that Ray reserves for a worker.
        gpus: the part of a GPU that a worker gets; one where the store is for CUDA, and none where it is for the CPU.
        threads: CPU threads of torch in a worker; as many as ``cpus`` by default. On a CPU the last bit of a logit may
            depend on it, so compare stores only for equal threads.
        ahead: chunks a worker has at a time: one that it computes, the others wait there. With ``workers`` it bounds what
            is in memory, however large the data are.
        attempts: how often a chunk may end its worker before the run stops.
        patience: seconds to wait while the cluster has no worker at all.

    Example:
        >>> Cluster(workers=2).gpus_for("cuda")
        1.0
        >>> Cluster(gpus=0.5).gpus_for("cpu")
        Traceback (most recent call last):
        ...
        keepcover.errors.InputError: the store is for cpu, and a worker there needs no GPU; leave gpus out, or ...
    """

    address: str | None = None
    workers: int | None = None
    cpus: float = 1.0
    gpus: float | None = None
    threads: int | None = None
    ahead: int = 2
    attempts: int = 3
    patience: float = 600.0

    def __post_init__(self) -> None:
        for name in ("workers", "threads", "ahead", "attempts"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"expected {name} of at least 1, got {value}")
        for name in ("cpus", "patience"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"expected {name} above 0, got {getattr(self, name):g}")
        if self.gpus is not None and not (0 <= self.gpus < 1 or (1 <= self.gpus < math.inf and self.gpus % 1 == 0)):
            raise InputError(f"expected a part of a GPU below 1 or a whole number of them, got {self.gpus:g}")
        if self.address is not None and not self.address.strip():
            raise InputError("expected an address, auto, host:port or ray://host:port, got an empty one")

    @property
    def own_threads(self) -> int:
        """CPU threads of torch in a worker."""
        return self.threads or max(1, int(self.cpus))

    def gpus_for(self, device: str) -> float:
        """What a worker that computes on this kind of device takes."""
        wanted = (1.0 if device == "cuda" else 0.0) if self.gpus is None else float(self.gpus)
        if device == "cuda" and not wanted:
            raise InputError("the store is for cuda, so every worker needs a part of a GPU; leave gpus out, or above 0")
        if device != "cuda" and wanted:
            cuda = "make the key for cuda: dataclasses.replace(key, device='cuda')"
            raise InputError(f"the store is for {device}, and a worker there needs no GPU; leave gpus out, or {cuda}")
        return wanted
