"""The one shape in which datasets come."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from jaxtyping import Shaped
from torch import Tensor

from keepcover.errors import InputError


@dataclass(frozen=True)
class Labelled:
    """Images [n, channels, height, width] in [0, 1], labels [n] and the names of the classes; or rows of features with numbers
    to predict in place of labels, and no classes.
    """

    name: str
    images: Shaped[Tensor, "n ..."]
    labels: Shaped[Tensor, "n ..."]
    class_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: Tensor | slice) -> Labelled:
        return Labelled(self.name, self.images[index], self.labels[index], self.class_names)

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        """(images, labels), as every function of keepcover takes them."""
        return self.images, self.labels

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of what the data are: shape, pixels and labels, whatever the names, the device or the memory layout.

        Computed once; do not change the tensors afterwards.

        Example:
            >>> data = Labelled("ones", torch.ones(2, 1, 1, 1), torch.tensor([0, 1]), ("a", "b"))
            >>> data.fingerprint == data[:].fingerprint, data.fingerprint == data[:1].fingerprint
            (True, False)
        """
        digest = hashlib.sha256(f"{self.images.dtype} {tuple(self.images.shape)}".encode())
        for tensor in (self.images, self.labels if self.labels.is_floating_point() else self.labels.long()):
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())  # type: ignore[arg-type]
        return digest.hexdigest()

    def split(self, *sizes: int, seed: int = 0) -> tuple[Labelled, ...]:
        """Random disjoint parts of the given sizes; the last may be -1 for the rest."""
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        lengths = [*sizes[:-1], len(self) - sum(sizes[:-1]) if sizes[-1] == -1 else sizes[-1]]
        if min(lengths) < 0 or sum(lengths) > len(self):
            parts = ", ".join(map(str, sizes))
            raise InputError(f"cannot split {len(self)} examples of {self.name} into parts of {parts}")
        return tuple(self[part] for part in order[: sum(lengths)].split(lengths))


def joined(several: Sequence[Labelled]) -> Labelled:
    """One set of data from several of one shape, the classes of the first before those of the second.

    Example:
        >>> one = Labelled("one", torch.zeros(2, 1, 1, 1), torch.tensor([0, 1]), ("a", "b"))
        >>> both = joined([one, one])
        >>> both.name, both.labels.tolist(), both.class_names
        ('one+one', [0, 1, 2, 3], ('a', 'b', 'a', 'b'))
    """
    kinds = {(data.images.dtype, data.images.shape[1:]) for data in several}
    labelled = all(
        data.labels.ndim == 1
        and not data.labels.is_floating_point()
        and len(data.labels)
        and 0 <= int(data.labels.min()) <= int(data.labels.max()) < len(data.class_names)
        for data in several
    )
    if len(kinds) != 1 or not labelled:
        found = "; ".join(
            f"{data.name}: {data.images.dtype} {tuple(data.images.shape[1:])}, labels {data.labels.dtype} "
            f"{tuple(data.labels.shape)} of {len(data.class_names)} classes"
            for data in several
        )
        wanted = "expected images of one shape and type, each with one label from 0 to the number of its classes - 1"
        raise InputError(f"{wanted}, to join; got {found or 'no data'}. Make them alike first, or train on one of them")
    before = [0, *accumulate(len(data.class_names) for data in several)]
    return Labelled(
        "+".join(data.name for data in several),
        torch.cat([data.images for data in several]),
        torch.cat([data.labels.long() + first for data, first in zip(several, before, strict=False)]),
        tuple(name for data in several for name in data.class_names),
    )
