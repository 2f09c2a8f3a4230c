"""What noisy logits depend on. Two runs may share a store only if all of it is equal."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch import nn

from keepcover.engine.fingerprint import fingerprint, structure_digest, unwrapped
from keepcover.engine.inputs import batches, in_memory, length, take
from keepcover.engine.smoother import Smoother
from keepcover.errors import InputError
from keepcover.noise import Noise, Stream, get_noise

ROLE = "test"  # of the noise: stored outputs stand for those of queries


def data_fingerprint(data: Any) -> str:
    """SHA-256 of labelled images as the network sees them, in their order, however they are batched.

    Example:
        >>> import torch
        >>> images, labels = torch.rand(5, 1, 2, 2), torch.arange(5)
        >>> data_fingerprint((images, labels)) == data_fingerprint([(images[:2], labels[:2]), (images[2:], labels[2:])])
        True
    """
    pixels, truth, count, shapes = hashlib.sha256(), hashlib.sha256(), 0, set()
    for batch in batches(data, labelled=True):
        assert batch.labels is not None
        shapes.add(tuple(batch.images.shape[1:]))
        count += len(batch)
        pixels.update(batch.images.detach().cpu().contiguous().numpy().tobytes())
        labels = batch.labels.cpu()
        truth.update((labels.double() if labels.is_floating_point() else labels.long()).contiguous().numpy().tobytes())
    if len(shapes) != 1:
        raise InputError(f"expected images of one shape, got {' and '.join(map(str, sorted(shapes)))}")
    return hashlib.sha256(f"{count} {shapes.pop()} {pixels.hexdigest()} {truth.hexdigest()}".encode()).hexdigest()


def _structure(smoother: Smoother, shape: tuple[int, ...]) -> str:
    """The class of a module and a hash of its parts and their attributes: weights alone do not tell a ReLU from a GELU."""
    model = unwrapped(smoother.model)
    if not isinstance(model, nn.Module):
        return "callable"
    name = re.sub(r"[^A-Za-z0-9]", "", type(model).__name__) or "module"
    return f"{name}-{structure_digest(smoother, shape)[:12]}"


@dataclass(frozen=True)
class StoreKey:
    """Model, data, noise and numerics: everything that decides what draw j of image i is.

    The number of draws is no part of it, because more of them extend the same store. The seed is written down in the
    store: stored noise is for experiments, a deployed predictor draws its own.

    Attributes:
        model: fingerprint of the weights; ``structure``: class of the module, and a hash of its parts and their attributes.
        data: fingerprint of images and labels, ``images`` of them, each of ``shape``.
        noise, seed: the noise, as its ``spec``, and its stream. Image i is keyed by its position i.
        autocast, channels_last, compile, device: numerics; device is its kind, ``cpu`` or ``cuda``.

    Example:
        >>> import torch
        >>> smoother = Smoother(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), 0.5)
        >>> key = StoreKey.of(smoother, (torch.rand(6, 1, 2, 2), torch.zeros(6).long()), seed=7)
        >>> key.images, key.device, key.folder.rsplit("-", 1)[0]
        (6, 'cpu', 'Sequential-gaussian0.5-seed7')
    """

    model: str
    structure: str
    data: str
    images: int
    shape: tuple[int, ...]
    noise: str
    seed: int
    autocast: str | None
    channels_last: bool
    compile: bool
    device: str

    @classmethod
    def of(
        cls,
        smoother: Smoother,
        data: Any,
        seed: int,
        *,
        model_fingerprint: str | None = None,
        images_fingerprint: str | None = None,
    ) -> StoreKey:
        """The key of a smoother on labelled data.

        Args:
            smoother: the model under noise.
            data: ``(images, labels)`` or a dataset with a length.
            seed: of the noise.
            model_fingerprint: what identifies a model that is not an ``nn.Module``.
            images_fingerprint: what identifies a dataset that is not in memory; without it the dataset is read once.
        """
        Stream(seed, ROLE)  # checks the seed
        own = fingerprint(smoother.model)
        if own is None and not model_fingerprint:
            what = "a model that is not an nn.Module has no fingerprint, so its logits could not be told from another's"
            given = "give model_fingerprint=, a string that changes with them"
            raise InputError(f"{what}; wrap it in a module that owns its weights, or {given}")
        if own is not None and model_fingerprint:
            raise InputError("a module's weights are its fingerprint; leave model_fingerprint out")
        if images_fingerprint and in_memory(data):
            raise InputError("images in memory are their own fingerprint; leave images_fingerprint out")
        count = length(data)
        if not count:
            raise InputError("expected labelled images whose number is known: (images, labels) or a sized dataset")
        if smoother.input_scale is not None:
            raise InputError("a store keeps no input_scale; divide the features by it first, and multiply in the model")
        shape = tuple(next(batches(take(data, [0]))).images.shape[1:])
        model, images = own or str(model_fingerprint), images_fingerprint or data_fingerprint(data)
        facts = (model, _structure(smoother, shape), images, count, shape, smoother.noise.spec, seed)
        return cls(*facts, device=smoother.device.type, **smoother.numerics)

    @classmethod
    def from_dict(cls, values: Any) -> StoreKey:
        """The key that a file of a store states."""
        if not isinstance(values, dict) or values.keys() != {field.name for field in fields(cls)}:
            raise ValueError("its key is not one this version writes")
        return cls(**{**values, "shape": tuple(values["shape"])})

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "shape": list(self.shape)}

    @property
    def added(self) -> Noise:
        """What was added to the inputs."""
        return get_noise(self.noise)

    @property
    def stream(self) -> Stream:
        """The stream that it was drawn from."""
        return Stream(self.seed, ROLE)

    @property
    def folder(self) -> str:
        """Name of the store's folder: a few facts to read, and a hash that decides."""
        digest = hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()
        return f"{self.structure.split('-')[0]}-{self.noise.replace(':', '')}-seed{self.seed}-{digest[:16]}"

    def refuse_other(self, smoother: Smoother, data: Any = None, anywhere: bool = False) -> None:
        """Raise unless this smoother, and these data where given, are the ones the key was made of.

        Data that are not in memory are compared by their number. ``anywhere`` leaves out the kind of device.
        """
        found = {"noise": smoother.noise.spec, **smoother.numerics, "device": smoother.device.type}
        found |= {"model": fingerprint(smoother.model) or self.model, "structure": _structure(smoother, self.shape)}
        if data is not None:
            found |= {"images": length(data), **({"data": data_fingerprint(data)} if in_memory(data) else {})}
        for name, value in found.items():
            if value != getattr(self, name) and not (anywhere and name == "device"):
                mixed = "logits of two kinds are never mixed: open the store of this key instead"
                raise InputError(
                    f"this store is for {name} {_short(getattr(self, name))}, not {_short(value)}; {mixed}"
                )


def _short(value: Any) -> str:
    return f"{value[:12]}..." if isinstance(value, str) and len(value) > 40 else str(value)
