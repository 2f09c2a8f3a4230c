"""The paper's tables and figures, one command each."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from keepcover.cli.console import Json, Seed, app, err, out, print_json


@app.command()
def reproduce(
    names: Annotated[list[str] | None, typer.Argument(help="What to reproduce: names from `--list`, or `all`.")] = None,
    show_list: Annotated[bool, typer.Option("--list", help="Say what there is, and stop.")] = False,
    data: Annotated[
        Path | None, typer.Option(help="Folder of the official CIFAR files, and of `imagenet/CLASS/*.JPEG`.")
    ] = None,
    models: Annotated[
        Path | None, typer.Option(help="Folder of weights and heads; a checkout's own are found by name.")
    ] = None,
    folder: Annotated[Path, typer.Option("--out", help="Where rows, tables and figures go.")] = Path("out/reproduce"),
    store: Annotated[Path, typer.Option(help="Where noisy features are kept between runs.")] = Path("out/store"),
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda where there is one.")] = None,
    compile: Annotated[bool, typer.Option("--compile", help="Compile the network: worth it from minutes on.")] = False,
    images: Annotated[int | None, typer.Option(help="Only so many test images.")] = None,
    draws: Annotated[
        int | None, typer.Option(help="At most so many draws per image: 256 take hours on a CPU, 16 minutes.")
    ] = None,
    splits: Annotated[int, typer.Option(help="Random calibration/test halves.")] = 50,
    holdout: Annotated[int, typer.Option(help="Points set aside for tuning and PTT.")] = 500,
    attack_images: Annotated[int, typer.Option(help="Test images to attack, where a table is about attacks.")] = 2000,
    resume: Annotated[bool, typer.Option("--resume", help="Keep results that are there with these settings.")] = False,
    draw_only: Annotated[
        bool, typer.Option("--draw-only", help="Compute nothing: tables and figures from the JSON files in `--out`.")
    ] = False,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Reproduce tables and figures of the paper from data and weights, beside what it prints.

    Writes NAME.json (rows, and a manifest of settings, versions, hardware, seconds and commit), NAME.md, NAME.html and
    figures. Noisy outputs are stored as they are computed: a run that was stopped goes on where it was.
    """
    import torch

    from keepcover.paper.reproduce.material import Material
    from keepcover.paper.reproduce.run import Run, catalogue, chosen, write_page

    if show_list:
        entries = [
            {"name": name, "title": item.title, "where": item.where, "needs": sorted(item.datasets)}
            for name, item in catalogue().items()
        ]
        if as_json:
            print_json(entries)
            return
        for entry in entries:
            needs = ", ".join(entry["needs"]) or "no data"
            out.print(f"{entry['name']:20} {needs:18} {entry['title']}", highlight=False, soft_wrap=True)
        return
    if draw_only:
        files = [folder / f"{name}.json" for name in chosen(names or []) if (folder / f"{name}.json").is_file()]
    else:
        material = Material(
            data,
            models,
            store,
            device or ("cuda" if torch.cuda.is_available() else "cpu"),
            images,
            compile,
            seed,
            holdout,
            attack_images=attack_images,
        )
        run = Run(
            material, folder, splits, draws, resume, lambda text: err.print(text, highlight=False, soft_wrap=True)
        )
        files = run.reproduce(names or [], " ".join(["keepcover", *_without_paths(sys.argv[1:])]))
    written = {path.stem: [str(made) for made in (path, *write_page(path))] for path in files}
    if as_json:
        print_json({"out": str(folder), "files": written})
        return
    for name, made in written.items():
        out.print(f"{name:20} {made[-1]}", highlight=False, soft_wrap=True)


def _without_paths(words: list[str]) -> list[str]:
    """The command as another person would type it: folders of this machine left out."""
    kept, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word in ("--data", "--models", "--store", "--out"):
            skip = True
        elif not word.startswith(("--data=", "--models=", "--store=", "--out=")):
            kept.append(word)
    return kept
