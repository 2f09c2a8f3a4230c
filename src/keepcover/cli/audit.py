"""``keepcover audit``: calibrate methods side by side on part of the data, attack them all on the rest."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

from keepcover.attacks import audit as attack_predictors
from keepcover.attacks import transfer
from keepcover.cli import console as ui
from keepcover.cli import options as opt
from keepcover.engine.smoother import Smoother
from keepcover.errors import InputError
from keepcover.evaluation.manifest import manifest
from keepcover.files import check_folder, write_file
from keepcover.noise import Gaussian
from keepcover.pages.audit_page import audit_page, audit_table
from keepcover.prediction.calibration import calibrate
from keepcover.specs import load_model
from keepcover.training.example import example_model

USUAL = ("cp", "rscp", "rscp_plus_hoeffding", "rcp1", "one_draw", "auto")
MODEL, DATA = opt.Model("small-cnn"), opt.Data("digits")


@opt.command
def audit(
    using: opt.Model = MODEL,
    points: opt.Data = DATA,
    predictor: Path | None = None,
    *,
    asked: opt.Question,
    epsilon: opt.Epsilon = 0.5,
    alpha: opt.Alpha = 0.1,
    method: list[str] | None = None,
    meaning: opt.Meaning,
    draws: int = 16,
    mean_draws: int = 256,
    images: int = 250,
    radius: list[float] | None = None,
    steps: int = 20,
    attack_draws: int = 32,
    restarts: int = 1,
    clip: Annotated[bool, "--clip/--no-clip"] = False,
    folder: Annotated[Path | None, "--out", lambda to: check_folder(to, "audit.html", "audit.json")] = None,
    figures: opt.Figures = None,
    attack: list[str] | None = None,
    surrogate: str | None = None,
    surrogate_weights: Path | None = None,
    seed: opt.Seed = 0,
) -> ui.Answer:
    """Attack predictors and compare what they promise with what is observed.

    Calibrates the methods side by side on part of the data, under noise of sigma 0.5 unless said otherwise, and attacks them
    all on the rest, with SmoothAdv and with an attack on each method's own rule. With no options it trains a small network on
    digits and audits that. A model without gradients (ONNX, scikit-learn) is attacked with `--attack random` or through a
    `--surrogate`.

    Args:
        predictor: Audit this saved predictor on the data, instead of calibrating.
        method: Methods to calibrate and attack side by side.
        draws: Draws per query of the exact certificates.
        mean_draws: Draws per query of methods that average scores.
        images: Test images to attack.
        radius: Attack radii, repeat for a curve; epsilon by default.
        steps: Gradient steps.
        attack_draws: Noise draws inside the attacker's gradient.
        restarts: Attack restarts; all but the first start at random.
        clip: Keep attacked pixels in [0, 1].
        folder: Write an HTML report and JSON there.
        attack: `softmax`, `margin` (both by default) or `random`, which needs no gradients; repeat for more.
        surrogate: Transfer attacks from this PyTorch model, for a model without gradients.
        surrogate_weights: Its checkpoint, where it is a built-in model.
    """
    config, start = opt.config(locals()), time.monotonic()
    if figures is not None and folder is None:
        raise InputError("--figures are those of the page: say where it goes with --out FOLDER")
    said = f"{opt.typed(asked)}{' --method' if method else ''}"
    if predictor is not None and said:
        raise InputError(f"a saved predictor has its own noise, method and promise; leave out {said.strip()}")
    loaded = None if predictor is None else using.predictor(predictor)
    promise = asked.promise() if loaded is None else loaded.rule.asked.promise
    if promise.groups is not None:
        raise InputError("a promise per group is audited in Python: keepcover.audit(predictor, data, groups=...)")
    noise = (asked.optional() or Gaussian(0.5)) if loaded is None else loaded.noise
    with ui.err.status("starting") as status:
        say, data = ui.progress_lines(status), points.labelled()
        if predictor is not None and loaded is not None:
            (test,) = data.split(-1, seed=seed)  # files are often sorted by class; a prefix of them is no sample
            predictors = {predictor.stem: loaded}
        else:
            task = meaning.known(data.class_names)
            if using.model == "small-cnn" and using.weights is None:
                if data.images.shape[1] != 1 or not isinstance(noise, Gaussian):
                    what = "on images of one channel under Gaussian noise; give a model"
                    raise InputError(f"small-cnn without weights is trained on the spot, {what}")
                train, data = data.split(2 * len(data) // 5, -1, seed=seed)
                say(f"training a small CNN on {len(train)} images under {noise}")
                network = example_model(train, seed, sigma=noise.sigma)
            else:
                network = using.load(len(data.class_names) or task.counted(data.labels))
            held, calibration, test = data.split(min(500, len(data) // 10), len(data) * 9 // 20, -1, seed=seed)
            # One draw that certifies nothing needs no noise, where its absence is attacked in the same norm.
            same = noise.check_norm(asked.norm) in Gaussian.norms
            predictors = {}
            for rule in asked.methods(method, USUAL, noise, task, [promise]):
                clean = same and rule.draw_rule == "one" and not rule.certified
                spent = 1 if clean else draws if rule.compares_only else mean_draws
                say(f"calibrating {rule.name} ({rule.draws_used(spent, spent)[0]} draws)")
                made = calibrate(
                    Smoother(network, Gaussian(0.0) if clean else noise, device=using.device),
                    calibration.pair,
                    alpha=alpha,
                    epsilon=epsilon,
                    task=task,
                    method=rule,
                    draws=None if noise.deterministic and not clean else spent,
                    holdout=held.pair if rule.needs_holdout or promise.needs_holdout else None,
                    seed=seed + 1,
                    **asked.arguments(),
                )
                predictors[f"{rule.name} ({made.draws})"] = made
        test = test[:images]
        options: dict[str, Any] = {"steps": steps, "restarts": restarts, "clip": (0.0, 1.0) if clip else None}
        options |= {"seed": seed + 2, "progress": False}
        first = next(iter(predictors.values()))
        attacks: dict[str, Any] = {name: name for name in attack or (() if surrogate else first.task.attacks)}
        if surrogate is not None:
            similar = load_model(surrogate, surrogate_weights, first.classes, using.device)
            attacks["transfer"] = transfer(similar, noise, attack_draws, norm=first.guarantee.threat.norm, **options)
        say(f"attacking {len(test)} images, {steps} steps, {attack_draws} draws")
        options |= {"attacks": attacks, "radii": radius or None, "draws": attack_draws}
        result = attack_predictors(predictors, test.pair, **options)
    page = None
    if folder is not None:
        seconds = time.monotonic() - start
        attacker = f"{steps} steps, {attack_draws} draws, restarts {restarts}"
        facts = {
            "model": Path(using.model).name,
            "weights": Path(using.weights).name if using.weights else "the model's own",
            "data": points,
            "predictor": predictor.name if predictor else "calibrated for this audit",
            "attacker": attacker + (", pixels kept in [0, 1]" if clip else ""),
            "seed": f"{seed}, of splits, attack and defence, apart: for an audit; a deployed predictor draws fresh noise",
            "wall-clock": f"{seconds:.0f} s",
        }
        about = f"{points}, {len(test)} attacked images, {attacker}, seed {seed}"
        page = audit_page(result, about, origin=facts).write(folder / "audit.html", figures)
        written = {**result.to_dict(), "manifest": manifest(ui.command_line(), config | {"noise": noise.spec}, seconds)}
        write_file(folder / "audit.json", json.dumps(written, indent=1).encode())
    table, row = audit_table(result.rows), result.rows[0]
    title = f"Audit: alpha {row.alpha:g}, epsilon {row.epsilon:g}, {len(result.images)} images"
    note = "p-value: chance of covering this few or fewer if the promise held, calibration luck included; violated below 0.001"
    shown = [ui.table(title, table.head, table.rows), ui.dim(note), *([f"report  {page}"] if page else [])]
    return ui.Answer({**result.to_dict(), "report": str(page) if page else None}, shown)
