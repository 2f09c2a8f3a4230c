"""A smoother that remembers noisy outputs, so that many predictors on the same images share one pass of the network."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from keepcover.engine.smoother import Classifier, Smoother
from keepcover.noise import Noise, Stream

CHUNK = 32  # images; the same for any number of draws, or nothing would be found again


class RememberingSmoother(Smoother):
    """Noise is keyed by draw, so the first 16 of 256 remembered draws are exactly what 16 draws would have been.

    Outputs are kept on the CPU, each chunk at the largest number of draws asked for so far.

    Args:
        model, noise: as for :class:`Smoother`, as are ``options``.
        lock: held during every forward pass and released between two, so that threads and attacks share the model.
        memory: bytes of outputs kept, the least recently used dropped first; no bound by default.
        look: called with the number of noisy images after every forward pass.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
        >>> smoother = RememberingSmoother(model, 0.5)
        >>> images, noise = torch.zeros(2, 1, 2, 2), Stream(0, "test")
        >>> many = smoother.logits(images, 16, noise)
        >>> torch.equal(smoother.logits(images, 4, noise), many[:, :4])
        True
    """

    measures = False  # what is remembered takes no time, whatever its size

    def __init__(
        self,
        model: Classifier,
        noise: Noise | str | float,
        *,
        lock: threading.Lock | None = None,
        memory: int | None = None,
        look: Callable[[int], None] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model, noise, **options)
        self.lock, self.memory, self.look = lock or nullcontext(), memory, look
        self._seen: OrderedDict[tuple[str, Stream], Tensor] = OrderedDict()
        self._books = threading.Lock()

    def images_per_chunk(self, images: Tensor, draws: int, share: float = 1.0) -> int:  # noqa: ARG002
        return CHUNK

    def _chunk(self, images: Tensor, ids: Tensor, span: range, stream: Stream, share: float = 1.0) -> Tensor:
        content = hashlib.sha256(images.cpu().contiguous().numpy().tobytes() + ids.cpu().numpy().tobytes()).hexdigest()
        key = (content, stream)
        with self._books:
            known = self._seen.get(key)
            if known is not None:
                self._seen.move_to_end(key)
        done = 0 if known is None else known.shape[1]
        if known is None or done < span.stop:
            more = super()._chunk(images, ids, range(done, span.stop), stream, share).cpu()
            known = more if known is None else torch.cat([known, more], dim=1)
            self._keep(key, known)
        return known[:, span.start : span.stop].to(self.device)

    def _run(self, inputs: Tensor) -> Tensor:
        with self.lock:
            outputs = super()._run(inputs)
        if self.look:
            self.look(len(outputs))
        return outputs

    def _keep(self, key: tuple[str, Stream], outputs: Tensor) -> None:
        with self._books:
            self._seen[key] = outputs
            self._seen.move_to_end(key)
            while self.memory is not None and sum(kept.nbytes for kept in self._seen.values()) > self.memory:
                self._seen.popitem(last=False)
