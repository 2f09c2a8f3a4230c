"""Attacks on what is on show, by the library's own attacks. The attacker's noise is its own stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keepcover.attacks import Margin, NoisyModel, mean_softmax, pgd
from keepcover.explore.lineup import Lineup
from keepcover.noise import Stream, get_norm
from keepcover.prediction.predictor import Predictor

STEPS, DRAWS = 20, 32
TITLES = {
    "plain": "PGD on the plain model",
    "smoothed": "SmoothAdv on the model under noise",
    "margin": "PGD on the certified rule's own margin",
}
# What became of a label, by whether it was in the set before and is after.
FATES = {(True, True): "kept", (True, False): "lost", (False, False): "missed", (False, True): "gained"}


def craft(
    lineup: Lineup, aim: str, images: Tensor, labels: Tensor, ids: Tensor, radius: float, target: Any = mean_softmax
) -> Tensor:
    """Attacked images within the radius; ``target`` is the one-level predictor whose margin is attacked, if any."""
    subject, stream = lineup.subject, Stream(lineup.seed + 2, "attack")
    smoother = lineup.smoothers[aim != "plain"]
    noisy = NoisyModel(smoother.model, smoother.noise, DRAWS, stream, smoother.autocast)
    how: dict[str, Any] = {"clip": subject.clip, "device": smoother.device, "gradients": subject.gradients}
    how |= {"steps": STEPS if subject.gradients else 5 * STEPS, "ids": ids, "progress": False, "norm": subject.norm}
    loss = Margin(target, stream) if isinstance(target, Predictor) else target
    with lineup.lock:
        return pgd(noisy, images, labels, radius, loss=loss, **how)


@dataclass(frozen=True)
class Attempt:
    """One attack on one image: what it made, and each method's nested set before and after, as lists of labels."""

    aim: str
    attacked: Tensor
    change: Tensor
    distance: float
    before: dict[str, list[int]]
    after: dict[str, list[int]]

    def fates(self, label: int) -> dict[str, str]:
        """Per method: ``kept``, ``lost``, ``missed`` (never in the set) or ``gained``."""
        return {key: FATES[label in self.before[key], label in self.after[key]] for key in self.before}


def attack_one(
    lineup: Lineup, image: Tensor, label: int, id: int, alpha: float, draws: int, epsilon: float
) -> list[Attempt]:
    """Every attack on one image [1, c, h, w] at one epsilon: the plain model's always, the others where there is noise."""
    labels, ids, norm = torch.tensor([label]), torch.tensor([id]), get_norm(lineup.subject.norm)

    def sets(pixels: Tensor) -> dict[str, list[int]]:
        masks = {one.key: lineup.sets(one.key, alpha, draws, pixels, ids, epsilon) for one in lineup.contenders}
        return {key: mask[-1, 0].nonzero()[:, 0].tolist() for key, mask in masks.items()}

    attempts, before = [], sets(image)
    last = lineup.predictor(lineup.contenders[-1].key, alpha, draws)  # the exact one, or the saved one
    for aim in TITLES if lineup.subject.noise.certifies else ["plain"]:
        target = last.at(alpha, epsilon) if aim == "margin" else mean_softmax
        attacked = craft(lineup, aim, image, labels, ids, epsilon, target)
        change = attacked.double() - image.double()
        attempts.append(Attempt(aim, attacked, change, float(norm.length(change)[0]), before, sets(attacked)))
    return attempts


def find_lost(lineup: Lineup, alpha: float, draws: int, epsilon: float, after: int) -> dict[str, Any]:
    """The next gallery image from which the attack on the plain model drives the first method's label out.

    Images whose label was not in the clean set do not count. Returns its index (None where there is none) and how many
    images were tried.
    """
    gallery, first, tried = lineup.subject.gallery, lineup.contenders[0], 0
    for part in torch.arange(len(gallery)).roll(-(after + 1)).split(16):
        images, labels = gallery.images[part], gallery.labels[part]
        attacked = craft(lineup, "plain", images, labels, part, epsilon)
        clean, hit = (
            lineup.sets(first.key, alpha, draws, some, part, epsilon)[-1].gather(1, labels[:, None])[:, 0]
            for some in (images, attacked)
        )
        lost = (clean & ~hit).nonzero()[:, 0]
        if len(lost):
            return {"index": int(part[lost[0]]), "tried": tried + int(lost[0]) + 1}
        tried += len(part)
    return {"index": None, "tried": tried}
