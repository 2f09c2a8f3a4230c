"""``keepcover smooth``: noisy logits into a store."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from keepcover.cli import console as ui
from keepcover.cli import options as opt
from keepcover.errors import InputError
from keepcover.models import is_named
from keepcover.prediction.question import budget
from keepcover.specs import full_path, load_model, with_files, with_weights_files
from keepcover.store import LogitStore, StoreKey, size_in_words
from keepcover.store.cluster import Cluster


@dataclass(frozen=True)
class Workers:
    """What ``--engine ray`` takes.

    Args:
        address: Ray: `auto`, `host:port` or `ray://host:port`; without it, this machine alone.
        workers: Ray: how many workers; as many as fit by default.
        cpus_per_worker: Ray: cores, and torch threads, of a worker.
        gpus_per_worker: Ray: 1 gives each worker a GPU, 0.5 puts two on one; implies --device cuda.
    """

    address: str | None = None
    workers: int | None = None
    cpus_per_worker: float | None = None
    gpus_per_worker: float | None = None

    def cluster(self, engine: str) -> Cluster | None:
        """None for this process."""
        if engine == "ray":
            cpus = opt.given({"cpus": self.cpus_per_worker})
            return Cluster(self.address, self.workers, gpus=self.gpus_per_worker, **cpus)
        for name in opt.given(vars(self)):
            raise InputError(f"--{name.replace('_', '-')} is for workers on Ray: add --engine ray, or leave it out")
        return None


@opt.command
def smooth(
    using: opt.Model,
    given: opt.Data,
    root: Annotated[Path, "--out"],
    added: opt.Added,
    numerics: opt.Numerics,
    ray: Workers,
    *,
    draws: int | None = None,
    images: int | None = None,
    seed: opt.Seed = 0,
    chunk_images: int | None = None,
    chunk_draws: int | None = None,
    resume: Annotated[bool, "--resume/--restart"] = True,
    verify: bool = False,
    engine: Literal["local", "ray"] = "local",
) -> ui.Answer:
    """Run a model under noise once and keep its logits on disk, for `keepcover evaluate` and everything else.

    Stop it whenever you like, and run it again: it goes on with the first chunk that is missing or damaged. More draws
    extend the store. Another model, noise, seed, data or numerics get a store of their own. `--engine ray` shares the
    work among several GPUs or machines; the store is the same.

    Args:
        root: Folder of stores; this one gets its own folder there.
        draws: Noisy copies per image, 256 by default; more can be added later.
        images: Only the first so many images.
        chunk_images: Images per file, fixed when the store is made.
        chunk_draws: Draws per file, fixed when the store is made.
        resume: Go on from what is stored, or delete it and begin again.
        verify: Only compare all checksums; exit code 1 if a chunk is damaged or missing.
        engine: Where to run: this process, or workers on Ray.
    """
    device, cluster = using.device, ray.cluster(engine)
    if cluster is not None:
        device = device or ("cuda" if cluster.gpus else None)
        if device not in (None, "cpu", "cuda"):
            raise InputError(f"expected --device cpu or cuda with --engine ray, which chooses the GPU, got {device!r}")
        using = replace(using, device=None)  # the machine that deals out the work may lack what workers have
    labelled = given.labelled()
    if images is not None and not 1 <= images <= len(labelled):
        raise InputError(f"expected 1 to {len(labelled)} images of {given}, got {images}")
    labelled = labelled[:images]
    smoother = numerics.smoother(using.load(len(labelled.class_names)), added.required(), using.device)
    draws, _ = budget(smoother.noise, draws, None, tuple(labelled.images.shape[1:]), 256)
    key = StoreKey.of(smoother, labelled.pair, seed, model_fingerprint=using.fingerprint)
    if cluster is not None and device is not None:
        key = replace(key, device=device)
    chunks: dict[str, Any] = {"chunk_images": chunk_images, "chunk_draws": chunk_draws}
    store = LogitStore.open(root, key, draws=draws, restart=not resume and not verify, **chunks)
    if verify:
        return _verify(store, draws)
    missing = store.missing(draws)
    for chunk, why in store.damaged.items():
        if any(chunk.overlaps(other) for other in missing):
            ui.err.print(f"damaged: {chunk.name}: {why}; computing it again", style="yellow")
    more: dict[str, Any] = {}
    if cluster is None:
        done = store.fill(smoother, labelled.pair, draws)
    else:
        from keepcover.store.cluster.ray import fill

        # A worker need not run in this folder: files go by their full path.
        named = with_files(using.model, full_path)
        weights = using.weights and with_weights_files(using.weights, full_path)
        build = partial(load_model, named, weights, len(labelled.class_names), key.device, using.model_output)
        with redirect_stdout(io.StringIO()):  # what Ray prints stays off the screen and out of --json
            factory = None if is_named(using.model) else build
            done = fill(store, smoother, labelled.pair, draws, cluster, factory=factory)
        more = {"engine": "ray", "workers": done.workers}
        more |= {"lost_workers": done.lost_workers, "repeated_chunks": done.repeated_chunks}
    facts = {
        **store.summary(),
        "computed_chunks": done.computed,
        "reused_chunks": done.reused,
        "damaged": done.damaged,
        "seconds": round(done.seconds, 3),
        "noisy_images_per_second": round(done.noisy_images / done.seconds, 1),
        **more,
    }
    size = f"{size_in_words(facts['bytes'])} in {_count(facts['chunks'], 'file')}"
    holds = f"{facts['images']} images x {facts['draws']} draws x {facts['classes']} classes, float16, {size}"
    lines = [f"store    {store.folder}", f"holds    {holds}"]
    if done.computed:
        rate = f"{done.reused} reused, {done.seconds:.1f} s, {facts['noisy_images_per_second']:.0f} noisy images/s"
        lines.append(f"done     {_count(done.computed, 'chunk')} computed, {rate}")
    else:
        lines.append(f"done     nothing to do: all of it was there, and every checksum matches ({done.seconds:.1f} s)")
    if done.computed and more:
        lost = f"{_count(more['lost_workers'], 'worker')} lost, {_count(more['repeated_chunks'], 'chunk')} repeated"
        lines.append(f"engine   Ray, {_count(more['workers'], 'worker')}{f', {lost}' if more['lost_workers'] else ''}")
    return ui.Answer(facts, [*lines, f"next     keepcover evaluate {store.folder} --epsilon EPSILON"])


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _verify(store: LogitStore, draws: int) -> ui.Answer:
    """What ``--verify`` finds."""
    damaged, missing = store.verify(), [chunk.name for chunk in store.missing(draws)]
    intact = not damaged and not missing
    for name, why in damaged.items():
        ui.err.print(f"damaged: {name}: {why}", style="yellow")
    verdict = "all checksums match" if intact else f"{len(damaged)} damaged, {len(missing)} missing"
    said = f"{store.folder}: {_count(len(store.entries), 'intact chunk')}, {verdict}"
    facts = {**store.summary(), "damaged": damaged, "missing": missing, "intact": intact}
    return ui.Answer(facts, [said], int(not intact))
