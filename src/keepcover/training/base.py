"""Training and fine-tuning under noise, with labels or towards what the network, or another one, says.

:func:`fit_under_noise` is for data in memory. :func:`train_base` is the recipe behind every CIFAR result here, with the data
resident on the device: SGD with momentum, or Muon for wide networks, linear warm-up then cosine, crops, flips, squares and
Gaussian noise made on the device, bfloat16.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load as deserialize
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from keepcover.data import Labelled
from keepcover.engine.fingerprint import fingerprint
from keepcover.engine.inputs import check_images
from keepcover.engine.progress import Progress
from keepcover.engine.smoother import bound
from keepcover.errors import MISFITS, InputError, refusing
from keepcover.models.checkpoints import BITS, from_bytes, weights_bytes
from keepcover.noise import Gaussian, Noise, get_noise
from keepcover.tasks.metrics import as_labels, check_labels
from keepcover.training.loop import Loop, Objective, Say, checkpoint_for, write_results
from keepcover.training.losses import CrossEntropy
from keepcover.training.optimise import epoch_key
from keepcover.training.recipe import SMALL, Device, Recipe
from keepcover.training.views import Views, half


class NoisyLoss(Objective):
    """Cross-entropy of noisy views with their labels, and divergence from the mean of what teachers say of the same views.

    Args:
        model: what is trained, in training mode.
        views: images, labels and noise.
        teachers: networks to imitate; without labels they have the whole weight.
        of_clean: teachers look at the views without noise.
        compile: run networks through the compiler.
        loss: of labels.
    """

    def __init__(
        self,
        model: nn.Module,
        views: Views,
        teachers: Sequence[nn.Module] = (),
        of_clean: bool = False,
        compile: bool = False,
        loss: CrossEntropy | None = None,
    ) -> None:
        super().__init__(model.train(), [model, *(teacher.eval() for teacher in teachers)], compile)
        self.views, self.of_clean, self.loss = views, of_clean, loss or CrossEntropy()

    def __call__(self, index: Tensor) -> Tensor:
        views, recipe = self.views, self.views.recipe
        clean, labels = views.pick(index)
        clean, own = views.cut(clean)
        noisy = views.noisy(clean, recipe.copies)
        with half(views.device):
            student, *teachers = self.run
            logits = student(noisy).float()
            with torch.no_grad():
                seen = clean.float() if self.of_clean else noisy
                said = [teacher(seen).float() / recipe.temperature for teacher in teachers]
        loss = torch.zeros((), device=views.device)
        if labels is not None:
            labels = labels.repeat_interleave(recipe.copies, dim=0)
            losses = self.loss(logits, labels)
            if own is not None:
                others = self.loss(logits, labels.roll(recipe.copies, 0))
                losses = own * losses + (1 - own) * others
            loss = losses.mean()
        if said:
            wanted = torch.stack(said).softmax(dim=2).mean(dim=0)
            if self.of_clean:
                wanted = wanted.repeat_interleave(recipe.copies, dim=0)
            log = (logits / recipe.temperature).log_softmax(dim=1)
            apart = nn.functional.kl_div(log, wanted, reduction="none").sum(dim=1).mean() * recipe.temperature**2
            weight = 1.0 if labels is None else recipe.teacher_weight
            loss = (1 - weight) * loss + weight * apart
        return loss

    def settle(self, batches: int = 100) -> None:
        """Batch norm's statistics for the weights as they are, of views as training shows them.

        Cut and mixed views have other statistics than whole images, and the weights have learnt to live with theirs: those of whole
        images cost the committed WRN-28-6 for CIFAR-10 a point of accuracy under noise (its card has both).
        """
        views, recipe = self.views, self.views.recipe
        with torch.random.fork_rng([views.device] if views.device.type == "cuda" else []), half(views.device):
            torch.manual_seed(epoch_key(recipe.seed, -1))
            # A short last batch would count as much as the others.
            whole = len(views) // recipe.batch_size * recipe.batch_size
            order = torch.randperm(len(views), device=views.device)[:whole].split(recipe.batch_size)[:batches]
            update_bn((views.noisy(views.cut(views.clean(index))[0], 1) for index in order), self.model)


@torch.no_grad()
def outputs_of(model: nn.Module, images: Tensor) -> Tensor:
    """Outputs of a few images, or an error that says what a model must take and give, before anything is trained."""
    advice = "give images of its size and number of channels: it must map [n, c, h, w] in [0, 1] to logits"
    kind, shape = type(model).__name__, tuple(images.shape[1:])
    with refusing(f"{kind} cannot take images of shape {shape}", *MISFITS, advice=advice):
        outputs = model.eval()(images)
    if not isinstance(outputs, Tensor):
        found = f"{type(outputs).__name__} from {kind}; wrap it in a module that returns the logits alone"
        raise InputError(f"expected logits [n, classes], or [n, classes, h, w] of pixels, got {found}")
    return outputs


def fit_under_noise(
    model: nn.Module,
    images: Any,
    labels: Any = None,
    sigma: float | None = None,
    *,
    noise: Noise | str | None = None,
    epochs: int = 30,
    batch_size: int = 128,
    lr: float = 3e-3,
    seed: int = 0,
    loss: CrossEntropy | None = None,
    progress: Progress = True,
) -> nn.Module:
    """Train on noisy images (AdamW, warm-up and cosine), in place, and return the model in eval mode.

    An ordinary classifier collapses under noise; one trained like this keeps its accuracy at that sigma. Labels may be one per
    image [n], one per pixel [n, h, w], or several, bool [n, K]; ``loss`` says which pixels have none. Without ``labels``
    the network learns to say of noisy images what it said of them without noise before: that needs a trained network and
    images of its kind, and nothing else. sigma = 0 is ordinary training; ``noise`` is any noise in place of a Gaussian's
    sigma. A :func:`keepcover.denoised` model is trained as a whole, and returned bound to the noise. Images are in [0, 1], the
    units of sigma: bytes are refused, and pixels beyond that are warned of, as :func:`keepcover.calibrate` does.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
        >>> images = torch.cat([torch.zeros(64, 1, 2, 2), torch.ones(64, 1, 2, 2)])
        >>> labels = torch.arange(128) // 64
        >>> model = fit_under_noise(model, images, labels, sigma=0.1, lr=0.03, progress=False)
        >>> (model(images).argmax(1) == labels).all().item()
        True
    """
    if (sigma is None) == (noise is None):
        raise InputError("expected sigma, the standard deviation of Gaussian noise, or another noise: one of the two")
    if not isinstance(model, nn.Module):
        raise InputError(f"expected a torch module to train, got {type(model).__name__}; wrap a function in a module")
    law = Gaussian(sigma) if noise is None else get_noise(noise)  # type: ignore[arg-type]
    images, labels = check_images(images), None if labels is None else as_labels(labels)
    if len(images) == 0 or (labels is not None and len(labels) != len(images)):
        found = "no labels" if labels is None else str(len(labels))
        raise InputError(f"expected as many labels as images, at least one, got {len(images)} and {found}")
    if batch_size > 0:  # batches of one size, so that few images are left for another epoch
        batch_size = len(images) // -(-len(images) // batch_size)
    recipe = Recipe(sigma or 0.0, epochs, batch_size, lr, warmup_epochs=3 * epochs // 10, seed=seed, **SMALL)
    device = next(model.parameters(), images).device
    # One that denoises knows what it is trained under.
    before, model = (cast(nn.Module, bound(model, one)) for one in (Gaussian(0.0), law))
    few = Views(images[:2], None, recipe, device, law)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        outputs = outputs_of(model, few.noisy(few.images, 1))
    if labels is not None and labels.ndim == 1 and loss is None:
        labels = check_labels(labels, len(images), outputs.shape[1])
    views = Views(images, labels, recipe, device, law)
    teachers = [copy.deepcopy(before).requires_grad_(False)] if labels is None else []
    objective = NoisyLoss(model, views, teachers, of_clean=True, loss=loss)
    Loop(objective, recipe, len(images), device).run(progress=progress)
    return model.eval()


def check_logits(model: nn.Module, data: Labelled, device: Device) -> None:
    """Refuse a model that does not give one logit per class, before anything is trained."""
    images, classes = data.images[:2].to(device), len(data.class_names)
    found = tuple(outputs_of(model.to(device), images).shape)
    wanted = (len(images), classes, *data.labels.shape[1:])
    if found != wanted:
        given = f"{len(images)} images of {data.name} with {classes} classes"
        raise InputError(f"expected logits of shape {wanted} for {given}, got {found} from {type(model).__name__}")


@torch.inference_mode()
def noisy_accuracy(
    model: nn.Module, data: Labelled, noise: Noise | float, device: Device, loss: CrossEntropy | None = None
) -> float:
    """Share of images, or of their pixels, classified rightly under one noisy draw each."""
    training, device, noise = model.training, torch.device(device), get_noise(noise)
    model.eval()
    right, total, size = 0, 0, 1000 if data.labels.ndim == 1 else 50
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        for images, labels in zip(data.images.split(size), data.labels.split(size), strict=True):
            found = (loss or CrossEntropy()).right(model(noise.fresh(images.to(device))), labels.to(device))
            right, total = right + int(found.sum()), total + len(found)
    model.train(training)
    return right / max(1, total)


def train_base(
    model: nn.Module,
    train: Labelled,
    test: Labelled,
    recipe: Recipe,
    out: str | Path,
    *,
    architecture: str,
    start: str | None = None,
    teachers: Mapping[str, nn.Module] | None = None,
    labels: bool = True,
    loss: CrossEntropy | None = None,
    compile: bool | None = None,
    bits: int = 16,
    device: Device = "cpu",
    resume: bool = True,
    checkpoint_seconds: float = 30.0,
    progress: Progress = True,
    say: Say = print,
) -> dict[str, Any]:
    """Train under noise, write ``out`` (safetensors) and its card (JSON, the same name), and return the card.

    Weights are stored in float16, or with kernels in 8 ``bits``.
    A run that was killed goes on from the checkpoint beside ``out`` and takes the steps it would have taken. The model
    starts from the weights it has, which the card names ``start``: a trained classifier is fine-tuned, a fresh one trained.
    Where there are ``teachers``, it learns what they say, on the mean, of the same noisy images. Without ``labels`` it learns
    to say under noise what it says at the start without. By default wide networks are compiled on a GPU: their arithmetic
    dominates, and a compiler joins what lies between convolutions. Labels of pixels [n, h, w] are cropped and mirrored with
    their images; ``loss`` says which pixels have none, and what rare classes weigh.
    """
    out, device, teachers = Path(out), torch.device(device), dict(teachers or {})
    checkpoint = checkpoint_for(out, resume)
    for network in (model, *teachers.values()):
        check_logits(network, train, device)
    if bits not in BITS:
        raise InputError(f"expected weights in 8 or 16 bits, got {bits}")
    if not labels and teachers:
        raise InputError("a network that imitates its own clean outputs takes no teachers; leave out one of the two")
    loss = loss or CrossEntropy()
    views = Views.of(train, recipe, device, border=0 if loss.ignore is None else loss.ignore)
    if not labels:
        views.labels, teachers = None, {"itself, without noise": copy.deepcopy(model).requires_grad_(False)}
    for network in (model, *teachers.values()):
        network.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    compile = device.type == "cuda" and "wrn-" in architecture if compile is None else compile
    origin = {"start": start, "teachers": {name: fingerprint(network) for name, network in teachers.items()}}
    noisy = NoisyLoss(model, views, list(teachers.values()), of_clean=not labels, compile=compile, loss=loss)
    loop = Loop(noisy, recipe, len(train), device, say)

    def each(mean: float) -> None:
        done, epochs = loop.epoch, loop.fixed.epochs
        if done == 1 or (done % max(5, epochs // 5) == 0 and done < epochs):
            accuracy = noisy_accuracy(model, test, recipe.law, device, loss=loss)
            say(f"epoch {done}/{epochs}  loss {mean:.3f}  noisy accuracy {accuracy:.3f}")

    kind = {} if loss == CrossEntropy() else {"loss": asdict(loss)}
    belongs = {**asdict(recipe), "data": train.fingerprint, **origin, **kind}
    seconds = loop.run(checkpoint, belongs, checkpoint_seconds=checkpoint_seconds, each=each, progress=progress)
    if recipe.average:
        noisy.settle()
    content = weights_bytes(model, {"architecture": architecture, "sigma": recipe.sigma}, bits)
    # What is measured is what is stored.
    model.load_state_dict(from_bytes(deserialize(content)), strict=False)
    card = {
        "architecture": architecture,
        "dataset": train.name,
        "sigma": recipe.sigma,
        "num_classes": len(train.class_names),
        "recipe": asdict(loop.fixed),
        **kind,
        "start": start,
        "teachers": list(teachers),
        "dtype": "float16" if bits == 16 else "int8",
        "top1_accuracy_one_noisy_draw_test": noisy_accuracy(model.eval(), test, recipe.law, device, loss=loss),
    }
    return write_results(out, content, card, seconds, device)
