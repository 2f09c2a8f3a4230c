"""Train or fine-tune any classifier under Gaussian noise."""

from __future__ import annotations

import torch
from jaxtyping import Int, Shaped
from torch import Tensor, nn

from keepcover.engine.inputs import check_images
from keepcover.engine.progress import Bar, Report
from keepcover.errors import InputError


def fit_under_noise(
    model: nn.Module,
    images: Shaped[Tensor, "n ..."],
    labels: Int[Tensor, " n"],
    sigma: float,
    *,
    epochs: int = 30,
    batch_size: int = 128,
    lr: float = 3e-3,
    seed: int = 0,
    progress: bool | Report = True,
) -> nn.Module:
    """Minimise cross-entropy on noisy images (AdamW, one-cycle), in place, and return the model in eval mode.

    An ordinary classifier collapses under noise; one trained like this keeps its accuracy at that sigma. sigma = 0 is
    ordinary training. Images are in [0, 1], the units of sigma: integers are refused, and pixels beyond that are warned of, as
    :func:`keepcover.calibrate` does.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
        >>> images = torch.cat([torch.zeros(64, 1, 2, 2), torch.ones(64, 1, 2, 2)])
        >>> labels = torch.arange(128) // 64
        >>> model = fit_under_noise(model, images, labels, sigma=0.1, lr=0.03, progress=False)
        >>> (model(images).argmax(1) == labels).all().item()
        True
    """
    if len(images) != len(labels) or len(images) == 0:
        raise InputError(f"expected as many labels as images, at least one, got {len(images)} and {len(labels)}")
    if not 0 <= sigma < float("inf") or epochs < 1 or batch_size < 1 or not lr > 0:
        raise InputError(
            f"expected a finite sigma >= 0, at least 1 epoch, a batch size of at least 1 and lr > 0, got sigma {sigma}, "
            f"{epochs} epochs, batch size {batch_size}, lr {lr}"
        )
    images = check_images(images)
    device = next(model.parameters()).device
    images, labels = images.to(device), labels.to(device)
    generator = torch.Generator(device=device).manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=1e-3)
    steps = epochs * -(-len(images) // batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)
    model.train()
    with Bar("training", steps, progress) as bar:
        for _ in range(epochs):
            for index in torch.randperm(len(images), device=device, generator=generator).split(batch_size):
                clean = images[index]
                noise = torch.randn(clean.shape, device=device, generator=generator)
                loss = nn.functional.cross_entropy(model((clean + sigma * noise).float()), labels[index])
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                schedule.step()
                bar.advance()
    return model.eval()
