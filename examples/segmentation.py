"""Masks that keep their pedestrians under attack: small scenes, a UNet trained under noise, and where someone may be."""

import torch

import keepcover
from keepcover.models import UNet
from keepcover.training import fit_under_noise
from keepcover.training.losses import CrossEntropy, rarity

NAMES, NO_LABEL, SIGMA = ("road", "car", "pedestrian"), 255, 0.25


def streets(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Grey roads with one wide car and one or two narrow pedestrians; what lies behind the horizon has no label."""
    generator = torch.Generator().manual_seed(seed)
    images, masks = torch.full((count, 3, 24, 32), 0.5), torch.zeros(count, 24, 32, dtype=torch.int64)
    images[:, :, :6], masks[:, :6] = 0.8, NO_LABEL
    for i in range(count):
        for label, height, width, colour in ((1, 6, 9, (0.2, 0.3, 0.9)), (2, 9, 3, (0.9, 0.3, 0.2))):
            for _ in range(int(torch.randint(1, 1 + label, (1,), generator=generator))):
                top, left = (int(torch.rand(1, generator=generator) * room) for room in (18 - height, 32 - width))
                images[i, :, 6 + top : 6 + top + height, left : left + width] = torch.tensor(colour)[:, None, None]
                masks[i, 6 + top : 6 + top + height, left : left + width] = label
    return images, masks


torch.manual_seed(0)
images, masks = streets(200, seed=1)
model = UNet(classes=3, width=4)
loss = CrossEntropy(NO_LABEL, rarity(masks, 3))
fit_under_noise(model, images, masks, sigma=SIGMA, epochs=12, batch_size=20, loss=loss, progress=False)

task = keepcover.Segmentation(of=("pedestrian",), ignore=NO_LABEL, class_names=NAMES)
predictor = keepcover.calibrate(
    model, streets(200, seed=2), holdout=streets(50, seed=3), task=task, epsilon=0.25, sigma=SIGMA, draws=4
)
print(predictor.guarantee)

images, masks = streets(40, seed=4)
sets = predictor.predict(images)
print(sets.measure(masks))
print(
    f"{(masks == 2).double().mean():.1%} of pixels are pedestrians, {sets.area.mean():.1%} may be, {sets.certain().double().mean():.1%} surely are"
)
print(keepcover.audit(predictor, (images, masks), steps=5, draws=8, progress=False))
