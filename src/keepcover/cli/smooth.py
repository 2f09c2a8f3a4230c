"""``keepcover smooth``: noisy logits into a store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from keepcover.cli import console as ui

if TYPE_CHECKING:
    from torch import Tensor

    from keepcover.engine.smoother import Classifier, Smoother
    from keepcover.store import Chunk, LogitStore
    from keepcover.store.cluster import Cluster, ClusterFilled

EngineName = Literal["local", "ray"]


@ui.app.command()
def smooth(
    model: ui.ModelSpec,
    data: ui.DataSpec,
    root: Annotated[Path, typer.Option("--out", help="Folder of stores; this one gets its own folder there.")],
    sigma: ui.MaybeSigma = None,
    noise: ui.NoiseSpec = None,
    weights: ui.Weights = None,
    data_dir: ui.DataDir = None,
    draws: Annotated[int, typer.Option(help="Noisy copies per image; more can be added later.")] = 256,
    images: Annotated[int | None, typer.Option(help="Only the first so many images.")] = None,
    seed: ui.Seed = 0,
    device: ui.Device = None,
    autocast: ui.Autocast = None,
    compile: ui.Compile = False,
    channels_last: ui.ChannelsLast = False,
    batch_size: ui.BatchSize = None,
    chunk_images: Annotated[int | None, typer.Option(help="Images per file, fixed when the store is made.")] = None,
    chunk_draws: Annotated[int | None, typer.Option(help="Draws per file, fixed when the store is made.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume/--restart", help="Go on from what is stored, or delete it and begin again.")
    ] = True,
    verify: Annotated[
        bool, typer.Option("--verify", help="Only compare all checksums; exit code 1 if a chunk is damaged or missing.")
    ] = False,
    engine: Annotated[EngineName, typer.Option(help="Where to run: this process, or workers on Ray.")] = "local",
    address: Annotated[
        str | None, typer.Option(help="Ray: `auto`, `host:port` or `ray://host:port`; without it, this machine alone.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Ray: how many workers; as many as fit by default.")] = None,
    cpus_per_worker: Annotated[float | None, typer.Option(help="Ray: cores, and torch threads, of a worker.")] = None,
    gpus_per_worker: Annotated[
        float | None, typer.Option(help="Ray: 1 gives each worker a GPU, 0.5 puts two on one; implies --device cuda.")
    ] = None,
    as_json: ui.Json = False,
) -> None:
    """Run a model under noise once and keep its logits on disk, for `keepcover evaluate` and everything else.

    Stop it whenever you like, and run it again: it goes on with the first chunk that is missing or damaged. More draws
    extend the store. Another model, noise, seed, data or numerics get a store of their own. `--engine ray` shares the
    work among several GPUs or machines; the store is the same.
    """
    from dataclasses import replace
    from functools import partial

    import torch

    from keepcover.engine.smoother import Smoother
    from keepcover.errors import InputError
    from keepcover.specs import MODELS, load_data, load_model
    from keepcover.store import LogitStore, StoreKey, size_in_words

    if model in MODELS and weights is None:
        raise InputError(f"{model} needs trained weights: --weights FILE")
    cluster = _cluster(engine, address, workers, cpus_per_worker, gpus_per_worker)
    if cluster is not None and device not in (None, "cpu", "cuda"):
        raise InputError(f"expected --device cpu or cuda with --engine ray, which chooses the GPU, got {device!r}")
    if cluster is not None and gpus_per_worker and device is None:
        device = "cuda"
    labelled = load_data(data, data_dir)
    if images is not None and not 1 <= images <= len(labelled):
        raise InputError(f"expected 1 to {len(labelled)} images of {data}, got {images}")
    labelled = labelled[: len(labelled) if images is None else images]
    here = device if cluster is None else None  # the machine that deals out the work may lack what workers have
    smoother = Smoother(
        load_model(model, weights, len(labelled.class_names), here),
        ui.some_noise(sigma, noise),
        batch_size=batch_size,
        device=here,
        autocast=None if autocast is None else getattr(torch, autocast),
        channels_last=channels_last,
        compile=compile,
    )
    key = StoreKey.of(smoother, labelled.pair, seed)
    if cluster is not None and device is not None:
        key = replace(key, device=device)
    store = LogitStore.open(
        root, key, draws=draws, chunk_images=chunk_images, chunk_draws=chunk_draws, restart=not resume and not verify
    )
    damaged = store.verify() if verify else {}
    missing = store.missing(draws)
    if verify:
        _report(store, damaged, missing, as_json)
        raise typer.Exit(1 if damaged or missing else 0)
    for chunk, why in store.damaged.items():
        if any(chunk.overlaps(other) for other in missing):
            _warn(f"damaged: {chunk.name}: {why}; computing it again")
    if cluster is None:
        done, more = store.fill(smoother, labelled.pair, draws), {}
    else:
        build = None if model in MODELS else partial(load_model, _everywhere(model), device=key.device)
        done = _on_cluster(cluster, store, smoother, labelled.pair, draws, build)
        more = {
            "engine": "ray",
            "workers": done.workers,
            "lost_workers": done.lost_workers,
            "repeated_chunks": done.repeated_chunks,
        }
    facts = {
        **store.summary(),
        "computed_chunks": done.computed,
        "reused_chunks": done.reused,
        "damaged": done.damaged,
        "seconds": round(done.seconds, 3),
        "noisy_images_per_second": round(done.noisy_images / done.seconds, 1),
        **more,
    }
    if as_json:
        ui.print_json(facts)
        return
    lines = [
        f"store    {store.folder}",
        f"holds    {facts['images']} images x {facts['draws']} draws x {facts['classes']} classes, float16, "
        f"{size_in_words(facts['bytes'])} in {_count(facts['chunks'], 'file')}",
    ]
    if done.computed:
        rate = f"{facts['noisy_images_per_second']:.0f} noisy images/s"
        lines.append(
            f"done     {_count(done.computed, 'chunk')} computed, {done.reused} reused, {done.seconds:.1f} s, {rate}"
        )
        if more:
            lost = (
                f", {_count(more['lost_workers'], 'worker')} lost, {_count(more['repeated_chunks'], 'chunk')} repeated"
            )
            lines.append(f"engine   Ray, {_count(more['workers'], 'worker')}{lost if more['lost_workers'] else ''}")
    else:
        lines.append(f"done     nothing to do: all of it was there, and every checksum matches ({done.seconds:.1f} s)")
    lines.append(f"next     keepcover evaluate {store.folder} --epsilon EPSILON")
    ui.out.print("\n".join(lines))


def _cluster(
    engine: EngineName, address: str | None, workers: int | None, cpus: float | None, gpus: float | None
) -> Cluster | None:
    """What ``--engine ray`` asks for; None for this process."""
    from keepcover.errors import InputError
    from keepcover.store.cluster import Cluster

    if engine == "ray":
        return Cluster(address, workers, 1.0 if cpus is None else cpus, gpus)
    given = {"--address": address, "--workers": workers, "--cpus-per-worker": cpus, "--gpus-per-worker": gpus}
    for name, value in given.items():
        if value is not None:
            raise InputError(f"{name} is for workers on Ray: add --engine ray, or leave it out")
    return None


def _everywhere(spec: str) -> str:
    """A model's name for workers: files by their full path, because a worker need not run in this folder."""
    return str(Path(spec).resolve()) if Path(spec).is_file() else spec


def _on_cluster(
    cluster: Cluster,
    store: LogitStore,
    smoother: Smoother,
    data: tuple[Tensor, Tensor],
    draws: int,
    build: Callable[[], Classifier] | None,
) -> ClusterFilled:
    """Fill a store on Ray; what Ray prints stays off the screen and out of ``--json``."""
    import io
    from contextlib import redirect_stdout

    from keepcover.store.cluster.ray import fill

    with redirect_stdout(io.StringIO()):
        return fill(store, smoother, data, draws, cluster, factory=build)


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _warn(text: str) -> None:
    ui.err.print(text, style="yellow")


def _report(store: LogitStore, damaged: dict[str, str], missing: list[Chunk], as_json: bool) -> None:
    """What ``--verify`` found."""
    sound = not damaged and not missing
    for name, why in damaged.items():
        _warn(f"damaged: {name}: {why}")
    if as_json:
        names = [chunk.name for chunk in missing]
        ui.print_json({**store.summary(), "damaged": damaged, "missing": names, "sound": sound})
        return
    verdict = "all checksums match" if sound else f"{len(damaged)} damaged, {len(missing)} missing"
    there = _count(len(store.entries), "intact chunk")
    ui.out.print(f"{store.folder}: {there}, {verdict}")
