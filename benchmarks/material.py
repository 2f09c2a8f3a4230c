"""What several measurements work on: logits like a trained network's, networks, images, and the four scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.timing import Options
from keepcover.engine.inputs import Batch
from keepcover.engine.smoother import Smoother
from keepcover.models import CifarResNet, last_linear
from keepcover.models.checkpoints import load_weights
from keepcover.noise import Stream
from keepcover.scores import PTT, Draws, Steps, aps, hps

SIGMA, EPSILON, ALPHA, HOLDOUT = 0.25, 0.125, 0.1, 500
WEIGHTS = "cifar10-resnet110-sigma0.25"


def logits_like_a_network(n: int, draws: int, classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Noisy logits [n, draws, classes] of a classifier that is right on about three draws in four, and labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (n,), generator=generator)
    images = torch.randn(n, 1, classes, generator=generator)
    margin = 3.5 + 2 * torch.randn(n, generator=generator) + torch.tensor(classes / 10).log()
    images[torch.arange(n), 0, labels] += margin
    logits = torch.randn(n, draws, classes, generator=generator).mul_(0.7).add_(images)
    return logits, labels


@dataclass(frozen=True)
class FourScores:
    """HPS, APS and both after PTT: mean and variance over the draws, for every label. A reduction for ``Smoother.reduce``.

    ``ptt`` off leaves the transformed two out.
    """

    hps: Steps
    aps: Steps
    stream: Stream
    ptt: bool = True

    @classmethod
    def fitted(cls, logits: Tensor, labels: Tensor, stream: Stream, ptt: bool = True) -> FourScores:
        """Transforms from a holdout's true labels, one noisy draw each."""
        rows = torch.arange(len(labels), device=logits.device)
        first, true = logits[:, 0], labels.to(logits.device)
        u = stream.uniform(rows, "aps").to(first.dtype)
        fit = PTT().fit
        return cls(fit(hps(first)[rows, true], ALPHA), fit(aps(first, u)[rows, true], ALPHA), stream, ptt)

    def __call__(self, batch: Batch, logits: Tensor) -> Tensor:
        """[images, statistics, classes]; statistics are mean and variance of HPS, PTT-HPS, APS, PTT-APS."""
        return self.of(logits, self.stream.uniform(batch.ids.to(logits.device), "aps"))

    def of(self, logits: Tensor, u: Tensor) -> Tensor:
        found = []
        for scores, transform in ((hps(logits), self.hps), (aps(logits, u[:, None].to(logits.dtype)), self.aps)):
            for values in (scores, transform(scores)) if self.ptt else (scores,):
                draws = Draws(values.transpose(1, 2))
                found += [draws.mean, draws.variance]
        return torch.stack(found, dim=1)


def network(options: Options, classes: int = 10) -> nn.Module:
    """The ResNet of the paper on a GPU, a small one of its kind on a CPU; in the memory format that suits."""
    torch.manual_seed(0)
    real = options.gpu and not options.quick  # random weights overflow in half precision after 110 layers
    model = CifarResNet(options.pick(8, 20, 110), 10 if real else classes)
    if real:
        model = load_weights(model, WEIGHTS)
        name, head = last_linear(model)
        model.set_submodule(name, nn.Linear(head.in_features, classes) if classes != 10 else head)
    model = model.eval().to(options.device)
    return model.to(memory_format=torch.channels_last) if options.gpu else model  # type: ignore[call-overload]


def numerics(options: Options) -> dict[str, object]:
    """Half precision and channels last on a GPU; plain float32 on a CPU."""
    return {
        "autocast": torch.float16 if options.gpu else None,
        "channels_last": options.gpu,
        "compile": options.compile,
    }


def smoother(model: nn.Module, options: Options, batch_size: int) -> Smoother:
    return Smoother(model, SIGMA, batch_size=batch_size, progress=False, **numerics(options))  # type: ignore[arg-type]


def cifar10(options: Options, n: int) -> tuple[Tensor, Tensor, str]:
    """The first n test images with labels and where they come from; random ones where there are no data."""
    if options.data is not None:
        from keepcover.data import cifar

        images, labels = cifar("cifar10", options.data)[:n].pair
        return images, labels, "CIFAR-10 test"
    generator = torch.Generator().manual_seed(0)
    return torch.rand(n, 3, 32, 32, generator=generator), torch.randint(10, (n,), generator=generator), "random images"
