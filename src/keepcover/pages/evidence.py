"""``keepcover.evidence``: all that is known of a predictor, for people who must judge it: a page, JSON, a model card."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keepcover.attacks import audit as attack
from keepcover.attacks.audit import Audit, AuditRow
from keepcover.engine.inputs import batches
from keepcover.errors import InputError, refusing
from keepcover.evaluation.manifest import versions
from keepcover.files import write_file
from keepcover.monitoring import Monitor
from keepcover.noise import Stream, fresh_seed, get_norm
from keepcover.pages import evidence_sections as sections
from keepcover.pages.evidence_sections import Moved
from keepcover.pages.report import Page, Section, hardware, rests_on
from keepcover.pages.sections import picturable
from keepcover.prediction import Predictor
from keepcover.prediction.report import facts

SHOWN = 3  # inputs whose moved versions are shown
FORMAT = 1


@dataclass(frozen=True)
class Evidence:
    """What :func:`evidence` found: a notebook shows it, :meth:`write` makes it files.

    Attributes:
        predictor: the one that is judged, of one level: what epsilon means is shown for it.
        whole: the same with all its levels.
        rows: what audits of it observed.
        monitors: reports of monitors, one per level.
        moved: some inputs and what an attack within epsilon makes of them.
        origin: further facts: files, data, command.
    """

    predictor: Predictor
    whole: Predictor
    rows: tuple[AuditRow, ...] = ()
    monitors: tuple[dict[str, Any], ...] = ()
    moved: tuple[Moved, ...] = ()
    origin: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def sections(self) -> list[Section]:
        """Everything but where the page comes from; page and card are made of these."""
        promise = self.predictor.guarantee
        return [
            sections.threat(promise, self.predictor.noise),
            sections.meaning(self.predictor, self.moved),
            sections.promises(self.whole),
            rests_on(promise),
            sections.calibration(self.whole),
            sections.audits(self.rows),
            sections.production(self.monitors),
            sections.budgets(promise),
            sections.uncovered(promise),
            sections.advice(self.whole, self.rows, self.monitors),
        ]

    @property
    def verdict(self) -> str:
        """What an auditor reads first."""
        return sections.verdict(self.whole, self.rows, self.monitors)

    def to_dict(self) -> dict[str, Any]:
        """The same for programs."""
        whole, promise = self.whole, self.predictor.guarantee
        levels = []
        for one in whole.levels.values():
            levels.append({**whole.promised(one).to_dict(), "expected_size": one.size, "always_full": one.full})
            del levels[-1]["assumptions"]  # one list for all levels, below
        shape, threat = whole.inputs and whole.inputs.shape, promise.threat
        spent = None if shape is None else get_norm(str(threat.norm)).spent(threat.epsilon, shape)
        return {
            "format": FORMAT,
            "verdict": self.verdict,
            "predictor": whole.digest,
            "promises": levels,
            "assumptions": [one.to_dict() for one in promise.assumptions],
            "threat": {**threat.config(), "spent": spent},
            "moved": [one.to_dict() for one in self.moved],
            "history": list(whole.history),
            "facts": facts(whole),
            "audits": [vars(row) for row in self.rows],
            "monitors": list(self.monitors),
            "budgets": promise.promise.budgets,
            "not_covered": list(sections.uncovered(promise).points),
            "what_to_do": sections.situations(whole, self.rows, self.monitors),
            "versions": versions(),
            "origin": {name: str(value) for name, value in self.origin.items()},
        }

    @property
    def page(self) -> Page:
        """One self-contained page."""
        subtitle, promise = f"predictor {self.whole.digest[:12]}, {hardware()}", str(self.predictor.guarantee)
        page = Page("Evidence for a promise", subtitle, promise, [*self.sections], self.verdict)
        return page.closed({**facts(self.whole), "predictor digest": self.whole.digest, **self.origin})

    @property
    def card(self) -> str:
        """A section on robustness for a model card, in Markdown."""
        head = f"## Robustness\n\n{self.predictor.guarantee}\n\n{self.verdict}"
        made = ", ".join(f"{name} {version}" for name, version in versions().items())
        return "\n\n".join([head, *(one.markdown() for one in self.sections), f"Made with {made}."]) + "\n"

    def _repr_html_(self) -> str:
        return self.page._repr_html_()

    def write(self, path: str | Path, *, card: str | Path | None = None) -> Path:
        """The page, the JSON beside it under the same name, and the card where one is named."""
        path = Path(path)
        if path.suffix == ".json":
            page = path.with_suffix(".html")
            raise InputError(f"{path} is where the JSON would go; name the page, for instance {page}")
        self.page.write(path)
        write_file(path.with_suffix(".json"), (json.dumps(self.to_dict(), indent=1) + "\n").encode())
        if card is not None:
            write_file(Path(card), self.card.encode())
        return path


def evidence(
    predictor: Predictor,
    *,
    alpha: float | None = None,
    epsilon: float | None = None,
    data: Any = None,
    audits: Sequence[Audit | Mapping[str, Any] | str | Path] = (),
    monitor: Monitor | Mapping[str, Any] | str | Path | None = None,
    origin: Mapping[str, Any] | None = None,
) -> Evidence:
    """All that is known of a predictor: threat, promise, assumptions and how each is checked, calibration data, audits,
    monitors, budgets, what is not covered and what to do.

    Args:
        predictor: with its model or without.
        alpha, epsilon: the level to show epsilon of; the first by default.
        data: some inputs, with or without labels: the first are shown moved by epsilon, at random, and where there are model
            and labels attacked too.
        audits: what :func:`keepcover.audit` returned, or files of ``keepcover audit --out`` or ``--json``; one of another
            predictor is refused.
        monitor: a :class:`keepcover.Monitor`, its state, or what the service says at ``/v1/monitor``; refused likewise.
        origin: further facts for the page.

    Example:
        >>> import keepcover
        >>> logits, truth = torch.randn(400, 4, 3), torch.arange(400) % 3
        >>> predictor = keepcover.calibrate_outputs(logits, truth, epsilon=0.1, sigma=0.2)
        >>> found = keepcover.evidence(predictor, monitor=keepcover.monitor(predictor))
        >>> found.to_dict()["budgets"]["poisoned"]
        'calibration points that were replaced, added or removed: not one'
    """
    one = predictor.at(alpha, epsilon)
    return Evidence(
        one,
        predictor,
        tuple(row for given in audits for row in _audited(given, predictor.digest)),
        () if monitor is None else tuple(_watched(monitor, predictor.digest)),
        () if data is None else tuple(_moved(one, data)),
        origin or {},
    )


# -- what comes in -----------------------------------------------------------------------------------------------------


def _content(given: Any, what: str) -> tuple[dict[str, Any], str]:
    """A JSON object, and what to call it."""
    if isinstance(given, Mapping):
        return dict(given), what
    path, expected = Path(given), f"expected {given} to be JSON, {what}"
    with refusing(f"cannot read {path}", OSError), refusing(f"{expected}; it is not text", UnicodeError):
        text = path.read_text(encoding="utf-8")
    with refusing(expected, ValueError, RecursionError):
        found = json.loads(text)
    if not isinstance(found, dict):
        raise InputError(f"expected {path} to hold a JSON object, {what}, got {type(found).__name__}")
    return found, str(path)


def _audited(given: Any, digest: str) -> list[AuditRow]:
    """The rows of an audit that are about the predictor of this digest."""
    found, name = _content(given.to_dict() if isinstance(given, Audit) else given, "of keepcover audit")
    with refusing(f"{name} is not an audit", advice="give what keepcover audit --predictor FILE --json printed"):
        rows, whose = [AuditRow(**row) for row in found["rows"]], dict(found["predictors"])
        sections.audits(rows).markdown()  # what is no audit cannot be shown as one
    mine = [row for row in rows if whose.get(row.name) == digest]
    if not mine:
        raise InputError(
            f"{name} is an audit of another predictor, or of this one before it was renewed; run keepcover audit --predictor with it"
        )
    return mine


def _watched(given: Any, digest: str) -> list[dict[str, Any]]:
    """Reports of monitors of the predictor of this digest."""
    found, name = _content(given.to_dict() if isinstance(given, Monitor) else given, "of a monitor")
    if found.get("off"):
        raise InputError(f"{name}: the service has no monitor: {found['off']}")
    advice = "give Monitor.to_dict or what /v1/monitor says"
    reports: list[Any] = [found]
    with refusing(f"{name} is not the state of a monitor", advice=advice):
        if "off" in found:  # what the service says
            reports = found["levels"] or [None]
        elif "outcomes" in found:
            reports = [Monitor.from_dict(found).report()]
        sections.production(reports).markdown()  # what is no report cannot be shown as one
        json.dumps(reports, allow_nan=False)
    if any(report.get("predictor") != digest for report in reports):
        raise InputError(f"{name} watches another predictor, or this one before it was renewed")
    return reports


def _moved(predictor: Predictor, data: Any) -> list[Moved]:
    """The first inputs, moved at random by epsilon and, with model and labels, attacked."""
    first = next(iter(batches(predictor.checked(data), size=SHOWN)), None)
    if first is None or len(first) == 0:
        raise InputError("expected some inputs to show epsilon on, got none")
    images, labels = first.images[:SHOWN].cpu(), first.labels
    smoother, promise = predictor.smoother, predictor.guarantee
    units = smoother and smoother.input_scale
    norm, stream = get_norm(str(promise.threat.norm)), Stream(fresh_seed(), "attack")
    move = norm.random(images, promise.epsilon, torch.Generator().manual_seed(stream.seed % 2**63))
    if units is not None:
        move = move.double() * torch.tensor(units, dtype=torch.float64)
    versions = {"moved at random": images + move.to(images.dtype)}
    if smoother is not None and labels is not None and promise.certified and promise.epsilon > 0:
        versions["attacked"] = _attacked(predictor, images, labels[:SHOWN].cpu())
    seen: Any = [None] * len(images)
    if promise.certified and picturable(images) and units is None:
        seen = predictor.noise.noisy(images, stream, torch.arange(len(images)), range(1))[:, 0]
    return [
        Moved(image, {name: some[i] for name, some in versions.items()}, norm, units, seen[i])
        for i, image in enumerate(images)
    ]


def _attacked(predictor: Predictor, images: Tensor, labels: Tensor) -> Tensor:
    """By gradients where there are some, by queries alone elsewhere."""
    known = predictor.rule.asked.promise.groups
    groups = None if known is None else [known.per[0]] * len(images)  # any group will do for an attack

    def by(name: str) -> Tensor:
        found = attack(predictor, (images, labels), attacks=(name,), groups=groups, progress=False, draws=16)
        return next(moved for (_, kind, _), moved in found.attacked.items() if kind == name)

    try:
        return by("margin")
    except InputError:
        return by("random")
