"""Train or fine-tune a classifier under noise, with labels or towards what it, or another one, says."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from keepcover.engine.inputs import check_images
from keepcover.engine.progress import Progress
from keepcover.engine.smoother import bound
from keepcover.errors import MISFITS, InputError, refusing
from keepcover.noise import Gaussian, Noise
from keepcover.tasks.metrics import as_labels, check_labels
from keepcover.training.loop import Loop, Objective
from keepcover.training.losses import CrossEntropy
from keepcover.training.optimise import epoch_key
from keepcover.training.recipe import SMALL, Recipe
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
        self.loss = loss or CrossEntropy()
        self.model, self.views, self.of_clean, self.compiled = model.train(), views, of_clean, compile
        self.networks = [model, *(teacher.eval() for teacher in teachers)]
        self._run: list[Callable[[Tensor], Tensor]] = [torch.compile(net) if compile else net for net in self.networks]
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def state(self) -> dict[str, Tensor]:
        return {f"model.{name}": value for name, value in self.model.state_dict().items()}

    def simplify(self) -> bool:
        compiled, self.compiled, self._run = self.compiled, False, list(self.networks)
        return compiled

    def __call__(self, index: Tensor) -> Tensor:
        views, recipe = self.views, self.views.recipe
        clean, labels = views.pick(index)
        clean, own = views.cut(clean)
        noisy = views.noisy(clean, recipe.copies)
        with half(views.device):
            student, *teachers = self._run
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
        """Batch norm's statistics for the weights as they are: of noisy images without what only training does to them."""
        views, recipe = self.views, self.views.recipe
        with torch.random.fork_rng([views.device] if views.device.type == "cuda" else []), half(views.device):
            torch.manual_seed(epoch_key(recipe.seed, -1))
            order = torch.randperm(len(views), device=views.device).split(recipe.batch_size)[:batches]
            update_bn((views.noisy(views.clean(index), 1) for index in order), self.model)


@torch.no_grad()
def outputs_of(model: nn.Module, images: Tensor) -> Tensor:
    """Outputs of a few images, or an error that says what a model must take and give, before anything is trained."""
    advice = "give images of its size and number of channels: it must map [n, c, h, w] in [0, 1] to logits"
    kind, shape = type(model).__name__, tuple(images.shape[1:])
    with refusing(f"{kind} cannot take images of shape {shape}", *MISFITS, advice=advice):
        outputs = model.eval()(images)
    if not isinstance(outputs, Tensor):
        raise InputError(
            f"expected logits [n, classes], or [n, classes, h, w] of pixels, got {type(outputs).__name__} from {kind}; wrap it in "
            "a module that returns the logits alone"
        )
    return outputs


def fit_under_noise(
    model: nn.Module,
    images: Any,
    labels: Any = None,
    sigma: float | None = None,
    *,
    noise: Noise | None = None,
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
    law = Gaussian(sigma) if noise is None else noise  # type: ignore[arg-type]
    images, labels = check_images(images), None if labels is None else as_labels(labels)
    if len(images) == 0 or (labels is not None and len(labels) != len(images)):
        found = "no labels" if labels is None else str(len(labels))
        raise InputError(f"expected as many labels as images, at least one, got {len(images)} and {found}")
    if batch_size > 0:  # batches of one size, so that few images are left for another epoch
        batch_size = len(images) // -(-len(images) // batch_size)
    recipe = Recipe(sigma or 0.0, epochs, batch_size, lr, warmup_epochs=3 * epochs // 10, seed=seed, **SMALL)
    device = next(model.parameters()).device
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
