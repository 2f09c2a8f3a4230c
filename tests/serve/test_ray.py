"""The same application on a local Ray cluster with two replicas. ``make ray-test``."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from .serving import ROOT, make_predictor

pytestmark = pytest.mark.ray

# In a process of its own: Ray's processes, warnings and signal handlers stay there.
SCRIPT = """
import json, os, sys, threading
from pathlib import Path
import httpx, ray, torch
from ray import serve
from keepcover.serve import Deployment, Settings
from keepcover.serve.replicas import ray_application
from tests.serve import serving

predictor, port = Path(sys.argv[1]), int(sys.argv[2])
ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False, address="local",
         runtime_env={"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"], "OMP_NUM_THREADS": "1"}})
serve.start(http_options={"host": "127.0.0.1", "port": port})
settings = Settings(max_images=3, token="0123456789abcdef-token")
deployment = Deployment(predictor, "tests.serve.serving:sharp", settings=settings, threads=1)
serve.run(ray_application(deployment, replicas=2, cpus=0.5), name="keepcover", route_prefix="/")

url, headers = f"http://127.0.0.1:{port}", {"authorization": "Bearer 0123456789abcdef-token"}
found = {"wrong": 0, "statuses": [], "fingerprint": None}
with httpx.Client(base_url=url, timeout=60) as client:
    found["open"] = client.get("/healthz").status_code
    found["closed"] = client.get("/v1/predictor").status_code
    found["description"] = client.get("/v1/predictor", headers=headers).json()
    found["bad"] = client.post("/v1/predict", headers=headers, json={"images": [], "seed": 1}).status_code

def many(start):
    with httpx.Client(base_url=url, timeout=60, headers=headers) as client:
        for k in range(start, start + 50):
            label = k % 4
            response = client.post("/v1/predict", json={"images": serving.bright(torch.tensor([label])).tolist()})
            found["statuses"].append(response.status_code)
            found["wrong"] += response.json()["sets"][0]["indices"] != [label]

threads = [threading.Thread(target=many, args=(k,)) for k in range(6)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
with httpx.Client(base_url=url, timeout=60, headers=headers) as client:
    accepted = set()
    for _ in range(60):
        text = client.get("/metrics").text
        accepted.add(next(line for line in text.splitlines() if line.startswith("keepcover_accepted_total ")))
    found["replicas"] = sorted(int(float(line.split()[1])) for line in accepted)
print("RESULT", json.dumps(found))
serve.shutdown()
ray.shutdown()
"""


def test_two_replicas_answer_alike_and_share_the_work(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs pip install 'ray[serve]'")
    path = tmp_path / "predictor.safetensors"
    make_predictor().save(path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}",
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path), str(port)],
        capture_output=True,
        text=True,
        timeout=400,
        env=environment,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-3000:]
    found = json.loads(lines[0].removeprefix("RESULT "))
    assert (found["open"], found["closed"], found["bad"]) == (200, 401, 422)
    assert found["description"]["limits"]["max_images"] == 3
    assert found["statuses"] == [200] * 300
    assert found["wrong"] == 0
    assert len(found["replicas"]) == 2  # both have counters of their own,
    assert sum(found["replicas"]) == 300  # and between them they answered everything
    assert min(found["replicas"]) > 0
