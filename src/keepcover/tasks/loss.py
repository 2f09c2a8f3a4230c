"""Any loss in [0, 1] that falls as a parameter grows, given as a function: the parameter is what is calibrated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from keepcover.errors import InputError
from keepcover.guarantee import Guarantee
from keepcover.scores import Reading, Tally
from keepcover.tasks.base import Rule, Task
from keepcover.tasks.metrics import RiskEvaluation, as_labels
from keepcover.tasks.shown import Shown, by_row

SLACK = 1e-6  # rounding of a user's own arithmetic


@dataclass(frozen=True)
class Loss(Task):
    """A loss of your own, controlled with one noisy draw per query (method ``one_draw``).

    Calibration finds the smallest parameter of the grid whose expected loss stays at most alpha under attack. On every noisy output
    the loss must lie in [0, 1], must not grow with the parameter, and must be 0 at the last one, which is always safe; that is
    checked on all calibration points.

    Attributes:
        function: ``(outputs [n, ...], truth [n, ...], parameter) -> losses [n]``.
        grid: the parameters to choose from, ascending, fixed before any data.
        make: ``(outputs, parameter) -> tensor [n, ...]``, what a prediction is; the parameter itself by default.
        size: ``(outputs, parameter) -> [n]``, how large predictions are; the parameter itself by default.
        what: the loss in words, as the guarantee says it.
        shape: of one output, once outputs have been seen.

    Example:
        >>> import keepcover
        >>> def missed(outputs, truth, parameter):        # the share of a curve that leaves a band around its prediction
        ...     return ((outputs - truth).abs() > parameter).double().mean(dim=1)
        >>> task = Loss(missed, grid=(0.5, 1.0, 2.0, 4.0, 100.0), what="the expected share of a curve outside its band")
        >>> generator = torch.Generator().manual_seed(0)
        >>> truth = torch.zeros(300, 20)
        >>> outputs = torch.randn(300, 1, 20, generator=generator)
        >>> predictor = keepcover.calibrate_outputs(outputs, truth, task=task, epsilon=0.1, sigma=0.5)
        >>> predictor.threshold
        tensor(2., dtype=torch.float64)
        >>> print(predictor.predict_outputs(outputs[:100]).measure(truth[:100]))
        risk 0.054 [0.013, 0.137]   size 2   100 points
    """

    function: Callable[[Tensor, Tensor, float], Tensor]
    grid: tuple[float, ...]
    make: Callable[[Tensor, float], Tensor] | None = None
    size: Callable[[Tensor, float], Tensor] | None = None
    what: str = "the expected loss of a query"
    shape: tuple[int, ...] | None = None

    name = "loss"
    shares = True
    single = False
    attacks = ("random",)
    assumptions = (
        "On every noisy output the loss lies in [0, 1], does not grow with its parameter and is 0 at the last one, as it was on all "
        "calibration points; the parameters were fixed before any data were seen.",
    )

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise InputError("expected the loss as a function of outputs, truth and a parameter: Loss(function, grid)")
        grid = tuple(float(value) for value in self.grid)
        if len(grid) < 2 or any(not a < b for a, b in pairwise(grid)):
            raise InputError(f"expected at least two ascending parameters, got {list(grid)[:8]}")
        object.__setattr__(self, "grid", grid)

    @property
    def words(self) -> str:  # type: ignore[override]
        return self.what

    @property
    def score(self) -> Loss:
        """What a saved predictor is given again."""
        return self

    def unfit(self, method: Any) -> str:
        if method.things == "any":
            return f"{method.name} counts draws of things that are missed or not, and a loss of your own has none; choose one_draw"
        return super().unfit(method).replace("exact_asymmetric or ", "")

    def seen(self, outputs: Tensor) -> Loss:
        shape = tuple(outputs.shape[2:])
        if outputs.ndim < 2 or not outputs.is_floating_point():
            raise InputError(f"expected float outputs [points, draws, ...], got {outputs.dtype} {tuple(outputs.shape)}")
        if self.shape not in (None, shape):
            raise InputError(f"the predictor was calibrated on outputs {list(self.shape or ())}, got {list(shape)}")
        return self if self.shape == shape else replace(self, shape=shape)

    def check_truth(self, truth: Any, n: int) -> Tensor:
        given = as_labels(truth)
        if given.ndim < 1 or len(given) != n:
            raise InputError(f"expected the truth of {n} points, got shape {tuple(given.shape)}")
        if given.is_floating_point() and not given.isfinite().all():
            raise InputError("expected a finite truth, got NaN or infinity; drop those points first")
        return given

    def losses(self, outputs: Tensor, truth: Tensor, parameter: float) -> Float[Tensor, " n"]:
        """What the function gives, or an error that says how it breaks its contract."""
        found = torch.as_tensor(self.function(outputs, truth, parameter))
        if found.shape != (len(outputs),):
            raise InputError(f"expected one loss for each of {len(outputs)} points, got shape {tuple(found.shape)}")
        if not bool(((found >= -SLACK) & (found <= 1 + SLACK)).all()):
            raise InputError(
                f"expected losses in [0, 1], got {float(found.min()):g} to {float(found.max()):g} at parameter {parameter:g}; divide "
                "by the largest loss there can be"
            )
        return found.double().clamp(0, 1)

    def items(self, outputs: Tensor, truth: Tensor, reading: Reading, u: Tensor) -> Tally:  # type: ignore[override]
        """The losses of every point's first draw at every parameter."""
        first = outputs[:, 0].float()
        curve = torch.stack([self.losses(first, truth, parameter) for parameter in self.grid], dim=1)
        grown = (curve.diff(dim=1) > SLACK).nonzero()
        if len(grown):
            point, at = grown[0].tolist()
            raise InputError(
                f"expected a loss that does not grow with its parameter; at point {point} it grows from {float(curve[point, at]):g} to "
                f"{float(curve[point, at + 1]):g} between {self.grid[at]:g} and {self.grid[at + 1]:g}"
            )
        if float(curve[:, -1].max()) > SLACK:
            raise InputError(
                f"expected a loss of 0 at the largest parameter, {self.grid[-1]:g}, got {float(curve[:, -1].max()):g}; without a "
                "parameter that is always safe there is nothing to fall back on: add one to the grid"
            )
        curve[:, -1] = 0.0
        curve = curve.flip(1).cummax(dim=1).values.flip(1)  # what rounding lets grow
        ones = torch.ones(len(curve), dtype=torch.float64)
        return Tally(curve[..., None].cpu(), ones, ones.long(), self.thresholds)

    @property
    def thresholds(self) -> Tensor:
        # The largest parameter is what infinity is elsewhere: safe, and it says nothing.
        return torch.tensor([*self.grid[:-1], torch.inf], dtype=torch.float64)

    def prepare(self, outputs: Tensor, reading: Reading, u: Tensor) -> Tensor:
        return outputs[:, 0].float()

    def summary(self, prepared: Tensor, rule: Rule, v: Tensor) -> Tensor:
        return prepared.flatten(1) if prepared.ndim > 1 else prepared[:, None]

    def inside(self, summary: Tensor, rule: Rule, threshold: Tensor) -> Tensor:
        """The parameter, and the output that it is for, ``[n, 1 + numbers of an output]``."""
        parameter = threshold.double().clamp(max=self.grid[-1]).reshape(-1, 1).to(summary.device)
        return torch.cat([parameter.expand(len(summary), 1), summary.double()], dim=1)

    def each(self, inside: Tensor, function: Callable[[Tensor, Tensor, float], Tensor]) -> Tensor:
        """A function of positions, outputs and parameter, of the queries of every parameter that occurs."""
        parameter, outputs = inside[:, 0], inside[:, 1:].float().reshape(len(inside), *(self.shape or ()))
        found: Tensor | None = None
        for value in parameter.unique().tolist():
            some = (parameter == value).nonzero()[:, 0]
            part = function(some, outputs[some], value)
            found = part.new_empty(len(inside), *part.shape[1:]) if found is None else found
            found[some] = part
        return parameter if found is None else found

    def sizes(self, inside: Tensor) -> Tensor:
        if (own := self.size) is None:
            return inside[:, 0]
        return self.each(inside, lambda _, outputs, value: own(outputs, value).double())

    def sized(self, size: float) -> str:
        return f"{size:.4g}"

    def sizes_on_grid(self, summary: Tensor, rule: Rule) -> Tensor:
        each = [self.sizes(self.inside(summary, rule, torch.tensor(value))) for value in self.grid]
        return torch.stack(each, dim=1).double()

    def union(self, first: Tensor, second: Tensor) -> Tensor:
        return torch.cat([torch.maximum(first[:, :1], second[:, :1]), first[:, 1:]], dim=1)

    def sets(self, inside: Tensor, guarantee: Guarantee, draws_used: Tensor | None = None) -> LossSets:
        return LossSets(inside, guarantee, self, draws_used)

    def profile(self, outputs: Tensor, u: Tensor, thresholds: ndarray) -> ndarray:
        """A parameter keeps what it keeps, however draws are counted."""
        summary = self.summary(self.prepare(outputs, Reading(True), u), None, u)
        table = np.zeros((len(thresholds), outputs.shape[1] + 1))
        table[:, 0] = [float(self.sizes(self.inside(summary, None, t)).mean()) for t in torch.tensor(thresholds)]
        return table

    def climb(self, outputs: Tensor, truth: Tensor, rule: Rule, threshold: Tensor, u: Tensor) -> Tensor:
        """The mean loss over the attacker's draws."""
        parameter = min(float(threshold.max()), self.grid[-1])
        draws = [self.losses(outputs[:, j].float(), truth, parameter) for j in range(outputs.shape[1])]
        return torch.stack(draws).mean(dim=0)

    def probe(self) -> Tensor:
        return torch.tensor(self.grid, dtype=torch.float64)

    def config(self) -> dict[str, Any]:
        own = {**super().config(), "function": getattr(self.function, "__name__", type(self.function).__name__)}
        return {name: value for name, value in own.items() if name not in ("make", "size")}

    @classmethod
    def from_config(cls, config: dict[str, Any], score: Any = None) -> Loss:
        """The task of a saved predictor: the loss is code and not in the file, so it is given again."""
        if not isinstance(score, Loss):
            raise InputError(
                f"this predictor controls a loss of yours, {config['function']!r}; pass it: load(path, model, score=Loss(...))"
            )
        made = replace(score, shape=None if config["shape"] is None else tuple(config["shape"]))
        if made.config() != config:
            raise InputError(f"this predictor was calibrated with the loss {config}, not {made.config()}")
        return made


@dataclass(frozen=True, repr=False)
class LossSets(Shown):
    """Predictions under a loss: the parameter of every query, its noisy output, and what the task makes of both."""

    inside: Float[Tensor, "n numbers"]
    guarantee: Guarantee
    task: Loss
    draws_used: Tensor | None = None

    @property
    def parameter(self) -> Float[Tensor, " n"]:
        """The parameter that was calibrated, one per query; the same for all unless the promise is per group."""
        return self.inside[:, 0]

    @property
    def trivial(self) -> Tensor:
        """Queries at the largest parameter: safe, but it says nothing."""
        return self.parameter >= self.task.grid[-1]

    @property
    def made(self) -> Tensor:
        """What :attr:`Loss.make` gives for every query; the parameter without it."""
        if (make := self.task.make) is None:
            return self.parameter
        return self.task.each(self.inside, lambda _, outputs, value: make(outputs, value))

    @property
    def size(self) -> Tensor:
        return self.task.sizes(self.inside)

    def covers(self, truth: Any) -> Tensor:
        """One minus the loss of every query."""
        task, known = self.task, self.task.check_truth(truth, len(self)).to(self.inside.device)
        return 1 - task.each(self.inside, lambda some, outputs, value: task.losses(outputs, known[some], value))

    def measure(self, truth: Any) -> RiskEvaluation:
        """The mean loss, with an interval."""
        return RiskEvaluation.of(self.covers(truth), self.size, torch.zeros(len(self)), {})

    def rows(self) -> list[dict[str, Any]]:
        """One dictionary per query: its parameter and the size of what is made of it."""
        return by_row(parameter=self.parameter.tolist(), size=self.size.tolist(), trivial=self.trivial.tolist())

    def arrays(self) -> dict[str, Tensor]:
        return {"parameter": self.parameter, "made": self.made}

    def __repr__(self) -> str:
        found = ", ".join(f"{value:g}" for value in sorted(set(self.parameter.tolist()))[:8])
        return f"{len(self)} predictions at parameter {found}; {self.task.what} is at most {self.guarantee.alpha:g}, {self.held}"
