"""The cluster engine on a real local Ray: workers, drivers and nodes are killed, and the store is the local engine's.

``make ray-test``. Ray runs in processes of their own, so that its threads, warnings and signal handlers stay there.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from keepcover.store import LogitStore
from tests.cli.runner import arguments, chunks
from tests.store.test_store import content
from tests.toys import toy

pytestmark = pytest.mark.ray
pytest.importorskip("ray", reason="needs pip install '.[ray]'")

IMAGES, CHUNKS, PASSES = 60, 18, 3  # forward passes of a chunk: 10 images, 4 draws, 16 noisy images in each

# A model that notes every pass: who ran it, when. It can be slow, fail, or end its own process on one image.
MODULE = """
import os, time, types
import torch

class Noted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.layer = torch.nn.Linear(16, 4)

    def forward(self, images):
        if len(images) > 4:  # else they are the fixed inputs by which a store knows its model
            with open(os.environ["NOTES"], "a") as notes:
                print(os.getpid(), file=notes)
        time.sleep(float(os.environ.get("SLEEP", "0")))
        if images.max() > 6:
            if self.fate.deadly:
                os.kill(os.getpid(), 9)
            raise RuntimeError("this image is too bright")
        return self.layer(images.flatten(1))

def make(deadly=False):
    model = Noted()
    model.fate = types.SimpleNamespace(deadly=deadly)  # no plain attribute: to the store it is the same model
    return model
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, a module that makes the model, and one store for every run."""
    folder, (images, labels) = tmp_path_factory.mktemp("ray"), toy(IMAGES)
    save_file({"images": images, "labels": labels}, folder / "toy.safetensors")
    images = images.clone()
    images[33, 0, 0, 0] = 7.5
    save_file({"images": images, "labels": labels}, folder / "bright.safetensors")
    (folder / "noted.py").write_text(MODULE)
    return folder


class Run:
    """``keepcover smooth`` in a process of its own."""

    def __init__(self, place: Path, out: str, sleep: float = 0.0, **options: Any) -> None:
        self.notes = place / f"{out}.notes"
        self.notes.touch()
        self.root = place / out
        words = arguments(place, out, **{"model": "noted:make", "json": True, **options})
        source = Path(__file__).resolve().parents[2] / "src"
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(place), str(source)]),
            "OMP_NUM_THREADS": "1",
            "SLEEP": str(sleep),
            "NOTES": str(self.notes),
        }
        environment.pop("RAY_ADDRESS", None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "keepcover", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(
                signal.SIGINT, signal.SIG_DFL
            ),  # ignored by all that a shell runs in the background
        )

    @property
    def passes(self) -> list[int]:
        """The process of every pass so far."""
        return [int(line) for line in self.notes.read_text().splitlines()]

    def until(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 90
        while not happened():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=120)
        return self.process.returncode, out, err

    def facts(self) -> dict[str, Any]:
        code, out, err = self.end()
        assert code == 0, err
        assert all(line.startswith("smoothing") for line in err.splitlines()), err  # progress of a busy machine
        return json.loads(out)


RAY = {"engine": "ray", "workers": 2}


@pytest.fixture(scope="module")
def local(place: Path) -> dict[str, bytes]:
    """The files that the local engine writes."""
    facts = Run(place, "local").facts()
    assert facts["chunks"] == CHUNKS
    return content(place / "local")


def gone(pid: int) -> bool:
    """Whether a process has ended, waiting a little for it."""
    for _ in range(600):
        try:
            status = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True
        if status.rsplit(")", 1)[1].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


def test_a_worker_is_killed_and_the_store_is_the_local_engines(place: Path, local: dict[str, bytes]) -> None:
    """SIGKILL in the middle of a chunk: nothing is lost, and only what the dead worker had is computed again."""
    run = Run(place, "killed", sleep=0.2, **RAY)
    run.until(lambda: len(set(run.passes)) == 2 and len(chunks(run.root)) >= 4)
    seen = run.passes
    victim = seen[-1]  # it noted that pass a moment ago and sleeps in it for 0.2 s
    os.kill(victim, signal.SIGKILL)
    stored = {path.name: path.stat().st_mtime_ns for path in chunks(run.root)}
    assert len(stored) < CHUNKS - 4
    facts = run.facts()
    assert content(run.root) == local
    assert (facts["computed_chunks"], facts["lost_workers"]) == (CHUNKS, 1)
    assert 1 <= facts["repeated_chunks"] <= 2
    assert facts["workers"] == 3 == len(set(run.passes))
    assert CHUNKS * PASSES < len(run.passes) <= CHUNKS * PASSES + PASSES  # the chunk that was cut short, and no other
    assert gone(victim)
    assert {name: (chunks(run.root)[0].parent / name).stat().st_mtime_ns for name in stored} == stored


def test_a_driver_is_killed_and_then_interrupted_and_then_done(place: Path, local: dict[str, bytes]) -> None:
    """SIGKILL of the process that deals out the work, Ctrl-C of the next: both leave a store that goes on, and no process."""
    run = Run(place, "resumed", sleep=0.1, **RAY)
    run.until(lambda: len(chunks(run.root)) >= 3)
    run.process.kill()
    assert run.end()[0] == -signal.SIGKILL
    assert all(gone(pid) for pid in set(run.passes))
    first = {path.name: path.read_bytes() for path in chunks(run.root)}
    assert 3 <= len(first) < CHUNKS
    assert LogitStore.at(run.root).verify() == {}

    again = Run(place, "resumed", sleep=0.1, **RAY)
    again.until(lambda: len(chunks(again.root)) >= len(first) + 3)
    os.killpg(again.process.pid, signal.SIGINT)  # what a terminal does
    code, out, err = again.end()
    assert (code, out) == (130, "")
    assert "Traceback" not in err
    assert all(gone(pid) for pid in set(again.passes))
    second = {path.name: path.read_bytes() for path in chunks(run.root)}
    assert second.items() > first.items()

    facts = Run(place, "resumed").facts()  # by the local engine: they are of one mind
    assert (facts["reused_chunks"], facts["computed_chunks"]) == (len(second), CHUNKS - len(second))
    assert content(run.root) == local


# Everything else in one session, so that Ray starts once.
SCRIPT = """
import functools, json, os, sys, warnings
from pathlib import Path
import ray, torch
from keepcover.store.cluster import Cluster
from keepcover.store.cluster.ray import fill
from keepcover.errors import InputError
from keepcover.engine.smoother import Smoother
from keepcover.specs import load_data
from keepcover.store import LogitStore, StoreKey
import noted

warnings.simplefilter("ignore")  # of images that are too bright
place = Path(sys.argv[1])
torch.set_num_threads(1)
data = load_data(str(place / "toy.safetensors")).pair
grid = {"chunk_images": 10, "chunk_draws": 4, "progress": False}
run = Smoother(noted.make(), 0.25, batch_size=16, progress=False)
key = StoreKey.of(run, data, 0)

def refused(act):
    try:
        act()
    except InputError as error:
        return str(error)

class Lazy(torch.utils.data.Dataset):
    # Notes how far reading is ahead of the store.
    def __init__(self, folder):
        self.folder, self.read, self.most = folder, 0, 0
    def __len__(self):
        return len(data[0])
    def __getitem__(self, index):
        self.read += 1
        self.most = max(self.most, self.read / 10 - len(list(self.folder.glob("images-*"))))
        return data[0][index], data[1][index]

def other():
    torch.manual_seed(6)
    model = noted.Noted()
    torch.nn.init.normal_(model.layer.weight)
    return model

def absent():
    raise FileNotFoundError("no weights here")

ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
found = {}

store = LogitStore.open(place / "lazy", key, **grid)
lazy = Lazy(store.folder)
done = fill(store, run, lazy, 12, Cluster(workers=2, ahead=2), factory=noted.make)
found["lazy"] = {"ahead": lazy.most, "in_flight": done.most_in_flight, "read": lazy.read, "computed": done.computed}

store = LogitStore.open(place / "refused", key, **grid)
found["wrong"] = refused(lambda: fill(store, run, data, 4, Cluster(workers=1), factory=other))
found["absent"] = refused(lambda: fill(store, run, data, 4, Cluster(workers=1), factory=absent))
found["address"] = refused(lambda: fill(store, run, data, 4, Cluster("auto")))
unsendable = noted.make()
unsendable.lock = __import__("threading").Lock()
held = Smoother(unsendable, 0.25, batch_size=16, progress=False)
found["unsendable"] = refused(lambda: fill(store, held, data, 4))
found["empty"] = len(store.entries)

bright = load_data(str(place / "bright.safetensors")).pair
for name, deadly in (("deadly", True), ("failing", False)):
    store = LogitStore.open(place / name, StoreKey.of(run, bright, 0), **grid)
    build = functools.partial(noted.make, deadly)
    found[name] = refused(lambda: fill(store, run, bright, 4, Cluster(workers=1), factory=build))
    store.refresh()
    found[name + " intact"] = (len(store.entries), store.verify())
found["alive"] = ray.is_initialized()
print("RESULT", json.dumps(found))
"""


def script(place: Path, text: str, name: str) -> dict[str, Any]:
    source = Path(__file__).resolve().parents[2] / "src"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(place), str(source)]),
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "NOTES": str(place / f"{name}.notes"),
    }
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, "-c", text, str(place)], capture_output=True, text=True, timeout=300, env=environment
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout + done.stderr[-3000:]
    return json.loads(lines[0].removeprefix("RESULT "))


def test_the_python_interface(place: Path, local: dict[str, bytes]) -> None:
    found = script(place, SCRIPT, "script")
    assert content(place / "lazy") == local
    assert found["lazy"]["computed"] == CHUNKS
    assert found["lazy"]["read"] == IMAGES * 3
    assert 2 <= found["lazy"]["in_flight"] <= 4
    assert found["lazy"]["ahead"] <= 4
    assert "has another model: this store is for model" in found["wrong"]
    assert "a worker cannot load the model: FileNotFoundError: no weights here" in found["absent"]
    assert "connected to Ray already" in found["address"]
    assert "this model cannot be sent to workers (" in found["unsendable"]
    assert "give factory=" in found["unsendable"]
    assert (found["empty"], found["alive"]) == (0, True)
    assert "images 30 to 39, draws 0 to 3 ended 3 workers, the last with: " in found["deadly"]
    assert "run the same again" in found["deadly"]
    assert found["failing"] == "the model fails on inputs [16, 1, 4, 4]: this image is too bright"
    for name in ("deadly", "failing"):
        stored, damaged = found[f"{name} intact"]
        assert stored < 6
        assert damaged == {}


# Two nodes beside the head, each with room for one worker; one of them loses its power.
NODES = """
import json, os, signal, sys, threading, time
from pathlib import Path
import torch
from ray.cluster_utils import Cluster as Machines
from keepcover.store.cluster import Cluster
from keepcover.store.cluster.ray import fill
from keepcover.engine.smoother import Smoother
from keepcover.specs import load_data
from keepcover.store import LogitStore, StoreKey
import noted

place = Path(sys.argv[1])
os.environ["SLEEP"] = "0.2"
torch.set_num_threads(1)
machines = Machines(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
nodes = [machines.add_node(num_cpus=1) for _ in range(2)]
os.environ["SLEEP"] = "0"
data = load_data(str(place / "toy.safetensors")).pair
run = Smoother(noted.make(), 0.25, batch_size=16, progress=False)
store = LogitStore.open(place / "nodes", StoreKey.of(run, data, 0), chunk_images=10, chunk_draws=4, progress=False)

def power_cut():
    # Two chunks at a time and three passes each: the seventh pass of a worker says that its first chunk was taken.
    passes = {}
    while len(passes) < 2 or min(passes.values()) < 7:
        time.sleep(0.01)
        notes = (place / "nodes.notes").read_text().split() if (place / "nodes.notes").exists() else []
        passes = {pid: notes.count(pid) for pid in notes}
    machines.remove_node(nodes[1], allow_graceful=False)

cutting = threading.Thread(target=power_cut)
cutting.start()
done = fill(store, run, data, 12, Cluster(machines.address, workers=2))
cutting.join()
pids = set((place / "nodes.notes").read_text().split())
print("RESULT", json.dumps({"lost": done.lost_workers, "repeated": done.repeated_chunks, "computed": done.computed,
                            "workers": done.workers, "pids": len(pids)}))
machines.shutdown()
"""


def test_a_node_is_lost_and_the_store_is_the_local_engines(place: Path, local: dict[str, bytes]) -> None:
    """The cluster is named by its address; the other node goes on alone, and no other worker can start."""
    found = script(place, NODES, "nodes")
    assert content(place / "nodes") == local
    assert (found["computed"], found["lost"], found["workers"], found["pids"]) == (CHUNKS, 1, 2, 2)
    assert 1 <= found["repeated"] <= 2


# A node that claims two GPUs: Ray shows each worker one of them. Torch finds none behind it, and the worker says so.
CARDS = """
import json, os, sys, time
from dataclasses import replace
from pathlib import Path
import torch
from ray.cluster_utils import Cluster as Machines
from keepcover.store.cluster import Cluster
from keepcover.store.cluster.ray import fill
from keepcover.errors import InputError
from keepcover.engine.smoother import Smoother
from keepcover.specs import load_data
from keepcover.store import LogitStore, StoreKey
import noted

place = Path(sys.argv[1])
torch.set_num_threads(1)
machines = Machines(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
machines.add_node(num_cpus=4, num_gpus=2)
data = load_data(str(place / "toy.safetensors")).pair
run = Smoother(noted.make(), 0.25, batch_size=16, progress=False)

class Build:
    def __init__(self, workers):
        self.workers = workers

    def __call__(self):
        seen = Path(os.environ["NOTES"])
        with seen.open("a") as notes:
            print(os.environ["CUDA_VISIBLE_DEVICES"], file=notes)
        deadline = time.monotonic() + 60
        while len(seen.read_text().split()) < self.workers and time.monotonic() < deadline:
            time.sleep(0.05)
        return noted.make()

found = {}
for part, workers in ((1.0, 2), (0.5, 4)):
    Path(os.environ["NOTES"]).write_text("")
    key = replace(StoreKey.of(run, data, int(workers)), device="cuda")
    store = LogitStore.open(place / "cards", key, chunk_images=10, chunk_draws=4, progress=False)
    try:
        fill(store, run, data, 12, Cluster(machines.address, gpus=part), factory=Build(workers))
    except InputError as error:
        found[str(part)] = [sorted(Path(os.environ["NOTES"]).read_text().split()), str(error)]
print("RESULT", json.dumps(found))
machines.shutdown()
"""


def test_workers_share_out_the_gpus_of_a_node(place: Path) -> None:
    """A worker per GPU, or two on each. What runs on them is for a machine that has some."""
    found = script(place, CARDS, "cards")
    assert [found["1.0"][0], found["0.5"][0]] == [["0", "1"], ["0", "0", "1", "1"]]
    assert all("has no GPU that torch can use" in said for _, said in found.values())
