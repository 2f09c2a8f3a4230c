"""Whatever users bring (tensors, arrays, datasets, loaders) as batches of checked images, labels and ids."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, SequentialSampler, Subset

from keepcover.errors import InputError, warn
from keepcover.noise.stream import widened
from keepcover.tasks.metrics import as_labels


@dataclass(frozen=True)
class Batch:
    """Images [b, ...] in pixel units, their labels if there are any, and the ids that key their noise."""

    images: Tensor
    labels: Tensor | None
    ids: Tensor

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: Tensor | slice) -> Batch:
        return Batch(self.images[index], None if self.labels is None else self.labels[index], self.ids[index])

    def to(self, device: torch.device) -> Batch:
        """The same on another device; labels stay where they are."""
        return Batch(self.images.to(device), self.labels, self.ids.to(device))


def extremes(values: Tensor) -> tuple[float, float]:
    """The smallest and the largest value in one pass; NaN where there is one, so they tell whether all are finite.

    Example:
        >>> extremes(torch.tensor([3.0, 1.0, 2.0])), extremes(torch.tensor([3.0, torch.nan]))
        ((1.0, 3.0), (nan, nan))
    """
    low, high = torch.stack(values.aminmax()).double().tolist()
    return low, high


@dataclass(frozen=True)
class InputRange:
    """Shape and range of the inputs that a predictor was calibrated on.

    Example:
        >>> seen = InputRange.of(torch.zeros(5, 1, 2, 2)).union(InputRange.of(torch.ones(3, 1, 2, 2)))
        >>> seen.shape
        (1, 2, 2)
        >>> seen.check(255 * torch.ones(5, 1, 2, 2), epsilon=0.5)
        Traceback (most recent call last):
        ...
        keepcover.errors.InputError: the predictor was calibrated on values in [0, 1], got values in [255, 255]; ...
    """

    shape: tuple[int, ...] | None  # None where images of several shapes were seen
    low: float
    high: float
    tokens: bool = False  # integers

    @classmethod
    def of(cls, images: Tensor) -> InputRange:
        return cls(tuple(images.shape[1:]), *extremes(images), not images.is_floating_point())

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> InputRange:
        shape = None if saved["shape"] is None else tuple(saved["shape"])
        return cls(shape, float(saved["low"]), float(saved["high"]), bool(saved["tokens"]))

    def union(self, other: InputRange) -> InputRange:
        if self.tokens != other.tokens:
            raise InputError("expected tokens (integers) or numbers (floats), got batches of both")
        shape = self.shape if self.shape == other.shape else None
        return InputRange(shape, min(self.low, other.low), max(self.high, other.high), self.tokens)

    def __str__(self) -> str:
        shape = "several shapes" if self.shape is None else str(list(self.shape))
        return f"{shape} in [{self.low:.3g}, {self.high:.3g}]"

    def check(self, images: Any, epsilon: float) -> None:
        """Refuse inputs of another shape, and images in other units: twice their own span away, attack included."""
        images = torch.as_tensor(images)
        if self.shape is not None:
            check_shape(self.shape, images)
        if self.tokens != (not images.is_floating_point()) and images.ndim == 2:
            kinds = ("numbers (floats)", "tokens (integers)")
            raise InputError(f"the predictor was calibrated on {kinds[self.tokens]}, got {images.dtype}")
        if images.ndim < 3 or not images.is_floating_point() or images.numel() == 0:
            return  # features may have outliers; what is not float is refused elsewhere
        low, high = extremes(images)
        reach = 2 * max(1.0, self.high - self.low) + epsilon
        if low < self.low - reach or high > self.high + reach:
            known, found = f"[{self.low:.3g}, {self.high:.3g}]", f"[{low:.3g}, {high:.3g}]"
            said = f"the predictor was calibrated on values in {known}, got values in {found}"
            raise InputError(f"{said}; bring the images to the same units")


def check_shape(expected: tuple[int, ...], images: Any) -> None:
    """Refuse inputs of another shape than the calibrated one."""
    found = tuple(torch.as_tensor(images).shape)
    if found[1:] != expected:
        known = ", ".join(map(str, expected))
        raise InputError(f"the predictor was calibrated on inputs [n, {known}], got {list(found)}")


class _Watched:
    """Batches, each shown to ``look`` before it is used."""

    def __init__(self, data: Any, look: Callable[[Any], None]) -> None:
        self.data, self.look = data, look

    def __iter__(self) -> Iterator[Any]:
        for raw in _raw_batches(self.data):
            self.look(_pair(raw)[0])
            yield raw


def watched(data: Any, look: Callable[[Any], None]) -> Any:
    """The same data; ``look`` is called with the images of every batch before anything else sees them."""
    images, _ = _in_one_piece(data)
    if images is None:
        return _Watched(data, look)
    look(images)
    return data


def length(data: Any) -> int | None:
    """How many examples there are, where that is known before reading them."""
    images, _ = _in_one_piece(data)
    if images is not None:
        return len(images)
    if isinstance(data, _Watched):
        return length(data.data)
    if isinstance(data, DataLoader):
        if data.batch_sampler is None or not isinstance(data.sampler, Sized):
            return None
        picked = len(data.sampler)
        return picked // data.batch_size * data.batch_size if data.drop_last and data.batch_size else picked
    if isinstance(data, tuple | list):  # of batches
        return sum(len(_pair(batch)[0]) for batch in data)
    _check_data(data)
    return len(data) if isinstance(data, Sized) else None


def in_order(data: Any) -> int | None:
    """:func:`length` of data whose examples are known by their places, as the groups of a promise are; or a number as it is.

    A loader that shuffles gives examples at other places than the caller's, and would hand each the group of another.
    """
    if isinstance(data, int | None):
        return data
    if isinstance(data, DataLoader) and not isinstance(data.dataset, IterableDataset):
        by = data.batch_sampler
        if not isinstance(data.sampler if by is None else getattr(by, "sampler", None), SequentialSampler):
            what = "groups belong to points by their places, and this loader reads points in an order of its own"
            raise InputError(f"{what}: give its dataset, or a loader that does not shuffle")
    return length(data)


def _check_data(data: Any) -> None:
    if not isinstance(data, Tensor | Dataset | Iterable) or isinstance(data, str | bytes | dict):
        wanted = "images as a tensor or array, (images, labels), a dataset or a loader"
        raise InputError(f"expected {wanted}, got {type(data).__name__}")


def _in_one_piece(data: Any) -> tuple[Any, Any]:
    """Images and labels in memory, labels None where there are none; (None, None) for a tuple of batches and all else."""
    if isinstance(data, Tensor | np.ndarray):
        return data, None
    parts = data if isinstance(data, tuple) and len(data) == 2 else [None]
    return (data[0], data[1]) if all(isinstance(part, Tensor | np.ndarray | list) for part in parts) else (None, None)


def in_memory(data: Any) -> bool:
    """Whether the examples can be read again in the same order."""
    return isinstance(data, Tensor | np.ndarray | tuple | list)


class Rows:
    """Which examples have passed, 8 bytes each: a hash of inputs and label, so that two sets of data can be compared.

    Example:
        >>> images, labels = torch.rand(6, 3), torch.arange(6)
        >>> one, two = Rows(), Rows()
        >>> for batch in batches((images[:4], labels[:4])):
        ...     one.add(batch)
        >>> for batch in batches((images[3:].double(), labels[3:])):
        ...     two.add(batch)
        >>> one.shared(two)
        1
    """

    def __init__(self) -> None:
        self._digests = bytearray()

    def add(self, batch: Batch) -> None:
        images = batch.images.flatten(1).cpu()
        # In float32 where that loses nothing, and with one zero: what is equal as numbers has equal bytes.
        narrow = images.float()
        rows = ((narrow if torch.equal(narrow.to(images.dtype), images) else images.double()) + 0.0).numpy()
        labels = [None] * len(batch) if batch.labels is None else batch.labels.tolist()
        for row, label in zip(rows, labels, strict=True):
            self._digests += hashlib.blake2b(row.tobytes(), digest_size=8, salt=str(label).encode()[-16:]).digest()

    @property
    def hashes(self) -> np.ndarray:
        return np.frombuffer(bytes(self._digests), dtype=np.uint64)

    def shared(self, other: Rows) -> int:
        """How many of these examples are among the others too, beyond what repetitions within either explain.

        Rows of few discrete features repeat by chance, within each set as between them; rows of pixels do not.
        """
        repeated = sum(len(rows.hashes) - len(np.unique(rows.hashes)) for rows in (self, other))
        return max(0, int(np.isin(self.hashes, other.hashes).sum()) - repeated)


def take(data: Any, rows: Sequence[int] | Tensor) -> Any:
    """The examples at these positions, from data that can be read in any order.

    Example:
        >>> images, labels = take((torch.arange(12.0).view(4, 3), torch.arange(4)), [3, 0])
        >>> images[:, 0], labels
        (tensor([9., 0.]), tensor([3, 0]))
    """
    index = torch.as_tensor(rows, dtype=torch.int64)
    images, labels = _in_one_piece(data)
    if images is not None:
        some = torch.as_tensor(images)[index]
        return some if labels is None else (some, as_labels(labels)[index])
    if hasattr(data, "subset"):  # a dataset that knows how, and keeps its workers
        return data.subset(index)
    if isinstance(data, Dataset) and isinstance(data, Sized):
        return Subset(data, index.tolist())
    wanted = "data that can be read in any order, (images, labels) or a dataset with a length"
    advice = "a loader gives each example once, in its own order: pass its dataset"
    raise InputError(f"expected {wanted}, got {type(data).__name__}; {advice}")


def batches(data: Any, ids: Any = None, size: int | None = None, labelled: bool = False) -> Iterator[Batch]:
    """Read ``data`` once, in order.

    Args:
        data: images; ``(images, labels)``; a dataset; a ``DataLoader``; or any iterable of such batches.
        ids: integers that key the noise, one per example; positions by default.
        size: examples per batch where the data do not come in batches already; by default 256, or more small ones that are
            in memory.
        labelled: whether labels are required.
    """
    offset, given = 0, None if ids is None else check_ids(ids)
    for raw in _raw_batches(data, size):
        images, labels = _pair(raw)
        if labelled and labels is None:
            raise InputError("expected labelled data: (images, labels), a dataset or a loader that yields both")
        images = check_images(images, first=offset == 0)
        if labels is not None:
            labels = as_labels(labels)
            if labels.ndim < 1 or len(labels) != len(images):
                found = f"{len(images)} images and labels {tuple(labels.shape)}"
                raise InputError(f"expected one label per image, got {found}")
        end = offset + len(images)
        if given is not None and len(given) < end:
            raise InputError(f"expected one id per image, got {len(given)} ids for at least {end} images")
        yield Batch(images, labels, torch.arange(offset, end) if given is None else given[offset:end])
        offset = end
    if offset == 0:
        raise InputError("expected at least one image, got none")
    if given is not None and len(given) != offset:
        raise InputError(f"expected one id per image, got {len(given)} ids for {offset} images")


def check_ids(ids: Any, n: int | None = None) -> Tensor:
    """Ids that key noise, as int64 on the CPU; n of them where n is given."""
    found = torch.as_tensor(ids)
    if found.ndim != 1 or found.is_floating_point() or found.unique().numel() != len(found):
        raise InputError("expected ids that are distinct integers in one dimension: two examples must not share noise")
    if n is not None and len(found) != n:
        raise InputError(f"expected one id per point, got {len(found)} ids for {n} points")
    return found.long().cpu()


def check_images(images: Any, first: bool = True) -> Tensor:
    """Float images without NaN, in float32 or as they come in float64; on the first batch, a warning where the pixel range
    makes epsilon meaningless.

    Vectors [n, features] are not pixels: their units are their owner's, so their range is not judged. Integers [n, length] are
    tokens and stay what they are.
    """
    try:
        images = torch.as_tensor(images)
    except (TypeError, ValueError, RuntimeError):
        advice = "stack them into one, and give labels by themselves"
        raise InputError(
            f"expected images [n, ...] as a tensor or array, got {type(images).__name__}; {advice}"
        ) from None
    if images.ndim < 2:
        raise InputError(f"expected images [n, ...], got shape {tuple(images.shape)}; add a batch dimension")
    if images.ndim == 2 and not images.is_floating_point() and images.dtype != torch.bool:
        return images.long()
    if not images.is_floating_point():
        convert = "convert with images.float() / 255 (epsilon and sigma are in those units)"
        raise InputError(f"expected float images in [0, 1], got {images.dtype}; {convert}")
    low, high = extremes(images) if images.numel() else (0.0, 0.0)
    if not (math.isfinite(low) and math.isfinite(high)):
        bad = int((~images.isfinite()).flatten(1).any(dim=1).nonzero()[0, 0])
        raise InputError(f"images contain NaN or infinity, first in image {bad} of the batch; clean the data first")
    if first and images.ndim > 2 and high > 8:
        so = "images seem to be in 0-255, so epsilon and sigma would be 255 times too small; divide by 255"
        warn(f"pixels reach {high:g}: {so}")
    elif first and images.ndim > 2 and (low < -0.75 or high > 1.75):  # beyond what a reasonable attack does to [0, 1]
        so = "images seem to be normalised already, so epsilon is no longer in pixel units"
        advice = "put the normalisation inside the model and pass images in [0, 1]"
        warn(f"pixels range over [{low:.2f}, {high:.2f}]: {so}; {advice}")
    return widened(images)


def warn_of_units(inputs: Tensor) -> None:
    """Say so where features [n, d] differ more than tenfold in scale: one L2 length over them means little.

    What lies in [0, 1] is taken for pixels, which share their unit however little some of them change.
    """
    if len(inputs) < 2 or not inputs.is_floating_point() or (inputs.amin() >= 0 and inputs.amax() <= 1):
        return
    spread = inputs.double().std(dim=0)
    spread = spread[spread > 0]
    if len(spread) and spread.max() > 10 * spread.min():
        what = f"standard deviations of features reach from {float(spread.min()):.3g} to {float(spread.max()):.3g}"
        advice = 'give input_scale="std", or one unit per feature'
        warn(f"{what}, and epsilon and sigma are one length over all of them: {advice}")


def check_table(values: Any, what: str) -> Tensor:
    """One float number per point and class, [n, K], or an error; ``what`` says in its message what was expected."""
    try:
        table = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"expected {what} as a tensor or array, got {type(values).__name__}") from None
    if table.ndim != 2 or not table.is_floating_point() or len(table) == 0 or table.shape[1] < 2:
        found = f"{tuple(table.shape)} of {table.dtype}"
        raise InputError(f"expected {what} [n, classes], at least 1 point and at least 2 classes, got {found}")
    return table


def check_probabilities(values: Any, what: str) -> Tensor:
    """A table whose rows are probabilities, or an error.

    Example:
        >>> check_probabilities(torch.tensor([[0.5, 0.75]]), "probabilities")
        Traceback (most recent call last):
        ...
        keepcover.errors.InputError: expected probabilities, rows that sum to 1, got values in [0.5, 0.75] with sums in [1.25, 1.25]; are they logits?
    """
    table = check_table(values, what)
    (low, high), (least, most) = extremes(table), extremes(table.sum(dim=1))
    # NaN fails every comparison, so it is refused here as well. Half precision sums to 1 within a hundredth.
    if not (low >= -1e-6 and least > 0.99 and most < 1.01):
        found = f"values in [{low:.3g}, {high:.3g}] with sums in [{least:.3g}, {most:.3g}]; are they logits?"
        raise InputError(f"expected {what}, rows that sum to 1, got {found}")
    return table


_USUAL = 256  # examples per batch
_SMALL = 2**20  # numbers in a batch of small examples: few batches, each of which a CPU's cache can hold


def _raw_batches(data: Any, size: int | None = None) -> Iterator[Any]:
    images, labels = _in_one_piece(data)
    if images is not None:
        labels = None if labels is None else as_labels(labels)
        if labels is not None and len(images) != len(labels):
            raise InputError(f"expected as many labels as images, got {len(images)} images and {len(labels)} labels")
        each = math.prod(images.shape[1:]) if isinstance(images, Tensor | np.ndarray) else _SMALL
        size = size or max(_USUAL, _SMALL // max(1, each))
        for at in range(0, len(images), size):
            some = images[at : at + size]
            yield some if labels is None else (some, labels[at : at + size])
    elif isinstance(data, DataLoader):
        yield from data
    elif isinstance(data, Dataset):
        own: Any = getattr(data, "loader", None)  # one with workers
        yield from DataLoader(data, batch_size=size or _USUAL) if own is None else own(size or _USUAL)
    else:
        _check_data(data)
        yield from data


def _pair(raw: Any) -> tuple[Any, Any]:
    if isinstance(raw, Tensor | np.ndarray):
        return raw, None
    if isinstance(raw, tuple | list) and len(raw) == 2:
        return raw[0], raw[1]
    found = f"{type(raw).__name__}; data in memory go in a tuple"
    raise InputError(f"expected batches of images or of (images, labels), got {found}")
