"""The whole life of a promise on digits, with the real commands and the real service: results/life.json.

PYTHONPATH=src python -m benchmarks.life

Calibrate, serve, answer queries whose labels come back, blur the inputs, see the alarm, recalibrate on fresh labelled points,
serve again, and be quiet. Every row is one request of ``PER_BATCH`` images and, after it, its outcomes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.monitor import DRIFTS
from keepcover.evaluation.manifest import manifest, write_results
from keepcover.training.example import SIGMA, example_model, example_split

ALPHA, DELTA, EPSILON, DRAWS, DRIFT, SEED = 0.1, 0.05, 0.25, 16, "blur 3 x 3", 0
PER_BATCH, QUIET, LONGEST = 25, 20, 200  # images of a request; requests of a quiet time; most requests until an alarm
POOL = 250  # images that queries are drawn from; as many others, never asked about, calibrate anew


@dataclass
class Life:
    """One run in a folder: what happened, in order, and one row per request."""

    folder: Path
    quiet: int = QUIET
    began: float = field(default_factory=time.monotonic)
    rows: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)

    def event(self, what: str, **facts: Any) -> None:
        self.events.append({"seconds": round(time.monotonic() - self.began, 1), "event": what, **facts})
        print(self.events[-1], flush=True)

    def command(self, *words: str | Path) -> dict[str, Any]:
        """What a command says as JSON."""
        command = [sys.executable, "-m", "keepcover", *map(str, words), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=self.folder, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
        return json.loads(done.stdout)

    @contextmanager
    def service(self, predictor: str) -> Iterator[Service]:
        """``keepcover serve`` on a free port of the loopback interface, ended as an operator ends it."""
        log = self.folder / f"{predictor}.log"
        command = [sys.executable, "-m", "keepcover", "serve", predictor, "--port", "0", *MODEL, *STATE]
        with log.open("w") as stream:
            process = subprocess.Popen(command, stderr=stream, cwd=self.folder)
        service = Service(log)
        try:
            while not service.port:
                if process.poll() is not None:
                    raise RuntimeError(log.read_text())
                time.sleep(0.1)
                ready, told = (service.logged(name) for name in ("Application startup complete.", "serving"))
                service.port = told[0]["port"] if ready and told else 0
            yield service
        finally:
            process.terminate()
            code = process.wait(60)
        if code:
            raise RuntimeError(f"the service ended with {code}")

    def live(self, service: Service, phase: str, images: Tensor, labels: Tensor, until: str | None) -> str:
        """Ask and tell, ``quiet`` times or until an alarm of that kind; returns the last ticket."""
        picks, ticket = torch.Generator().manual_seed(len(self.rows)), ""
        for _ in range(self.quiet if until is None else LONGEST):
            pick = torch.randint(len(images), (PER_BATCH,), generator=picks)
            answer = service.ask("POST", "/v1/predict", {"images": images[pick].tolist()})
            ticket, truth = answer["ticket"], labels[pick].tolist()
            told = service.ask("POST", "/v1/outcomes", {"ticket": ticket, "labels": truth})
            (level,) = service.ask("GET", "/v1/monitor")["levels"]
            sizes = [one["size"] for one in answer["sets"]]
            row = {"phase": phase, "missed": told["missed"], "size": sum(sizes) / len(sizes)}
            for kind in ("promise", "queries"):
                row[kind] = {name: level[kind][name] for name in ("evidence", "alarm_at")}
                row[kind]["alarm"] = level[kind]["since"] is not None
            self.rows.append(row)
            if until is not None and row[until]["alarm"]:
                break
        return ticket


@dataclass
class Service:
    """A running service: its log, and how to ask it."""

    log: Path
    port: int = 0

    def logged(self, name: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.log.read_text().splitlines() if line.endswith("}")]
        return [line for line in lines if line["event"] == name]

    def ask(self, verb: str, path: str, body: Any = None) -> Any:
        content = None if body is None else json.dumps(body).encode()
        head = {"content-type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", content, head, method=verb)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            return json.load(error)


MODEL = ["--model", "small-cnn", "--weights", "net.safetensors"]
STATE = ["--monitor-file", "monitor.sqlite"]


def live(folder: Path, quiet: int = QUIET) -> Life:
    """The run."""
    life, (train, _, calibration, test) = Life(folder, quiet), example_split(SEED)
    drift, labels = DRIFTS[DRIFT], test.labels[:POOL]
    clean, drifted = test.images[:POOL], drift(test.images[:POOL])
    save_file(example_model(train, SEED).state_dict(), folder / "net.safetensors")
    save_file({"images": calibration.images, "labels": calibration.labels}, folder / "points.safetensors")
    fresh = {"images": drift(test.images[POOL:]), "labels": test.labels[POOL:].contiguous()}
    save_file(fresh, folder / "fresh.safetensors")
    # With confidence over the calibration the monitor tests alpha itself; on average over it, what bad luck may have left.
    asked = ["--alpha", str(ALPHA), "--delta", str(DELTA), "--epsilon", str(EPSILON), "--sigma", str(SIGMA)]
    asked += ["--draws", str(DRAWS), "--seed", str(SEED)]
    made = life.command("calibrate", *MODEL, "--data", "points.safetensors", *asked, "--out", "first.safetensors")
    life.event("calibrated", guarantee=made["levels"][0]["guarantee"])
    with life.service("first.safetensors") as service:
        life.event("served")
        life.live(service, "quiet", clean, labels, None)
        life.event("drift begins", drift=DRIFT, queries=len(life.rows) * PER_BATCH)
        ticket = life.live(service, "drift", drifted, labels, "promise")
        if not life.rows[-1]["promise"]["alarm"]:
            raise RuntimeError("the drift was not found")
        alarms = [{"kind": line["kind"], "evidence": line["evidence"]} for line in service.logged("alarm")]
        life.event(
            "alarm", queries=len(life.rows) * PER_BATCH, log=alarms, health=service.ask("GET", "/healthz")["status"]
        )
    found = life.command(
        "recalibrate", "first.safetensors", *MODEL, "--data", "fresh.safetensors", "--out", "second.safetensors"
    )
    sizes = next(pair for name, pair in found["differences"].items() if name.endswith("expected size"))
    life.event("recalibrated", points=len(test.labels) - POOL, expected_size=sizes)
    with life.service("second.safetensors") as service:
        refused = service.ask("POST", "/v1/outcomes", {"ticket": ticket, "labels": labels[:PER_BATCH].tolist()})
        life.event("served again", old_ticket=refused["error"]["message"])
        life.live(service, "renewed", drifted, labels, None)
        where = f"http://127.0.0.1:{service.port}"
        verdict = life.command("evidence", "second.safetensors", "--monitor", where)["verdict"]
        life.event("quiet", alarms=[line["kind"] for line in service.logged("alarm")], evidence=verdict)
    return life


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/life.json"))
    given, begin = parser.parse_args(), time.perf_counter()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the commands
    with tempfile.TemporaryDirectory() as folder:
        life = live(Path(folder))
    config = {"alpha": ALPHA, "delta": DELTA, "epsilon": EPSILON, "sigma": SIGMA, "draws": DRAWS, "seed": SEED}
    config |= {"drift": DRIFT, "images per request": PER_BATCH, "false alarm": 0.01}
    about = manifest("python -m benchmarks.life", config, time.perf_counter() - begin)
    write_results(given.out, life.rows, {**about, "events": life.events})


if __name__ == "__main__":
    main()
