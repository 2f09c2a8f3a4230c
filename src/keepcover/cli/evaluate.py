"""``keepcover evaluate``: methods on precomputed noisy logits, over random splits."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

from keepcover.cli import console as ui
from keepcover.errors import InputError
from keepcover.methods import METHODS, get_method


@ui.app.command()
def evaluate(
    logits: Annotated[
        Path, typer.Argument(help="safetensors or npz with `logits` [n, N, K] and `labels` [n], or a store's folder.")
    ],
    epsilon: ui.Epsilon,
    sigma: Annotated[
        float | None, typer.Option(help="Standard deviation of Gaussian noise; a store knows its own noise.")
    ] = None,
    noise: ui.NoiseSpec = None,
    norm: ui.NormName = None,
    shape: ui.InputShape = None,
    alpha: ui.Alpha = 0.1,
    beta: Annotated[float | None, typer.Option(help="Monte Carlo budget of RSCP+, 0.001 by default.")] = None,
    score: ui.Score = "hps",
    method: Annotated[list[str] | None, typer.Option(help=f"One or several of {', '.join(METHODS)}, or all.")] = None,
    transform: Annotated[
        ui.TransformName, typer.Option(help="PTT cannot help methods that only compare scores.")
    ] = "both",
    draws: Annotated[int | None, typer.Option(help="Use the first N draws; all by default.")] = None,
    calibration_draws: Annotated[int | None, typer.Option(help="Draws of calibration points, if different.")] = None,
    splits: Annotated[int, typer.Option(help="Random calibration/test halves.")] = 50,
    holdout: Annotated[int, typer.Option(help="Points set aside for tuning and PTT.")] = 500,
    redraw_holdout: Annotated[bool, typer.Option("--redraw-holdout", help="A new holdout for every split.")] = False,
    seed: ui.Seed = 0,
    save: Annotated[Path | None, typer.Option("--out", help="Also write rows and manifest to this JSON file.")] = None,
    report: Annotated[Path | None, typer.Option(help="Also write a self-contained HTML page to this file.")] = None,
    figures: ui.Figures = None,
    class_names: ui.ClassNames = None,
    as_json: ui.Json = False,
) -> None:
    """Any methods on precomputed noisy logits, over random splits. No network needed, so any framework will do.

    `logits[i, j]` are the outputs for image i plus the j-th noise vector, noise independent across images and draws.
    `keepcover smooth` makes a store of them; one that is too large for memory is read piece by piece.
    """
    from keepcover.evaluation import evaluate as run
    from keepcover.evaluation.manifest import manifest, write_results
    from keepcover.files import check_folder, check_place
    from keepcover.prediction.source import source_of
    from keepcover.store import StoreReader
    from keepcover.store.logits_file import read_arrays
    from keepcover.tasks import Classification

    start = time.monotonic()
    if report is not None:
        check_place(report)
    elif figures is not None:
        raise InputError("--figures are those of the page: say where it goes with --report FILE.html")
    if save is not None:
        check_folder(save.parent, save.name)
    if figures is not None:
        check_folder(figures)
    names, added = ui.read_names(class_names), ui.asked_noise(sigma, noise)
    chosen = [get_method(name) for name in (METHODS if method is None or "all" in method else method)]
    if beta is not None:
        chosen = [get_method(one, beta=beta) if "beta" in one.options() else one for one in chosen]
    if logits.is_dir():
        outputs, truth = StoreReader.at(logits), None
    elif added is None:
        raise InputError("expected --sigma or --noise, under which the logits of this file were computed")
    else:
        outputs, truth = read_arrays(logits, "logits", "labels")
    source = source_of(outputs, truth, added)
    with Progress(console=ui.err, transient=True, disable=not ui.err.is_terminal) as progress:
        task = progress.add_task("evaluating", total=None)
        rows = run(
            source,
            epsilon=epsilon,
            norm=norm,
            shape=ui.read_shape(shape),
            alpha=alpha,
            methods=chosen,
            transforms=("none", "ptt") if transform == "both" else (transform,),
            task=Classification(score, names),
            draws=draws,
            calibration_draws=calibration_draws,
            splits=splits,
            holdout=holdout,
            redraw_holdout=redraw_holdout,
            seed=seed,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    if save:
        config = {"logits": logits.name, "images": source.points, "splits": splits, "holdout": holdout, "seed": seed}
        write_results(
            save, [row.to_dict() for row in rows], manifest(ui.command_line(), config, time.monotonic() - start)
        )
    kept = "redrawn per split" if redraw_holdout else "the same in every split"
    if report:
        from keepcover.pages.evaluation_page import evaluation_page

        how = f"seed {seed}: {holdout} holdout points, {kept}, random halves of the rest to calibrate and to look at"
        origin = {**_origin(logits), "splits and seed": how, "command": ui.command_line()}
        with ui.err.status("writing the page"):
            page = evaluation_page(rows, logits.name, images=source.points, class_names=names, origin=origin)
            page.write(report, figures)
    if as_json:
        ui.print_json({"rows": [row.to_dict() for row in rows], **({"report": str(report)} if report else {})})
        return
    body: list[list[Any]] = [
        [
            row.method,
            row.transform,
            "yes" if row.guarantee.certified else "no",
            row.guarantee.draws,
            row.guarantee.calibration_draws,
            row.size,
            row.coverage,
            f"{row.trivial_splits}/{row.splits}",
        ]
        for row in rows
    ]
    ui.print_table(
        f"{logits.name}: alpha {alpha:g}, epsilon {epsilon:g}, {source.noise}, score {score}",
        ["method", "transform", "certified", "draws", "cal. draws", "size", "coverage, clean", "trivial splits"],
        body,
        f"mean ± standard deviation over {splits} splits, seed {seed}, holdout {holdout}, {kept}",
    )
    if report:
        ui.out.print(f"report  {report}")


def _origin(path: Path) -> dict[str, str]:
    """Where noisy logits come from: everything a store knows; of a file, its checksum."""
    from keepcover.engine.fingerprint import fingerprint
    from keepcover.store import StoreReader

    if not path.is_dir():
        return {"logits": f"{path.name}, SHA-256 {fingerprint(path)}"}
    store = StoreReader.at(path)
    key = store.key
    return {
        "logits": f"store {store.folder.name}, {store.draws} draws per image",
        "model": f"{key.structure}, fingerprint {key.model}",
        "data": f"{key.images} images, fingerprint {key.data}",
        "noise of the logits": f"{key.added}, seed {key.seed}, role {key.role}",
        "numerics": f"autocast {key.autocast}, channels last {key.channels_last}, compile {key.compile}, device {key.device}",
    }
