"""What noisy logits depend on. Two runs may share a store only if all of it is equal."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch import nn

from keepcover.engine.fingerprint import fingerprint
from keepcover.engine.inputs import batches, in_memory, length
from keepcover.engine.smoother import Classifier, Smoother
from keepcover.errors import InputError
from keepcover.noise import Noise, Stream, get_noise


def data_fingerprint(data: Any) -> str:
    """SHA-256 of labelled images as the network sees them, in their order, however they are batched.

    Example:
        >>> import torch
        >>> images, labels = torch.rand(5, 1, 2, 2), torch.arange(5)
        >>> data_fingerprint((images, labels)) == data_fingerprint([(images[:2], labels[:2]), (images[2:], labels[2:])])
        True
    """
    pixels, truth, count, shape = hashlib.sha256(), hashlib.sha256(), 0, None
    for batch in batches(data, labelled=True):
        assert batch.labels is not None
        if shape is not None and batch.images.shape[1:] != shape:
            raise InputError(f"expected images of one shape, got {tuple(shape)} and {tuple(batch.images.shape[1:])}")
        shape = batch.images.shape[1:]
        count += len(batch)
        pixels.update(batch.images.detach().cpu().contiguous().numpy().tobytes())
        truth.update(batch.labels.cpu().long().contiguous().numpy().tobytes())
    text = f"{count} {tuple(shape or ())} {pixels.hexdigest()} {truth.hexdigest()}"
    return hashlib.sha256(text.encode()).hexdigest()


def _structure(model: Classifier) -> str:
    """The class of a module and a hash of its layers: weights alone do not tell a ReLU from a GELU."""
    if not isinstance(model, nn.Module):
        return "callable"
    layers = re.sub(r" at 0x[0-9a-f]+", "", repr(model))
    name = re.sub(r"[^A-Za-z0-9]", "", type(model).__name__) or "module"
    return f"{name}-{hashlib.sha256(layers.encode()).hexdigest()[:12]}"


@dataclass(frozen=True)
class StoreKey:
    """Model, data, noise and numerics: everything that decides what draw j of image i is.

    The number of draws is no part of it, because more of them extend the same store. The seed is written down in the
    store: stored noise is for experiments, a deployed predictor draws its own.

    Attributes:
        model: fingerprint of the weights; ``structure``: class and layers of the module.
        data: fingerprint of images and labels, ``images`` of them.
        noise, seed, role: the noise, as its ``spec``, and its stream. Image i is keyed by its position i.
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
    noise: str
    seed: int
    role: str
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
        role: str = "test",
        model_fingerprint: str | None = None,
        images_fingerprint: str | None = None,
    ) -> StoreKey:
        """The key of a smoother on labelled data.

        Args:
            smoother: the model under noise.
            data: ``(images, labels)`` or a dataset with a length.
            seed: of the noise.
            role: of the noise; see :class:`keepcover.Stream`.
            model_fingerprint: what identifies a model that is not an ``nn.Module``.
            images_fingerprint: what identifies a dataset that is not in memory; without it the dataset is read once.
        """
        Stream(seed, role)  # checks both
        own = fingerprint(smoother.model)
        if own is None and not model_fingerprint:
            raise InputError(
                "a model that is not an nn.Module has no fingerprint, so its logits could not be told from another's; "
                "wrap it in a module that owns its weights, or give model_fingerprint=, a string that changes with them"
            )
        if own is not None and model_fingerprint:
            raise InputError("a module's weights are its fingerprint; leave model_fingerprint out")
        if images_fingerprint and in_memory(data):
            raise InputError("images in memory are their own fingerprint; leave images_fingerprint out")
        count = length(data)
        if not count:
            raise InputError("expected labelled images whose number is known: (images, labels) or a sized dataset")
        return cls(
            own or str(model_fingerprint),
            _structure(smoother.model),
            images_fingerprint or data_fingerprint(data),
            count,
            smoother.noise.spec,
            seed,
            role,
            device=smoother.device.type,
            **smoother.numerics,
        )

    @classmethod
    def from_dict(cls, values: Any) -> StoreKey:
        """The key that a chunk or an index states."""
        names = [field.name for field in fields(cls)]
        if not isinstance(values, dict) or sorted(values) != sorted(names):
            raise ValueError("its key is not one this version writes")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def added(self) -> Noise:
        """What was added to the inputs."""
        return get_noise(self.noise)

    @property
    def stream(self) -> Stream:
        """The stream that it was drawn from."""
        return Stream(self.seed, self.role)

    @property
    def folder(self) -> str:
        """Name of the store's folder: a few facts to read, and a hash that decides."""
        digest = hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()
        return f"{self.structure.split('-')[0]}-{self.noise.replace(':', '')}-seed{self.seed}-{digest[:16]}"

    def refuse_other(self, smoother: Smoother, data: Any) -> None:
        """Raise unless this smoother and these data are the ones the key was made of."""
        self.refuse_smoother(smoother)
        self.refuse_data(data)

    def refuse_smoother(self, smoother: Smoother, anywhere: bool = False) -> None:
        """Raise unless model, noise and numerics are the key's; ``anywhere`` leaves out the kind of device."""
        found: dict[str, Any] = {"noise": smoother.noise.spec, **smoother.numerics}
        if not anywhere:
            found["device"] = smoother.device.type
        own = fingerprint(smoother.model)
        found |= {**({} if own is None else {"model": own}), "structure": _structure(smoother.model)}
        self._refuse(found)

    def refuse_data(self, data: Any) -> None:
        """Raise unless there are as many images as the key says, and the same where they are in memory."""
        self._refuse({"images": length(data), **({"data": data_fingerprint(data)} if in_memory(data) else {})})

    def _refuse(self, found: dict[str, Any]) -> None:
        for name, value in found.items():
            if value != getattr(self, name):
                raise InputError(
                    f"this store is for {name} {_short(getattr(self, name))}, not {_short(value)}; logits of two kinds are never "
                    "mixed: open the store of this key instead"
                )


def _short(value: Any) -> str:
    return f"{value[:12]}..." if isinstance(value, str) and len(value) > 40 else str(value)
