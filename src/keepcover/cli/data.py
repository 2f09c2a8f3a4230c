"""Datasets: what is known, downloads, checks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from keepcover.cli import console as ui


@ui.app.command()
def data(
    name: Annotated[
        str | None, typer.Argument(help="`cifar10`, `cifar100`, `mnist` or `fashion-mnist`; none lists them all.")
    ] = None,
    folder: Annotated[Path, typer.Option("--out", help="Where the files go, or are.")] = Path("data"),
    form: Annotated[
        Literal["binary", "python"], typer.Option(help="Which official version; CIFAR comes in both.")
    ] = "binary",
    mirror: Annotated[str | None, typer.Option(help="Another address that holds the same files.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Only compare what is there with the checksums.")] = False,
    as_json: ui.Json = False,
) -> None:
    """Download a dataset from its official address and verify it; an interrupted download continues where it stopped.

    Archives stay as they are: `--data-dir` reads them without extracting. With `--check`, the exit code is 1 unless a complete
    form is there and nothing is damaged.
    """
    if name is None:
        _list(as_json)
        return
    from keepcover.data.download import complete_forms, download, inventory

    if not check:
        download(name, folder, form, mirror=mirror)
    found = inventory(name, folder)
    complete = complete_forms(name, found)
    good = bool(complete) and all(one.state == "verified" for one in found)
    if as_json:
        files = [
            {"path": str(one.path), "form": one.form, "state": one.state, "bytes": one.path.stat().st_size}
            for one in found
        ]
        ui.print_json({"name": name, "folder": str(folder), "complete": complete, "files": files})
    elif not found:
        ui.out.print(f"nothing of {name} in {folder}")
    else:
        rows = [[_under(one.path, folder), one.form, f"{one.path.stat().st_size:,}", one.state] for one in found]
        ui.print_table(f"{name} in {folder}", ["file", "version", "bytes", "checksum"], rows)
    if check and not good:
        raise typer.Exit(1)


def _under(path: Path, folder: Path) -> str:
    """A file by its place in the folder, which the title names already."""
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)


def _list(as_json: bool) -> None:
    from keepcover.data.known import CLASSES, SOURCES

    rows = [
        {
            "name": name,
            "form": form,
            "classes": len(CLASSES[name]),
            "bytes": sum(file.size for file in source.files),
            "files": [source.address + file.name for file in source.files],
        }
        for name, forms in SOURCES.items()
        for form, source in forms.items()
    ]
    if as_json:
        ui.print_json({"datasets": rows})
        return
    ui.print_table(
        "Datasets",
        ["name", "version", "classes", "MB", "address"],
        [
            [
                row["name"],
                row["form"],
                str(row["classes"]),
                f"{row['bytes'] / 1e6:.0f}",
                row["files"][0].rsplit("/", 1)[0] + "/",
            ]
            for row in rows
        ],
        "`digits` comes with scikit-learn; a folder of class folders needs no name",
    )
