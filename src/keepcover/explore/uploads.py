"""Images on show by name: ``g12`` is the gallery's, ``u1a2b...`` an upload that is kept while there is room."""

from __future__ import annotations

import hashlib
import re
import threading
from collections import OrderedDict
from dataclasses import dataclass

from torch import Tensor

from keepcover.data import Labelled
from keepcover.web.problems import Problem

KEPT = 64


@dataclass(frozen=True)
class Shown:
    """One image [1, c, h, w], the number that keys its noise, and its label where it is known."""

    pixels: Tensor
    id: int
    label: int | None

    @property
    def exchangeable(self) -> bool:
        """Whether it comes from where the calibration points come from; of an upload that is not known."""
        return self.label is not None


class Images:
    """The gallery and the latest uploads, in memory only."""

    def __init__(self, gallery: Labelled, kept: int = KEPT) -> None:
        self.gallery, self.kept = gallery, kept
        self._uploads: OrderedDict[str, Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, pixels: Tensor) -> str:
        """Keep an upload; the same pixels have the same name, and so the same noise."""
        name = "u" + hashlib.sha256(pixels.contiguous().numpy().tobytes()).hexdigest()[:12]
        with self._lock:
            self._uploads[name] = pixels
            self._uploads.move_to_end(name)
            while len(self._uploads) > self.kept:
                self._uploads.popitem(last=False)
        return name

    def get(self, name: str) -> Shown:
        found = re.fullmatch(r"g(\d{1,9})|u([0-9a-f]{12})", name)
        if found and found[1] and int(found[1]) < len(self.gallery):
            index = int(found[1])
            return Shown(self.gallery.images[index : index + 1], index, int(self.gallery.labels[index]))
        if found and found[2]:
            with self._lock:
                pixels = self._uploads.get(name)
            if pixels is None:
                raise Problem("not_found", "this upload is no longer kept; upload the image again")
            return Shown(pixels, int(found[2], 16) | 1 << 50, None)
        raise Problem("not_found", f"no image {name[:40]!r}; the gallery has g0 to g{len(self.gallery) - 1}")
