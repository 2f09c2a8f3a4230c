"""The demo, the plan, the evaluation of precomputed logits and the audit."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

from keepcover.cli.console import (
    Alpha,
    ClassNames,
    DataDir,
    DataSpec,
    Device,
    Epsilon,
    Figures,
    Fingerprint,
    Json,
    ModelOutput,
    ModelSpec,
    Part,
    ScoreName,
    Seed,
    Sigma,
    TransformName,
    Weights,
    app,
    command_line,
    err,
    out,
    print_json,
    print_table,
    read_names,
)
from keepcover.methods import METHODS


@app.command()
def demo(
    folder: Annotated[Path, typer.Option("--out", help="Where the report goes.")] = Path("demo"),
    figures: Figures = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Train, calibrate every method and attack them all on handwritten digits (about a minute, no download).

    Ends with a table and an HTML report that opens offline.
    """
    from keepcover.demo.demo import ALPHA, ATTACKED, EPSILON, SIGMA, run_demo
    from keepcover.demo.report import write_report
    from keepcover.files import check_folder

    check_folder(folder, "report.html", "results.json", "predictor.safetensors")
    if figures is not None:
        check_folder(figures)
    with err.status("starting") as status:
        result = run_demo(seed, say=lambda text: status.update(text) if err.is_terminal else err.print(text))
    page = write_report(result, folder, figures)
    if as_json:
        print_json({**result.to_dict(), "report": str(page)})
        return
    rows = [
        [
            row["name"],
            "yes" if row["certified"] else "no",
            str(row["draws"]),
            f"{row['coverage']['mean']:.3f}",
            f"{row['size']:.2f}",
            f"{row['attacked_coverage']['mean']:.3f}",
            f"{row['attacked_size']:.2f}",
            row["verdict"],
        ]
        for row in result.rows()
    ]
    print_table(
        f"Digits: 90 % coverage, sigma {SIGMA:g}, attacked within L2 {EPSILON:g}",
        ["method", "certified", "draws", "coverage", "size", "attacked coverage", "attacked size", "verdict"],
        rows,
        f"alpha {ALPHA:g}; 500 calibration, 500 test points, {ATTACKED} of them attacked; one split, seed {seed}; {result.seconds:.0f} s",
    )
    out.print(f"\n{result.predictors['exact, 16 draws'].guarantee}\n", highlight=False)
    out.print(f"report     {page}\npredictor  {folder / 'predictor.safetensors'}", highlight=False, soft_wrap=True)


@app.command()
def plan(
    epsilon: Epsilon,
    sigma: Sigma,
    alpha: Alpha = 0.1,
    draws: Annotated[int, typer.Option(help="Model evaluations per query.")] = 16,
    calibration_draws: Annotated[int, typer.Option(help="Model evaluations per calibration point, paid once.")] = 64,
    n: Annotated[int, typer.Option(help="Calibration points.")] = 4750,
    beta: Annotated[float, typer.Option(help="Monte Carlo budget of RSCP+.")] = 0.001,
    holdout: Annotated[Path | None, typer.Option(help="Noisy logits of your own holdout: a file or a store.")] = None,
    as_json: Json = False,
) -> None:
    """What N draws per query buy: the best exact rules beside what RSCP+ pays. Needs no data.

    Sizes are estimates on a reference population that resembles CIFAR-10, or on your own `--holdout` logits.
    """
    from keepcover.evaluation.plan import make_plan

    with err.status("solving"):
        plans = make_plan(
            alpha,
            epsilon,
            sigma,
            draws,
            calibration_draws=calibration_draws,
            n=n,
            beta=beta,
            holdout=None if holdout is None else _holdout(holdout),
        )
    if as_json:
        request = {"alpha": alpha, "epsilon": epsilon, "sigma": sigma, "draws": draws, "n": n, "beta": beta}
        print_json({**request, "plans": [p.to_dict() for p in plans]})
        return

    def cell(value: float | int | None, form: str = "d") -> str:
        return "-" if value is None else format(value, form)

    print_table(
        f"alpha {alpha:g}, epsilon {epsilon:g}, sigma {sigma:g}: {draws} draw{'s' if draws != 1 else ''} per query",
        ["certificate", "draws", "cal. draws", "c", "kappa", "level alpha'", "size (est.)"],
        [
            [
                p.method,
                cell(p.draws),
                cell(p.calibration_draws),
                cell(p.c),
                cell(p.kappa),
                cell(p.level, ".5f"),
                cell(p.estimated_size, ".2f"),
            ]
            for p in plans
        ],
    )
    for p in plans:
        out.print(f"{p.method} ({p.draws}/{p.calibration_draws}): {p.rule}", highlight=False)
    where = "your holdout" if holdout else "a reference population (see --help)"
    out.print(
        f"\nalpha' near alpha: robustness nearly free. Sizes are estimates on {where}.", style="dim", highlight=False
    )


def _holdout(path: Path) -> Any:
    from keepcover.evaluation.splits import check_logits
    from keepcover.methods.holdout import Holdout
    from keepcover.scores.draws import Draws
    from keepcover.scores.scores import HPS
    from keepcover.store import read_logits

    logits, labels = check_logits(*read_logits(path))
    return Holdout(Draws(HPS().order(logits.float()).transpose(1, 2).contiguous()), labels)


@app.command()
def evaluate(
    logits: Annotated[
        Path, typer.Argument(help="safetensors or npz with `logits` [n, N, K] and `labels` [n], or a store's folder.")
    ],
    epsilon: Epsilon,
    sigma: Annotated[
        float | None, typer.Option(help="Standard deviation of the noise, in pixel units; a store knows its own.")
    ] = None,
    alpha: Alpha = 0.1,
    beta: Annotated[float, typer.Option(help="Monte Carlo budget of RSCP+.")] = 0.001,
    score: Annotated[ScoreName, typer.Option(help="Non-conformity score.")] = "hps",
    method: Annotated[list[str] | None, typer.Option(help=f"One or several of {', '.join(METHODS)}, or all.")] = None,
    transform: Annotated[
        TransformName, typer.Option(help="PTT cannot help methods that only compare scores.")
    ] = "both",
    draws: Annotated[int | None, typer.Option(help="Use the first N draws; all by default.")] = None,
    calibration_draws: Annotated[int | None, typer.Option(help="Draws of calibration points, if different.")] = None,
    splits: Annotated[int, typer.Option(help="Random calibration/test halves.")] = 50,
    holdout: Annotated[int, typer.Option(help="Points set aside for tuning and PTT.")] = 500,
    redraw_holdout: Annotated[bool, typer.Option("--redraw-holdout", help="A new holdout for every split.")] = False,
    seed: Seed = 0,
    save: Annotated[Path | None, typer.Option("--out", help="Also write rows and manifest to this JSON file.")] = None,
    report: Annotated[Path | None, typer.Option(help="Also write a self-contained HTML page to this file.")] = None,
    figures: Figures = None,
    class_names: ClassNames = None,
    as_json: Json = False,
) -> None:
    """Any methods on precomputed noisy logits, over random splits. No network needed, so any framework will do.

    `logits[i, j]` are the outputs for image i plus the j-th noise vector, noise independent across images and draws.
    `keepcover smooth` makes a store of them; one that is too large for memory is read piece by piece.
    """
    from keepcover.errors import InputError
    from keepcover.evaluation.manifest import manifest, write_results
    from keepcover.evaluation.stored import evaluate_logits
    from keepcover.files import check_folder, check_place

    start = time.monotonic()
    if report is not None:
        check_place(report)
    elif figures is not None:
        raise InputError("--figures are those of the page: say where it goes with --report FILE.html")
    if save is not None:
        check_folder(save.parent, save.name)
    if figures is not None:
        check_folder(figures)
    names = list(method or ["all"])
    names = list(METHODS) if "all" in names else names
    transforms = ("none", "ptt") if transform == "both" else (transform,)
    with Progress(console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task("evaluating", total=None)
        rows, count, sigma = evaluate_logits(
            logits,
            sigma=sigma,
            epsilon=epsilon,
            alpha=alpha,
            beta=beta,
            score=score,
            methods=names,
            transforms=transforms,
            draws=draws,
            calibration_draws=calibration_draws,
            splits=splits,
            holdout=holdout,
            redraw_holdout=redraw_holdout,
            seed=seed,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    if save:
        config = {"logits": logits.name, "images": count, "splits": splits, "holdout": holdout, "seed": seed}
        write_results(save, [row.to_dict() for row in rows], manifest(command_line(), config, time.monotonic() - start))
    if report:
        with err.status("writing the page"):
            _evaluation_report(
                report,
                figures,
                rows,
                logits,
                count,
                class_names,
                f"seed {seed}: {holdout} holdout points, {'redrawn per split' if redraw_holdout else 'the same in every split'}, "
                "random halves of the rest to calibrate and to look at",
            )
    if as_json:
        print_json({"rows": [row.to_dict() for row in rows], **({"report": str(report)} if report else {})})
        return
    print_table(
        f"{logits.name}: alpha {alpha:g}, epsilon {epsilon:g}, sigma {sigma:g}, score {score}",
        ["method", "transform", "certified", "draws", "cal. draws", "size", "coverage, clean", "trivial splits"],
        [
            [
                row.method,
                row.transform,
                "yes" if row.certified else "no",
                str(row.draws),
                str(row.calibration_draws),
                str(row.size),
                str(row.coverage),
                f"{row.trivial_splits}/{row.splits}",
            ]
            for row in rows
        ],
        f"mean ± standard deviation over {splits} splits, seed {seed}, holdout {holdout}"
        + (" redrawn per split" if redraw_holdout else " fixed"),
    )
    if report:
        out.print(f"report  {report}", highlight=False, soft_wrap=True)


def _evaluation_report(
    report: Path, figures: Path | None, rows: list[Any], logits: Path, images: int, class_names: str | None, split: str
) -> None:
    from keepcover.errors import InputError
    from keepcover.evaluation.stored import origin_of
    from keepcover.pages.evaluation_page import evaluation_page

    names = read_names(class_names)
    classes = len(rows[0].observed.count[0]) if rows else 0
    if names is not None and len(names) != classes:
        raise InputError(f"expected {classes} class names, one per class of the logits, got {len(names)}")
    origin = {**origin_of(logits), "splits and seed": split, "command": command_line()}
    page = evaluation_page(rows, logits.name, images=images, class_names=names, origin=origin)
    page.write(report, figures)


@app.command()
def audit(
    model: ModelSpec = "small-cnn",
    weights: Weights = None,
    model_output: ModelOutput = "logits",
    data: DataSpec = "digits",
    data_dir: DataDir = None,
    part: Part = None,
    predictor: Annotated[
        Path | None, typer.Option(help="Audit this saved predictor on the data, instead of calibrating.")
    ] = None,
    sigma: Sigma = 0.5,
    epsilon: Epsilon = 0.5,
    alpha: Alpha = 0.1,
    method: Annotated[list[str] | None, typer.Option(help="Methods to calibrate and attack side by side.")] = None,
    score: Annotated[ScoreName, typer.Option(help="Non-conformity score.")] = "hps",
    draws: Annotated[int, typer.Option(help="Draws per query of the exact certificates.")] = 16,
    mean_draws: Annotated[int, typer.Option(help="Draws per query of methods that average scores.")] = 256,
    images: Annotated[int, typer.Option(help="Test images to attack.")] = 250,
    radius: Annotated[
        list[float] | None, typer.Option(help="Attack radii, repeat for a curve; epsilon by default.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Gradient steps.")] = 20,
    attack_draws: Annotated[int, typer.Option(help="Noise draws inside the attacker's gradient.")] = 32,
    restarts: Annotated[int, typer.Option(help="Attack restarts; all but the first start at random.")] = 1,
    clip: Annotated[bool, typer.Option(help="Keep attacked pixels in [0, 1].")] = False,
    folder: Annotated[Path | None, typer.Option("--out", help="Write an HTML report and JSON there.")] = None,
    figures: Figures = None,
    attack: Annotated[
        list[str] | None,
        typer.Option(
            help="`softmax`, `margin` (both by default) or `random`, which needs no gradients; repeat for more."
        ),
    ] = None,
    surrogate: Annotated[
        str | None, typer.Option(help="Transfer attacks from this PyTorch model, for a model without gradients.")
    ] = None,
    surrogate_weights: Annotated[
        Path | None, typer.Option(help="Its checkpoint, where it is a built-in model.")
    ] = None,
    fingerprint: Fingerprint = None,
    device: Device = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Attack predictors and compare what they promise with what is observed.

    Calibrates the methods side by side on part of the data and attacks them all on the rest, with SmoothAdv and with an
    attack on each method's own rule. With no options it trains a small network on digits and audits that. A model without
    gradients (ONNX, scikit-learn) is attacked with `--attack random` or through a `--surrogate`.
    """
    from keepcover.cli.side_by_side import AuditRequest, run_audit, write_audit
    from keepcover.errors import InputError
    from keepcover.files import check_folder

    if figures is not None and folder is None:
        raise InputError("--figures are those of the page: say where it goes with --out FOLDER")
    if folder is not None:
        check_folder(folder, "audit.html", "audit.json")
    if figures is not None:
        check_folder(figures)
    start = time.monotonic()
    request = AuditRequest(
        model=model,
        weights=weights,
        data=data,
        data_dir=data_dir,
        predictor=predictor,
        sigma=sigma,
        epsilon=epsilon,
        alpha=alpha,
        methods=tuple(method or ("cp", "rscp", "rscp_plus_hoeffding", "rcp1", "auto")),
        score=score,
        draws=draws,
        mean_draws=mean_draws,
        images=images,
        radii=tuple(radius) if radius else None,
        steps=steps,
        attack_draws=attack_draws,
        restarts=restarts,
        clip=clip,
        attacks=tuple(attack) if attack else None,
        surrogate=surrogate,
        surrogate_weights=surrogate_weights,
        part=part,
        output=model_output,
        fingerprint=fingerprint,
        device=device,
        seed=seed,
    )
    with err.status("starting") as status:
        result = run_audit(request, say=lambda text: status.update(text) if err.is_terminal else err.print(text))
    page = write_audit(request, result, folder, time.monotonic() - start, figures) if folder else None
    if as_json:
        print_json({**result.to_dict(), "report": str(page) if page else None})
        return
    print_table(
        f"Audit: alpha {result.rows[0].alpha:g}, epsilon {result.rows[0].epsilon:g}, {len(result.images)} images",
        ["predictor", "certified", "draws", "attack", "radius", "coverage", "size", "p-value", "verdict"],
        [
            [
                row.name,
                "yes" if row.certified else "no",
                str(row.draws),
                row.attack,
                f"{row.radius:g}",
                f"{row.coverage['mean']:.3f} [{row.coverage['low']:.3f}, {row.coverage['high']:.3f}]",
                f"{row.size:.2f}",
                f"{row.p_value:.2g}",
                row.verdict,
            ]
            for row in result.rows
        ],
        "p-value: chance of covering this few or fewer if the promise held, calibration luck included; violated below 0.001",
    )
    if page:
        out.print(f"report  {page}", highlight=False, soft_wrap=True)
