"""What the page asks, answered as plain values for JSON."""

from __future__ import annotations

from typing import Any

import torch

import keepcover
from keepcover.explore.attacking import Attempt, attack_one, find_lost
from keepcover.explore.curves import Curves
from keepcover.explore.images import amplified, data_uri, read_upload
from keepcover.explore.lineup import Lineup, sentence
from keepcover.explore.look import bars, nested, own_sets
from keepcover.explore.uploads import Images, Shown
from keepcover.web.problems import invalid

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

    def check(self, alpha: float, draws: int) -> tuple[float, int]:
        """Levels that are offered, or a refusal."""
        if alpha not in self.lineup.alphas:
            raise invalid(f"expected alpha among {', '.join(f'{a:g}' for a in self.lineup.alphas)}, got {alpha:g}")
        if draws not in self.lineup.draws:
            raise invalid(f"expected draws among {', '.join(map(str, self.lineup.draws))}, got {draws}")
        return alpha, draws

    def check_epsilon(self, epsilon: float) -> float:
        if epsilon not in self.lineup.epsilons:
            raise invalid(
                f"expected epsilon among {', '.join(f'{e:g}' for e in self.lineup.epsilons)}, got {epsilon:g}"
            )
        return epsilon

    def describe(self) -> dict[str, Any]:
        """Everything that does not change while the page is open."""
        subject, lineup = self.subject, self.lineup
        alpha, draws = lineup.default
        promises = [lineup.predictor(c.key, alpha, draws).guarantee for c in reversed(lineup.contenders)]
        parts = {"holdout": subject.holdout, "calibration": subject.calibration, "gallery": subject.gallery}
        return {
            "version": keepcover.__version__,
            "name": subject.name,
            "class_names": list(subject.class_names),
            "shape": list(subject.shape),
            "noise": str(subject.noise),
            "points": {name: 0 if part is None else len(part) for name, part in parts.items()},
            "labels": subject.gallery.labels.tolist(),
            "alphas": list(lineup.alphas),
            "epsilons": list(lineup.epsilons),
            "draws": list(lineup.draws),
            "default": {"alpha": alpha, "draws": draws, "epsilon": self._first_epsilon()},
            "methods": [{"key": c.key, "title": c.title, "noisy": c.noisy} for c in lineup.contenders],
            "gradients": subject.gradients,
            "notes": list(lineup.notes),
            "assumptions": list(dict.fromkeys(text for promise in promises for text in promise.assumptions)),
        }

    def _first_epsilon(self) -> float:
        """Near a third of the largest: large enough to matter, small enough to be useful."""
        return min(self.lineup.epsilons, key=lambda e: abs(e - self.lineup.epsilons[-1] / 3))

    def sets(self, name: str, alpha: float, draws: int) -> dict[str, Any]:
        """The sets of every method at every epsilon: when each label enters, and the bars that explain it."""
        shown = self.images.get(name)
        clean = self.lineup.smoother(noisy=False).logits(shown.pixels, 1, self.lineup.stream, torch.tensor([shown.id]))
        probabilities = clean[0, 0].softmax(-1)
        labels = self._shown_labels(probabilities, shown.label)
        return {
            "image": name,
            "label": shown.label,
            "no_promise": None if shown.exchangeable else NO_PROMISE,
            "prediction": int(probabilities.argmax()),
            "alpha": alpha,
            "draws": draws,
            "shown": labels,
            "methods": {c.key: self._method(c.key, shown, alpha, draws, labels) for c in self.lineup.contenders},
        }

    def _shown_labels(self, probabilities: torch.Tensor, label: int | None) -> list[int]:
        """All labels in their own order, or the likeliest of many, the true one among them."""
        if len(probabilities) <= MANY:
            return list(range(len(probabilities)))
        likeliest = probabilities.argsort(descending=True)[:MANY].tolist()
        return likeliest if label is None or label in likeliest else [*likeliest[:-1], label]

    def _method(self, key: str, shown: Shown, alpha: float, draws: int, labels: list[int]) -> dict[str, Any]:
        lineup = self.lineup
        predictor, id = lineup.predictor(key, alpha, draws), torch.tensor([shown.id])
        own = own_sets(predictor, shown.pixels, id, alpha, lineup.epsilons, lineup.stream)
        inside = nested(own)[:, 0]
        enters = [int(column.nonzero()[0]) if column.any() else None for column in inside.T]
        explained = bars(predictor, shown.pixels, id, alpha, lineup.epsilons, lineup.stream)
        promises = [predictor.at(alpha, epsilon).guarantee for epsilon in lineup.epsilons]
        return {
            "certified": promises[0].certified,
            "draws": promises[0].draws,
            "enters": enters,  # index of the smallest epsilon whose set holds the label: it stays from there on
            "sizes": inside.sum(dim=1).tolist(),
            "own": own[:, 0][:, labels].int().tolist(),
            "support": [[round(float(v), 4) for v in bar.support[labels]] for bar in explained],
            "needed": [round(bar.needed, 4) for bar in explained],
            "rules": [bar.words for bar in explained],
            "full": [predictor.levels[alpha, epsilon].full for epsilon in lineup.epsilons],
            "promises": [sentence(promise) for promise in promises],
        }

    def upload(self, content: bytes, invert: bool) -> dict[str, Any]:
        pixels, notices = read_upload(content, self.subject.shape, invert)
        return {"image": self.images.add(pixels), "notices": notices}

    def attack(self, name: str, label: int | None, alpha: float, draws: int, epsilon: float) -> dict[str, Any]:
        """Every attack at this epsilon; the label is the image's own, the one given, or what the model predicts."""
        if epsilon == 0:
            raise invalid("epsilon is 0, so an attacker may change nothing; move epsilon up first")
        shown = self.images.get(name)
        label, source = self._target(shown, label)
        found = attack_one(self.lineup, shown.pixels, label, shown.id, alpha, draws, epsilon)
        return {
            "image": name,
            "label": label,
            "label_source": source,
            "epsilon": epsilon,
            "alpha": alpha,
            "draws": draws,
            "original": data_uri(shown.pixels[0]),
            "attempts": [self._attempt(one, shown, label) for one in found],
        }

    def _target(self, shown: Shown, label: int | None) -> tuple[int, str]:
        if label is not None:
            if not 0 <= label < len(self.subject.class_names):
                raise invalid(f"expected a label between 0 and {len(self.subject.class_names) - 1}, got {label}")
            return label, "the label you chose"
        if shown.label is not None:
            return shown.label, "its true label"
        clean = self.lineup.smoother(noisy=False).logits(shown.pixels, 1, self.lineup.stream, torch.tensor([shown.id]))
        return int(clean[0, 0].argmax()), "what the model predicts, as the true label is not known"

    def _attempt(self, one: Attempt, shown: Shown, label: int) -> dict[str, Any]:
        difference, gain = amplified(one.attacked[0] - shown.pixels[0])
        return {
            "aim": one.aim,
            "title": one.title,
            "attacked": data_uri(one.attacked[0]),
            "difference": data_uri(difference),
            "gain": gain,
            "distance": one.distance,
            "largest_change": one.largest_change,
            "fates": one.fates(label),
            "before": one.before,
            "after": one.after,
        }

    def find(self, alpha: float, draws: int, epsilon: float, after: int) -> dict[str, Any]:
        if epsilon == 0:
            raise invalid("epsilon is 0, so an attacker may change nothing; move epsilon up first")
        return find_lost(self.lineup, alpha, draws, epsilon, after % len(self.subject.gallery))
