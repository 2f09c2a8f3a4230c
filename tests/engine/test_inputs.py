"""Whatever users bring is read once, in order, with one id per example; what cannot carry a guarantee is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SubsetRandomSampler, TensorDataset

from keepcover.engine.inputs import Batch, InputRange, batches, check_images, extremes, in_memory, length, take, watched
from keepcover.errors import InputError, KeepcoverWarning

N = 11
IMAGES = torch.rand(N, 1, 3, 2, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(N) % 4


class Endless(IterableDataset):
    """A dataset without a length."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(IMAGES, LABELS)


def in_parts(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(IMAGES.split(list(sizes)), LABELS.split(list(sizes))))


LABELLED: dict[str, Callable[[], Any]] = {
    "tensors": lambda: (IMAGES, LABELS),
    "arrays": lambda: (IMAGES.numpy(), LABELS.numpy()),
    "list-of-labels": lambda: (IMAGES, LABELS.tolist()),
    "nested-lists": lambda: (IMAGES.tolist(), LABELS.tolist()),
    "dataset": lambda: TensorDataset(IMAGES, LABELS),
    "loader": lambda: DataLoader(TensorDataset(IMAGES, LABELS), batch_size=4),
    "list-of-batches": lambda: in_parts(2, 5, 4),
    "tuple-of-batches": lambda: tuple(in_parts(3, 3, 5)),
    "two-batches": lambda: tuple(in_parts(6, 5)),
    "generator": lambda: (batch for batch in in_parts(6, 5)),
    "endless": Endless,
    "endless-loader": lambda: DataLoader(Endless(), batch_size=3),
}
UNLABELLED: dict[str, Callable[[], Any]] = {
    "tensor": lambda: IMAGES,
    "array": lambda: IMAGES.numpy(),
    "list-of-tensors": lambda: list(IMAGES.split(4)),
    "generator-of-arrays": lambda: (part.numpy() for part in IMAGES.split(5)),
}
NO_LENGTH = ("generator", "endless", "endless-loader", "generator-of-arrays")


def everything(data: Any, **options: Any) -> Batch:
    read = list(batches(data, **options))
    labels = None if read[0].labels is None else torch.cat([part.labels for part in read if part.labels is not None])
    return Batch(torch.cat([part.images for part in read]), labels, torch.cat([part.ids for part in read]))


def refused(match: str, data: Any, **options: Any) -> None:
    """One line that says what to do."""
    with pytest.raises(InputError, match=match) as caught:
        list(batches(data, **options))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [1, 4, 256])
@pytest.mark.parametrize("kind", [*LABELLED, *UNLABELLED])
def test_every_container_gives_back_what_it_holds(kind: str, size: int) -> None:
    """Batches put together are the data, in order, with positions as ids."""
    read = everything({**LABELLED, **UNLABELLED}[kind](), size=size)
    assert torch.equal(read.images, IMAGES)
    assert torch.equal(read.ids, torch.arange(N))
    if kind in LABELLED:
        assert read.labels is not None
        assert torch.equal(read.labels, LABELS)
    else:
        assert read.labels is None


@pytest.mark.parametrize("kind", [*LABELLED, *UNLABELLED])
def test_the_length_is_the_number_of_examples(kind: str) -> None:
    """Where a length is known it is what reading finds; it decides the holdout and whether a promise is possible."""
    assert length({**LABELLED, **UNLABELLED}[kind]()) == (None if kind in NO_LENGTH else N)


def test_what_is_in_memory() -> None:
    assert all(in_memory(LABELLED[kind]()) for kind in ("tensors", "arrays"))
    assert not any(in_memory(LABELLED[kind]()) for kind in ("dataset", "loader", "generator"))


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_loaders_length_is_what_one_pass_yields(drop_last: bool) -> None:
    """A sampler may pick some or repeat some, and a last batch may be dropped."""
    dataset = TensorDataset(IMAGES, LABELS)
    for sampler in (None, SubsetRandomSampler(range(7)), RandomSampler(dataset, replacement=True, num_samples=30)):
        loader = DataLoader(dataset, batch_size=4, sampler=sampler, drop_last=drop_last)
        assert length(loader) == len(everything(loader))


@pytest.mark.parametrize("rows", [[], [3], [10, 0, 0, 4], range(2, 9)])
@pytest.mark.parametrize("kind", ["tensors", "arrays", "list-of-labels", "nested-lists", "dataset"])
def test_examples_are_taken_in_any_order(kind: str, rows: list[int] | range) -> None:
    taken = take(LABELLED[kind](), rows)
    assert length(taken) == len(rows)
    if len(rows):
        (batch,) = batches(taken)
        assert batch.labels is not None
        assert torch.equal(batch.images, IMAGES[list(rows)])
        assert torch.equal(batch.labels, LABELS[list(rows)])
    assert torch.equal(take(IMAGES.numpy(), torch.tensor(rows, dtype=torch.int64)), IMAGES[list(rows)])


@pytest.mark.parametrize(
    "kind", ["loader", "list-of-batches", "tuple-of-batches", "two-batches", "generator", "endless"]
)
def test_what_has_an_order_of_its_own_is_not_taken_from(kind: str) -> None:
    with pytest.raises(InputError, match="pass its dataset"):
        take(LABELLED[kind](), [0])


def test_batches_have_the_size_asked_for() -> None:
    assert [len(part) for part in batches((IMAGES, LABELS), size=4)] == [4, 4, 3]
    assert [len(part) for part in batches(LABELLED["loader"](), size=2)] == [4, 4, 3]  # a loader knows best


def test_small_examples_in_memory_come_in_larger_batches() -> None:
    """A million numbers at a time where they are only cut; what has to be read keeps its 256."""
    many, labels = torch.zeros(3000, 1024), torch.zeros(3000, dtype=torch.int64)
    for data in (many, many.numpy(), (many, labels), (many.numpy(), labels.numpy())):
        assert [len(part) for part in batches(data)] == [1024, 1024, 952]
    for data in (TensorDataset(many, labels), (many[:300].tolist(), labels[:300].tolist())):
        assert next(batches(data)).images.shape == (256, 1024)
    large = torch.zeros(1, 1, 1).expand(600, 100, 100)
    assert [len(part) for part in batches(large)] == [256, 256, 88]


def test_a_batch_is_indexed_all_at_once() -> None:
    batch, index = Batch(IMAGES, LABELS, torch.arange(N) + 100), torch.tensor([7, 2])
    part = batch[index]
    assert part.labels is not None
    assert torch.equal(part.images, IMAGES[index])
    assert torch.equal(part.labels, LABELS[index])
    assert part.ids.tolist() == [107, 102]
    assert Batch(IMAGES, None, torch.arange(N))[2:4].labels is None


# -- ids ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("convert", [torch.tensor, np.array, list])
def test_ids_travel_with_their_examples(convert: Callable[[list[int]], Any]) -> None:
    given = [2**40 + 3 * i for i in reversed(range(N))]
    for kind in LABELLED:
        assert everything(LABELLED[kind](), ids=convert(given), size=3).ids.tolist() == given


@pytest.mark.parametrize(
    ("ids", "match"),
    [
        ([0] * N, "distinct integers"),
        ([*range(N - 1), 3], "two examples must not share noise"),
        ([float(i) for i in range(N)], "distinct integers"),
        ([[i] for i in range(N)], "in one dimension"),
        (list(range(N - 1)), "one id per image"),
        (list(range(N + 1)), "one id per image"),
    ],
)
def test_bad_ids_are_refused(ids: list[Any], match: str) -> None:
    refused(match, (IMAGES, LABELS), ids=ids)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_images_that_carry_no_guarantee_are_refused() -> None:
    refused(r"float images in \[0, 1\], got torch.uint8; convert with images.float\(\) / 255", (IMAGES * 255).byte())
    refused("got torch.int64; convert", LABELS[:, None, None])
    assert torch.equal(everything(LABELS[:, None]).images, LABELS[:, None])  # tokens
    refused(r"\[n, \.\.\.\], got shape \(11,\); add a batch dimension", IMAGES.flatten()[:N])
    for bad in (float("nan"), float("inf"), -float("inf")):
        spoiled = IMAGES.clone()
        spoiled[7, 0, 1, 1] = bad
        refused("NaN or infinity, first in image 7 of the batch; clean the data", spoiled)
        refused("NaN or infinity, first in image 3 of the batch", spoiled, size=4)


def test_no_images_are_refused() -> None:
    for nothing in (IMAGES[:0], (IMAGES[:0], LABELS[:0]), [], TensorDataset(IMAGES[:0], LABELS[:0]), iter(())):
        refused("at least one image, got none", nothing)


def test_labels_that_do_not_match_are_refused() -> None:
    refused("as many labels as images, got 11 images and 10 labels", (IMAGES, LABELS[:-1]))
    refused(r"one label per image, got 6 images and labels \(5,\)", [(IMAGES[:6], LABELS[:5])])
    for kind, make in UNLABELLED.items():
        refused("expected labelled data", make(), labelled=True)
        assert everything(make()).labels is None, kind


@pytest.mark.parametrize("data", ["images.pt", b"bytes", {"images": IMAGES}, 3, None])
def test_what_is_no_data_is_refused(data: Any) -> None:
    refused("tensor or array, .* a dataset or a loader, got", data)
    with pytest.raises(InputError, match=r"tensor or array, .* a dataset or a loader, got"):
        length(data)  # what calibration asks first


def test_batches_of_three_things_are_refused() -> None:
    refused(r"batches of images or of \(images, labels\), got", [(IMAGES, LABELS, LABELS)])


# -- what is warned about ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("images", "match"),
    [
        (IMAGES * 255, "0-255, so epsilon and sigma would be 255 times too small; divide by 255"),
        ((IMAGES - 0.5) / 0.2, "normalised already.*put the normalisation inside the model"),
        (IMAGES * 2.2, "normalised already"),
    ],
)
def test_pixels_in_other_units_are_warned_about_once(images: Tensor, match: str) -> None:
    with pytest.warns(KeepcoverWarning, match=match) as caught:
        read = everything(images, size=3)
    assert len(caught) == 1
    assert torch.equal(read.images, images)


def test_pixels_in_range_and_attacked_ones_are_not() -> None:
    """Warnings are errors here: [0, 1] is fine, and so is an image that an attack or its noise has moved a little."""
    for images in (IMAGES, IMAGES - 0.7, IMAGES + 0.7, torch.zeros(2, 3), torch.ones(2, 3)):
        assert torch.equal(check_images(images), images)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_one_bad_number_is_found_wherever_it_is(value: float, dtype: torch.dtype) -> None:
    for at in (0, 7, 36, 65):
        images = IMAGES.to(dtype).clone()
        images.view(-1)[at] = value
        with pytest.raises(InputError, match=rf"NaN or infinity, first in image {at // 6} of the batch"):
            check_images(images)


def test_extremes_are_those_of_every_number() -> None:
    values = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(0))
    for some in (values, values.transpose(0, 2), values[::2], values.double(), values.requires_grad_()):
        assert extremes(some) == (some.min().item(), some.max().item())


def test_images_none_of_which_has_a_pixel_are_let_through() -> None:
    assert check_images(torch.zeros(0, 1, 2, 2)).shape == (0, 1, 2, 2)


def test_vectors_are_in_their_owners_units() -> None:
    """Neither 0-255 nor normalised means anything for features."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in batches(torch.randn(20, 5) * 300):
            assert len(batch) == 20


# -- what calibration saw ----------------------------------------------------------------------------------------------

SEEN = InputRange((1, 2, 2), 0.0, 1.0)


def test_the_range_is_that_of_everything_seen() -> None:
    parts = torch.rand(4, 3, 1, 2, 2)
    found = InputRange.of(parts[0])
    for part in parts[1:]:
        found = found.union(InputRange.of(part))
    assert found == InputRange((1, 2, 2), float(parts.min()), float(parts.max()))
    assert str(SEEN) == "[1, 2, 2] in [0, 1]"
    any_shape = SEEN.union(InputRange((1, 3, 3), 0.0, 1.0))  # a network may take images of any size
    assert any_shape == SEEN.union(any_shape) == InputRange(None, 0.0, 1.0)
    assert str(any_shape) == "several shapes in [0, 1]"
    any_shape.check(torch.rand(2, 1, 7, 7), 0.0)
    with pytest.raises(InputError, match="same units"):
        any_shape.check(255 * torch.ones(2, 1, 7, 7), 0.0)


@pytest.mark.parametrize("shape", [(3, 1, 2, 3), (3, 2, 2), (3, 4), (1, 2, 2)])
def test_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"calibrated on inputs \[n, 1, 2, 2\], got \["):
        SEEN.check(torch.rand(shape), 0.5)


def test_other_units_are_refused_and_attacks_are_not() -> None:
    images = torch.rand(3, 1, 2, 2)
    for fine in (images, images - 2.4, images + 2.4, images.half(), images.numpy()):
        SEEN.check(fine, epsilon=0.5)
    for wrong in (255 * images + 4, images - 3.6, images + 3.6):
        with pytest.raises(InputError, match=r"calibrated on values in \[0, 1\], got values in .*same units"):
            SEEN.check(wrong, epsilon=0.5)
    InputRange((4,), 0.0, 1.0).check(1000 * torch.randn(3, 4), 0.0)  # features have outliers
    SEEN.check(torch.full((3, 1, 2, 2), 200), 0.0)  # integers are refused where their type is


@pytest.mark.parametrize("kind", ["tensor", "array", "pair", "list", "dataset", "loader", "generator"])
def test_whoever_looks_sees_every_image_first(kind: str) -> None:
    images, labels = torch.rand(9, 1, 2, 2), torch.arange(9)
    dataset = TensorDataset(images, labels)
    data: dict[str, Any] = {
        "tensor": images,
        "array": images.numpy(),
        "pair": (images, labels),
        "list": [images[:4], images[4:]],
        "dataset": dataset,
        "loader": DataLoader(dataset, batch_size=4),
        "generator": (part for part in images.split(4)),
    }
    seen: list[Tensor] = []
    shown = watched(data[kind], lambda batch: seen.append(torch.as_tensor(batch)))
    if kind not in ("generator",):
        assert length(shown) == 9
    count = 0
    for batch in batches(shown):
        count += len(batch)
        assert sum(len(part) for part in seen) >= count  # looked at before it is used
    assert torch.equal(torch.cat(seen), images)
