"""``keepcover audit``: calibrate methods side by side on part of the data, attack them all on the rest."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from keepcover.attacks.attacks import transfer
from keepcover.attacks.audit import Audit, CustomAttack
from keepcover.attacks.audit import audit as attack_predictors
from keepcover.data import Labelled
from keepcover.engine.smoother import Classifier
from keepcover.errors import InputError
from keepcover.evaluation.manifest import manifest
from keepcover.files import make_folder, write_file
from keepcover.methods import get_method
from keepcover.prediction.artifact import load, read
from keepcover.prediction.calibration import calibrate
from keepcover.prediction.predictor import Predictor
from keepcover.specs import load_data, load_model, take_part
from keepcover.training import fit_under_noise


@dataclass(frozen=True)
class AuditRequest:
    """Everything ``keepcover audit`` was asked."""

    model: str = "small-cnn"
    weights: str | Path | None = None
    data: str = "digits"
    data_dir: Path | None = None
    predictor: Path | None = None  # audited instead of freshly calibrated methods
    sigma: float = 0.5
    epsilon: float = 0.5
    alpha: float = 0.1
    methods: tuple[str, ...] = ("cp", "rscp", "rscp_plus_hoeffding", "rcp1", "auto")
    score: str = "hps"
    draws: int = 16
    mean_draws: int = 256
    images: int = 250
    radii: tuple[float, ...] | None = None
    steps: int = 20
    attack_draws: int = 32
    restarts: int = 1
    clip: bool = False
    attacks: tuple[str, ...] | None = None  # softmax and margin, or the surrogate's alone where there is one
    surrogate: str | None = None
    surrogate_weights: str | Path | None = None
    part: str | None = None
    output: str = "logits"
    fingerprint: str | None = None
    device: str | None = None
    seed: int = 0


def run_audit(request: AuditRequest, say: Callable[[str], None] = print) -> Audit:
    """Calibrate and attack; ``say`` is told what happens."""
    data = take_part(load_data(request.data, request.data_dir), request.part)
    classes = len(data.class_names) if request.predictor is None else read(request.predictor)[0]["classes"]
    model = load_model(request.model, request.weights, classes, request.device, request.output)
    if request.model == "small-cnn" and request.weights is None:
        model, data = _trained(request, data, say)
    if request.predictor is not None:
        predictors = {
            request.predictor.stem: load(
                request.predictor, model, fingerprint=request.fingerprint, device=request.device
            )
        }
        (test,) = data.split(-1, seed=request.seed)  # files are often sorted by class; a prefix of them is no sample
    else:
        predictors, test = _calibrated(request, model, data, say)
    test = test[: request.images]
    say(f"attacking {len(test)} images, {request.steps} steps, {request.attack_draws} draws")
    return attack_predictors(
        predictors,
        test.pair,
        attacks=_attacks(request, predictors, classes),
        radii=request.radii,
        steps=request.steps,
        draws=request.attack_draws,
        restarts=request.restarts,
        clip=(0.0, 1.0) if request.clip else None,
        seed=request.seed + 2,
        progress=False,
    )


def _attacks(request: AuditRequest, predictors: dict[str, Predictor], classes: int) -> dict[str, str | CustomAttack]:
    """The attacks asked for by name, and the one transferred from a surrogate."""
    names = request.attacks
    if names is None:
        names = ("softmax", "margin") if request.surrogate is None else ()
    chosen: dict[str, str | CustomAttack] = {name: name for name in names}
    if request.surrogate is not None:
        surrogate = load_model(request.surrogate, request.surrogate_weights, classes, request.device)
        sigma = max(predictor.smoother.sigma for predictor in predictors.values())
        chosen["transfer"] = transfer(
            surrogate,
            sigma,
            request.attack_draws,
            steps=request.steps,
            restarts=request.restarts,
            clip=(0.0, 1.0) if request.clip else None,
            seed=request.seed + 2,
            progress=False,
        )
    return chosen


def _trained(request: AuditRequest, data: Labelled, say: Callable[[str], None]) -> tuple[nn.Module, Labelled]:
    """A small CNN trained on two fifths of the data, and the data it has not seen."""
    if data.images.shape[1] != 1:
        raise InputError("small-cnn without weights is trained on the spot, on images of one channel; give a model")
    train, rest = data.split(2 * len(data) // 5, -1, seed=request.seed)
    say(f"training a small CNN on {len(train)} images under noise of sigma {request.sigma:g}")
    torch.manual_seed(request.seed)
    model = load_model("small-cnn", None, len(data.class_names), request.device)
    assert isinstance(model, nn.Module)
    return fit_under_noise(model, *train.pair, request.sigma, epochs=60, seed=request.seed, progress=False), rest


def _calibrated(
    request: AuditRequest, model: Classifier, data: Labelled, say: Callable[[str], None]
) -> tuple[dict[str, Predictor], Labelled]:
    holdout, calibration, test = data.split(min(500, len(data) // 10), len(data) * 9 // 20, -1, seed=request.seed)
    predictors = {}
    for name in request.methods:
        method = None if name == "auto" else get_method(name)
        clean = name == "cp"
        draws = 1 if clean else request.draws if method is None or method.compares_only else request.mean_draws
        say(f"calibrating {name} ({draws} draws)")
        predictor = calibrate(
            model,
            calibration.pair,
            alpha=request.alpha,
            epsilon=request.epsilon,
            sigma=0.0 if clean else request.sigma,
            method=name,
            score=request.score,
            draws=draws,
            holdout=None if name in ("cp", "rcp1") else holdout.pair,
            class_names=data.class_names,
            seed=request.seed + 1,
            device=request.device,
        )
        predictors[f"{name} ({predictor.draws})"] = predictor
    return predictors, test


def summary_rows(audit: Audit, radius: float) -> list[dict[str, Any]]:
    """One dictionary per predictor, with the worse of the attacks at one radius."""
    rows = []
    for name in dict.fromkeys(row.name for row in audit.rows):
        clean = next(row for row in audit.rows if row.name == name and row.attack == "none")
        worst = min(
            (row for row in audit.rows if row.name == name and row.attack != "none" and row.radius == radius),
            key=lambda row: row.coverage["mean"],
            default=clean,  # nothing was attacked
        )
        rows.append(
            {
                "name": name,
                "method": clean.method,
                "transform": clean.transform,
                "certified": clean.certified,
                "draws": clean.draws,
                "coverage": clean.coverage,
                "size": clean.size,
                "attack": worst.attack,
                "attacked_coverage": worst.coverage,
                "attacked_size": worst.size,
                "p_value": worst.p_value,
                "verdict": worst.verdict,
            }
        )
    return rows


def write_audit(
    request: AuditRequest, audit: Audit, folder: Path, seconds: float = 0.0, figures: Path | None = None
) -> Path:
    """``audit.html`` and ``audit.json``, and the figures where they have a folder; returns the page."""
    config = {key: value.name if isinstance(value, Path) else value for key, value in asdict(request).items()}
    about = manifest("keepcover audit", config, seconds)
    page = _page(request, audit, seconds)
    make_folder(folder)
    write_file(folder / "audit.json", json.dumps({**audit.to_dict(), "manifest": about}, indent=1).encode())
    return page.write(folder / "audit.html", figures)


def _page(request: AuditRequest, audit: Audit, seconds: float) -> Any:
    from keepcover.pages import plots
    from keepcover.pages.report import (
        Figure,
        Page,
        Section,
        attack_figures,
        audit_examples,
        audit_section,
        conclusion,
        curve_words,
        hardware,
        methods_table,
        origin_section,
        promise_section,
    )

    first = audit.rows[0]  # a saved predictor brings its own alpha and epsilon
    radii = sorted({row.radius for row in audit.rows if row.radius > 0})
    radius = first.epsilon if first.epsilon in radii or not radii else radii[-1]
    rows = summary_rows(audit, radius)
    kept = [row["name"] for row in rows if row["certified"]]
    promise = audit.sets[(kept or [first.name])[-1], "none", 0.0].guarantee
    page = Page(
        "Audit: promises under attack",
        f"{Path(request.data).name}, {len(audit.images)} attacked images, {request.steps} L2 steps, {request.attack_draws} attacker "
        f"draws, seed {request.seed}, {hardware()}",
        str(promise),
        conclusion=conclusion(rows, first.alpha, radius),
    )
    pictures = attack_figures(rows, first.alpha, radius)
    if len(radii) > 1:
        curves = {
            row["name"]: sorted(
                (r, min(a.coverage["mean"] for a in audit.rows if a.name == row["name"] and a.radius == r))
                for r in {a.radius for a in audit.rows if a.name == row["name"]}
            )
            for row in rows
        }
        for number, group in enumerate(plots.in_groups(curves), 1):
            drawing = plots.coverage_curves(group, first.alpha, {row["name"]: row["certified"] for row in rows})
            words = f"Coverage by attack radius. {curve_words(group, '.3f')}."
            name = "coverage-by-radius" if number == 1 else f"coverage-by-radius-{number}"
            pictures.append(Figure(name, drawing, "Coverage by attack radius; dotted, the promise.", words))
    note = "Coverage with 95 % Clopper-Pearson intervals; attacked numbers are those of the worst attack."
    page.sections.append(
        Section("Clean and attacked", f"Attacked within L2 {radius:g}.", methods_table(rows), pictures, note=note)
    )
    page.sections.append(audit_section(audit))
    weakest = min(rows, key=lambda row: row["attacked_coverage"]["mean"])["name"]
    shown = audit_examples(audit, weakest, kept[-1], radius) if kept and kept[-1] != weakest else None
    if shown:
        page.sections.append(shown)
    page.sections.append(promise_section(promise.assumptions))
    facts = {
        "model": Path(request.model).name,
        "weights": Path(request.weights).name if request.weights else "the model's own",
        "data": Path(request.data).name + (f", part {request.part}" if request.part else ""),
        "predictor": request.predictor.name if request.predictor else "calibrated for this audit",
        "attacks": ", ".join(dict.fromkeys(row.attack for row in audit.rows if row.attack != "none")) or "none",
        "attacker": f"{request.steps} steps, {request.attack_draws} draws, restarts {request.restarts}"
        + (", pixels kept in [0, 1]" if request.clip else ""),
        "seed": f"{request.seed}, of splits, attack and defence, in separate streams: for an audit; a deployed predictor "
        "draws fresh noise",
        "wall-clock": f"{seconds:.0f} s",
    }
    page.sections.append(origin_section(facts))
    return page
