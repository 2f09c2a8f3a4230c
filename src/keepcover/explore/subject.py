"""What is explored: a model, its noise, and data in three disjoint parts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from keepcover.attacks import NoisyModel, pgd
from keepcover.data import Labelled
from keepcover.engine.smoother import Classifier, Smoother
from keepcover.errors import InputError
from keepcover.noise import Gaussian, Noise, Stream
from keepcover.prediction.predictor import Predictor
from keepcover.promises import Promise
from keepcover.tasks import Classification, Task
from keepcover.tasks.metrics import check_labels
from keepcover.training.example import SIGMA, example_model, example_split

LEAST = 100  # images for a holdout, calibration points and a gallery
CALIBRATION, GALLERY = 2000, 500  # at most, unless asked for
REACH = 1.5  # sigmas: the largest epsilon of the slider


@dataclass(frozen=True)
class Subject:
    """A model with everything the explorer does with it.

    Attributes:
        name: what the page calls it.
        smoother: the classifier under the noise it was trained for.
        gallery: the images on show, used for nothing else; ``class_names`` has one name per output of the model.
        holdout, calibration: None where a saved predictor stands alone.
        saved: a predictor that was calibrated elsewhere.
        task: of every method that is calibrated here.
        norm: in which attacks are measured; a saved predictor brings its own.
        reach: the largest epsilon on show; a saved predictor brings its own.
        promise: of every method that is calibrated here and can make it.
        gradients: whether the model can be differentiated; attacks search by queries alone where it cannot.
        cheap: whether calibrating everything in advance costs nothing worth asking for.
        notes: how it came about, for the page.
    """

    name: str
    smoother: Smoother
    gallery: Labelled
    holdout: Labelled | None = None
    calibration: Labelled | None = None
    saved: Predictor | None = None
    task: Task = field(default_factory=Classification)
    norm: str = "l2"
    reach: float = 1.0
    promise: Promise = Promise()
    gradients: bool = True
    cheap: bool = False
    notes: tuple[str, ...] = ()

    @property
    def noise(self) -> Noise:
        return self.smoother.noise

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels, height, width."""
        return tuple(self.gallery.images.shape[1:])

    @property
    def clip(self) -> tuple[float, float] | None:
        """Attacked images stay images: pixels in [0, 1], where the data are."""
        low, high = self.gallery.images.aminmax()
        return (0.0, 1.0) if float(low) >= 0 and float(high) <= 1 else None


def digits_subject(seed: int = 0, say: Callable[[str], None] = print) -> Subject:
    """The demo: a small CNN, trained here and now on part of the digits."""
    train, holdout, calibration, gallery = example_split(seed)
    say(f"training a small CNN on {len(train)} digits under noise of sigma {SIGMA:g}")
    model = example_model(train, seed, progress=True)
    note = f"A small CNN, trained at start on {len(train)} of scikit-learn's digits under noise of sigma {SIGMA:g}."
    parts = (gallery, holdout, calibration)
    return Subject("handwritten digits", Smoother(model, SIGMA), *parts, reach=REACH * SIGMA, cheap=True, notes=(note,))


def own_subject(
    model: Classifier,
    data: Labelled,
    noise: Noise | float,
    *,
    norm: str | None = None,
    reach: float | None = None,
    score: str = "hps",
    calibration: int | None = None,
    gallery: int | None = None,
    device: str | None = None,
    seed: int = 0,
) -> Subject:
    """A model and data of the user's: the data are split into holdout, calibration points and gallery."""
    parts = _split(data, calibration, gallery, seed)
    if parts is None:
        purpose = "for a holdout, calibration points and a gallery"
        raise InputError(f"expected at least {LEAST} labelled images, {purpose}, got {len(data)}")
    smoother, task = Smoother(model, noise, device=device), Classification(score)
    added = smoother.noise
    norm = added.check_norm(norm)
    if reach is None:
        if not isinstance(added, Gaussian) or norm != "l2":
            raise InputError(f"expected --epsilon, the largest radius on show, in {norm}; 1.5 sigma is for L2 alone")
        reach = REACH * added.sigma
    return _subject(data.name, smoother, *parts, task=task, norm=norm, reach=reach)


def saved_subject(
    predictor: Predictor, data: Labelled, *, calibration: int | None = None, gallery: int | None = None, seed: int = 0
) -> Subject:
    """A saved predictor on labelled data that it was not calibrated on.

    Vanilla CP and RSCP+ are calibrated beside it on part of the data where there are enough of them.
    """
    refuse_groups(predictor.rule.asked.promise)
    certifies, least_alpha = predictor.noise.certifies, min(alpha for alpha, _ in predictor.levels)
    notes = ["The predictor was calibrated elsewhere; the images here must not have been among its calibration points."]
    parts = _split(data, calibration, gallery, seed)
    if parts is not None and certifies and len(parts[1]) * (least_alpha - 0.002) >= 1:
        held, points, shown = parts
        notes.append(f"Vanilla CP and RSCP+ were calibrated beside it on {len(points)} of the images given here.")
    else:
        held, points, shown = None, None, data.split(-1, seed=seed)[0][: gallery or GALLERY]
        few = f"{len(data)} images are too few to calibrate vanilla CP and RSCP+ beside it"
        notes.append(f"It stands alone: {few if certifies else 'it adds no noise for the others to use'}.")
    if predictor.class_names is not None:
        shown = replace(shown, class_names=predictor.class_names)
    norm = str(predictor.rule.asked.threat.norm)
    own = {"saved": predictor, "task": predictor.task, "notes": tuple(notes), "norm": norm}
    subject = _subject(data.name, predictor.running, held, points, shown, **own)
    if (outputs := len(subject.gallery.class_names)) != predictor.classes:
        raise InputError(f"the predictor has {predictor.classes} classes, the model {outputs}")
    return subject


def refuse_groups(promise: Promise) -> None:
    """An image on the page, or one that is dropped on it, has no group."""
    if promise.groups is not None:
        why = "the promise is per group, and images on the page have none"
        raise InputError(f"{why}; the explorer shows promises that are not per group")


def _split(
    data: Labelled, calibration: int | None, gallery: int | None, seed: int
) -> tuple[Labelled, Labelled, Labelled] | None:
    """Holdout, calibration points and gallery; None where the data are too few."""
    n = len(data)
    for name, asked in (("calibration points", calibration), ("images in the gallery", gallery)):
        if asked is not None and asked < 1:
            raise InputError(f"expected at least 1 for the number of {name}, got {asked}")
    if n < LEAST:
        return None
    wanted = min(CALIBRATION, n * 9 // 20) if calibration is None else calibration
    held = max(1, min(500, n // 10, wanted // 2))  # few calibration points mean a slow model
    if held + wanted >= n:
        raise InputError(f"{wanted} calibration points and a holdout of {held} leave no gallery of {n} images")
    holdout, points, rest = data.split(held, wanted, -1, seed=seed)
    return holdout, points, rest[: gallery or GALLERY]


def _subject(
    name: str, smoother: Smoother, held: Labelled | None, points: Labelled | None, shown: Labelled, **more: Any
) -> Subject:
    """With a name for every output of the model, and knowing whether gradients pass through it."""
    if shown.images.shape[1] not in (1, 3, 4):
        raise InputError(f"expected images of 1, 3 or 4 channels, got {shown.images.shape[1]}; others cannot be shown")
    if isinstance(smoother.model, nn.Module):
        smoother.model.eval()
    outputs = smoother.logits(shown.images[:1], 1, Stream(0, "test")).shape[2]
    check_labels(shown.labels, len(shown), outputs)
    names = tuple(shown.class_names[k] if k < len(shown.class_names) else f"class {k}" for k in range(outputs))
    noisy, gradients = NoisyModel(smoother.model, 0.0, 1, Stream(0, "attack")), False
    with suppress(InputError, RuntimeError):  # a black box: attacks will go by queries alone
        pgd(noisy, *shown[:1].pair, 0.1, steps=1, device=smoother.device, progress=False)
        gradients = True
    return Subject(name, smoother, replace(shown, class_names=names), held, points, gradients=gradients, **more)
