"""Attacks on what is on show, by the library's own attacks. The attacker's noise is its own stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keepcover.attacks import Margin, NoisyModel, mean_softmax, pgd
from keepcover.explore.lineup import Lineup
from keepcover.explore.look import nested, own_sets
from keepcover.noise import Stream
from keepcover.prediction.predictor import Predictor

STEPS, DRAWS = 20, 32
TITLES = {
    "plain": "PGD on the plain model",
    "smoothed": "SmoothAdv on the model under noise",
    "margin": "PGD on the certified rule's own margin",
}


def aims(lineup: Lineup) -> tuple[str, ...]:
    """The attacks that make sense here: the plain model always, the others where there is noise."""
    return ("plain", "smoothed", "margin") if lineup.subject.noise.certifies else ("plain",)


def craft(
    lineup: Lineup,
    aim: str,
    images: Tensor,
    labels: Tensor,
    ids: Tensor,
    radius: float,
    target: Predictor | None = None,
) -> Tensor:
    """Attacked images within the L2 radius; ``target`` is the one-level predictor whose margin is attacked."""
    subject, stream = lineup.subject, Stream(lineup.seed + 2, "attack")
    smoother = lineup.smoother(aim != "plain")
    noisy = NoisyModel(smoother.model, smoother.noise, DRAWS, stream, smoother.autocast)
    loss = mean_softmax if target is None else Margin(target, stream)
    steps = STEPS if subject.gradients else 5 * STEPS
    with lineup.lock:
        return pgd(
            noisy,
            images,
            labels,
            radius,
            loss=loss,
            steps=steps,
            clip=subject.clip,
            ids=ids,
            device=smoother.device,
            gradients=subject.gradients,
            progress=False,
        )


@dataclass(frozen=True)
class Attempt:
    """One attack on one image: what it made, and each method's nested set before and after, as lists of labels."""

    aim: str
    title: str
    attacked: Tensor
    distance: float
    largest_change: float
    before: dict[str, list[int]]
    after: dict[str, list[int]]

    def fates(self, label: int) -> dict[str, str]:
        """Per method: ``kept``, ``lost``, ``missed`` (never in the set) or ``gained``."""
        words = {(True, True): "kept", (True, False): "lost", (False, False): "missed", (False, True): "gained"}
        return {key: words[label in self.before[key], label in self.after[key]] for key in self.before}


def attack_one(
    lineup: Lineup, image: Tensor, label: int, id: int, alpha: float, draws: int, epsilon: float
) -> list[Attempt]:
    """Every attack on one image [1, c, h, w] at one epsilon."""
    labels, ids = torch.tensor([label]), torch.tensor([id])
    before = _sets(lineup, image, ids, alpha, draws, epsilon)
    attempts = []
    for aim in aims(lineup):
        last = lineup.contenders[-1]  # the exact one, or the saved one
        target = lineup.predictor(last.key, alpha, draws).at(alpha, epsilon) if aim == "margin" else None
        attacked = craft(lineup, aim, image, labels, ids, epsilon, target)
        change = attacked.double() - image.double()
        attempts.append(
            Attempt(
                aim,
                TITLES[aim],
                attacked,
                float(change.norm()),
                float(change.abs().max()),
                before,
                _sets(lineup, attacked, ids, alpha, draws, epsilon),
            )
        )
    return attempts


def _sets(lineup: Lineup, image: Tensor, ids: Tensor, alpha: float, draws: int, epsilon: float) -> dict[str, list[int]]:
    upto = [e for e in lineup.epsilons if e <= epsilon]
    found: dict[str, list[int]] = {}
    for contender in lineup.contenders:
        predictor = lineup.predictor(contender.key, alpha, draws)
        masks = nested(own_sets(predictor, image, ids, alpha, upto, lineup.stream))
        found[contender.key] = masks[-1, 0].nonzero()[:, 0].tolist()
    return found


def find_lost(lineup: Lineup, alpha: float, draws: int, epsilon: float, after: int) -> dict[str, Any]:
    """The next gallery image from which the attack on the plain model drives the first method's label out.

    Images whose label was not in the clean set do not count. Returns its index (None where there is none) and how many
    images were tried.
    """
    gallery, first = lineup.subject.gallery, lineup.contenders[0]
    predictor = lineup.predictor(first.key, alpha, draws)
    upto = [e for e in lineup.epsilons if e <= epsilon]
    order = torch.arange(len(gallery)).roll(-(after + 1))
    tried = 0
    for part in order.split(16):
        images, labels = gallery.images[part], gallery.labels[part]
        attacked = craft(lineup, "plain", images, labels, part, epsilon)
        clean, hit = (
            nested(own_sets(predictor, some, part, alpha, upto, lineup.stream))[-1].gather(1, labels[:, None])[:, 0]
            for some in (images, attacked)
        )
        lost = (clean & ~hit).nonzero()[:, 0]
        if len(lost):
            return {"index": int(part[lost[0]]), "tried": tried + int(lost[0]) + 1}
        tried += len(part)
    return {"index": None, "tried": tried}
