"""What the page asks, answered as plain values for JSON."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import keepcover
from keepcover.explore.attacking import TITLES, Curves, attack_one, find_lost
from keepcover.explore.images import Images, Shown, amplified, read_upload
from keepcover.explore.lineup import Lineup, bars, nested, own_sets
from keepcover.noise import get_norm
from keepcover.pages.plots import data_uri
from keepcover.web.requests import invalid

NO_PROMISE = (
    "No promise for this image: it does not come from where the calibration points come from. The set is what the method "
    "would answer."
)
MANY = 20  # classes; beyond it only the likeliest are drawn


class Explorer:
    """One subject with everything that is shown of it. Every method may be called from any thread."""

    def __init__(self, lineup: Lineup) -> None:
        self.lineup, self.subject = lineup, lineup.subject
        self.images = Images(self.subject.gallery)
        self.curves = Curves(lineup)

    def prepare(self) -> None:
        """Calibrate what the page shows first, so that what is wrong is an error here and not there."""
        for contender in self.lineup.contenders:
            self.lineup.predictor(contender.key, *self.lineup.default)

    def check(self, asked: dict[str, Any]) -> None:
        """Refuse an alpha, a number of draws or an epsilon that is not offered."""
        lineup = self.lineup
        for name, values in (("alpha", lineup.alphas), ("draws", lineup.draws), ("epsilon", lineup.epsilons)):
            if name in asked and asked[name] not in values:
                among = ", ".join(f"{value:g}" for value in values)
                raise invalid(f"expected {name} among {among}, got {asked[name]:g}")
        if asked.get("epsilon") == 0:
            raise invalid("epsilon is 0, so an attacker may change nothing; move epsilon up first")

    def describe(self) -> dict[str, Any]:
        """Everything that does not change while the page is open."""
        subject, lineup = self.subject, self.lineup
        alpha, draws = lineup.default
        promises = [lineup.predictor(c.key, alpha, draws).guarantee for c in reversed(lineup.contenders)]
        parts = {"holdout": subject.holdout, "calibration": subject.calibration, "gallery": subject.gallery}
        # Near a third of the largest: large enough to matter, small enough to be useful.
        epsilon = min(lineup.epsilons, key=lambda e: abs(e - lineup.epsilons[-1] / 3))
        return {
            "version": keepcover.__version__,
            "name": subject.name,
            "class_names": list(subject.gallery.class_names),
            "shape": list(subject.shape),
            "noise": str(subject.noise),
            "norm": get_norm(subject.norm).short,
            "points": {name: 0 if part is None else len(part) for name, part in parts.items()},
            "labels": subject.gallery.labels.tolist(),
            **{name: list(getattr(lineup, name)) for name in ("alphas", "epsilons", "draws", "notes")},
            "default": {"alpha": alpha, "draws": draws, "epsilon": epsilon},
            "methods": [{"key": c.key, "title": c.title, "noisy": c.noisy} for c in lineup.contenders],
            "gradients": subject.gradients,
            "assumptions": list(dict.fromkeys(text for promise in promises for text in promise.assumptions)),
        }

    def sets(self, image: str, alpha: float, draws: int) -> dict[str, Any]:
        """The sets of every method at every epsilon: when each label enters, and the bars that explain it."""
        shown = self.images.get(image)
        probabilities = self._probabilities(shown)
        labels = self._shown_labels(probabilities, shown.label)
        return {
            "image": image,
            "label": shown.label,
            "no_promise": NO_PROMISE if shown.label is None else None,
            "prediction": int(probabilities.argmax()),
            "shown": labels,
            "methods": {c.key: self._method(c.key, shown, alpha, draws, labels) for c in self.lineup.contenders},
        }

    def _probabilities(self, shown: Shown) -> Tensor:
        """What the model says of the image without noise."""
        clean = self.lineup.smoothers[False].logits(shown.pixels, 1, self.lineup.stream, torch.tensor([shown.id]))
        return clean[0, 0].softmax(-1)

    def _shown_labels(self, probabilities: Tensor, label: int | None) -> list[int]:
        """All labels in their own order, or the likeliest of many, the true one among them."""
        if len(probabilities) <= MANY:
            return list(range(len(probabilities)))
        likeliest = probabilities.argsort(descending=True)[:MANY].tolist()
        return likeliest if label is None or label in likeliest else [*likeliest[:-1], label]

    def _method(self, key: str, shown: Shown, alpha: float, draws: int, labels: list[int]) -> dict[str, Any]:
        lineup = self.lineup
        predictor = lineup.predictor(key, alpha, draws)
        asked = (predictor, shown.pixels, torch.tensor([shown.id]), alpha, lineup.epsilons, lineup.stream)
        own, explained = own_sets(*asked), bars(*asked)
        inside = nested(own)[:, 0]
        promises = [predictor.at(alpha, epsilon).guarantee for epsilon in lineup.epsilons]
        return {
            "certified": promises[0].certified,
            "draws": promises[0].draws,
            # Index of the smallest epsilon whose set holds the label: it stays from there on.
            "enters": [int(column.nonzero()[0]) if column.any() else None for column in inside.T],
            "sizes": inside.sum(dim=1).tolist(),
            "own": own[:, 0][:, labels].int().tolist(),
            "support": [[round(float(v), 4) for v in bar.support[labels]] for bar in explained],
            "needed": [[round(float(v), 4) for v in bar.needed[labels]] for bar in explained],
            "rules": [bar.words for bar in explained],
            "full": [predictor.levels[alpha, epsilon].full for epsilon in lineup.epsilons],
            "promises": [str(promise) for promise in promises],
        }

    def upload(self, content: bytes, invert: bool) -> dict[str, Any]:
        pixels, notices = read_upload(content, self.subject.shape, invert)
        return {"image": self.images.add(pixels), "notices": notices}

    def attack(self, image: str, alpha: float, draws: int, epsilon: float, label: int | None = None) -> dict[str, Any]:
        """Every attack at this epsilon; the label is the one given, the image's own, or what the model predicts."""
        shown, classes = self.images.get(image), len(self.subject.gallery.class_names)
        if label is not None and not 0 <= label < classes:
            raise invalid(f"expected a label between 0 and {classes - 1}, got {label}")
        source = "the label you chose"
        if label is None and shown.label is not None:
            label, source = shown.label, "its true label"
        elif label is None:
            label = int(self._probabilities(shown).argmax())
            source = "what the model predicts, as the true label is not known"
        attempts, reach = [], get_norm(self.subject.norm).reach
        for one in attack_one(self.lineup, shown.pixels, label, shown.id, alpha, draws, epsilon):
            difference, gain = amplified(one.change[0])
            attempts.append(
                {
                    "aim": one.aim,
                    "title": TITLES[one.aim],
                    "attacked": data_uri(one.attacked[0]),
                    "difference": data_uri(difference),
                    "gain": gain,
                    "distance": one.distance,
                    "reach": reach(float(f"{one.distance:.3g}")),
                    "largest_change": float(one.change.abs().max()),
                    "after": one.after,
                    "fates": one.fates(label),
                }
            )
        about = {"label": label, "label_source": source, "epsilon": epsilon}
        return {**about, "original": data_uri(shown.pixels[0]), "attempts": attempts}

    def find(self, alpha: float, draws: int, epsilon: float, after: int = -1) -> dict[str, Any]:
        return find_lost(self.lineup, alpha, draws, epsilon, after % len(self.subject.gallery))
