"""The MLflow flavour against MLflow itself: log, load, serve; and what cannot be served is not saved."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import keepcover
from keepcover import mlflow as flavor
from keepcover.errors import InputError, install
from tests.toys import nearest, toy

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own
ASKED: dict[str, Any] = {"epsilon": (0.05, 0.1), "sigma": 0.1, "draws": 4, "method": "exact", "seed": 0}
MODULE = "from tests.toys import nearest\n\n\ndef make():\n    return nearest()\n"


@pytest.fixture(scope="module")
def mlflow(tmp_path_factory: pytest.TempPathFactory) -> Any:
    found = pytest.importorskip("mlflow", reason="needs MLflow: make mlflow-test installs it")
    place = tmp_path_factory.mktemp("mlflow")
    found.set_tracking_uri(f"sqlite:///{place}/runs.sqlite")
    found.create_experiment("sets", artifact_location=str(place / "artifacts"))
    return found


def a_run(mlflow: Any) -> Any:
    return mlflow.start_run(experiment_id=mlflow.get_experiment_by_name("sets").experiment_id)


@pytest.fixture
def small(tmp_path: Path) -> tuple[keepcover.Predictor, dict[str, Any]]:
    """A built-in network with weights in a file, and its predictor for two levels."""
    torch.manual_seed(0)
    model = keepcover.models.network("small-cnn", 4).eval()  # type: ignore[attr-defined]
    save_file(model.state_dict(), tmp_path / "net.safetensors")
    images, labels = torch.rand(200, 1, 8, 8), torch.arange(200) % 4
    made = keepcover.calibrate(model, (images, labels), **ASKED)
    return made, {"model": "small-cnn", "weights": str(tmp_path / "net.safetensors")}


def test_log_load_and_predict(mlflow: Any, small: Any) -> None:
    made, reference = small
    with a_run(mlflow):
        info = flavor.log_model(made, "sets", registered_model_name="digits", **reference)
    back = flavor.load_model(info.model_uri)
    images = np.random.default_rng(0).random((30, 1, 8, 8), dtype=np.float32)
    assert back.digest == made.digest
    assert torch.equal(back.predict(images, seed=3).mask, made.predict(images, seed=3).mask)
    for uri in (info.model_uri, "models:/digits/1"):
        served = mlflow.pyfunc.load_model(uri)
        frame = served.predict(images)
        assert list(frame.columns) == ["labels", "size", "trivial"]
        assert len(frame) == 30
        assert frame.attrs["guarantee"] == str(made.guarantee)
    wide = served.predict(images, params={"epsilon": 0.1})
    assert wide.attrs["guarantee"] == str(made.at(epsilon=0.1).guarantee)
    assert served.metadata.metadata["predictor"] == made.digest
    assert info.signature.inputs.inputs[0].shape == (-1, 1, 8, 8)


def test_noise_is_fresh_and_no_parameter_sets_it(mlflow: Any, small: Any) -> None:
    made, reference = small
    with a_run(mlflow):
        info = flavor.log_model(made, "sets", **reference)
    served = mlflow.pyfunc.load_model(info.model_uri)
    images = np.random.default_rng(0).random((200, 1, 8, 8), dtype=np.float32)
    assert {spec.name for spec in info.signature.params} == {"alpha", "epsilon"}
    first, second = (served.predict(images, params={"seed": 1})["labels"].tolist() for _ in range(2))
    assert first != second
    with pytest.raises(Exception, match="calibrated for"):
        served.predict(images, params={"epsilon": 0.3})
    with pytest.raises(Exception, match=r"does not match expected shape"):
        served.predict(np.zeros((2, 1, 9, 9), np.float32))


def test_safetensors_and_text_are_all_that_is_written(mlflow: Any, small: Any, tmp_path: Path) -> None:
    made, reference = small
    flavor.save_model(made, tmp_path / "model", **reference)
    files = sorted(
        str(path.relative_to(tmp_path / "model")) for path in (tmp_path / "model").rglob("*") if path.is_file()
    )
    assert files == [
        "MLmodel",
        "data/net.safetensors",
        "data/predictor.safetensors",
        "python_env.yaml",
        "requirements.txt",
    ]
    needed = (tmp_path / "model" / "requirements.txt").read_text()
    assert "keepcover" not in needed  # the name is free on package indices, so no tool may look for it there
    assert "torch==" in needed


def test_weights_with_a_plus_in_their_name_are_one_file(mlflow: Any, small: Any, tmp_path: Path) -> None:
    predictor, how = small
    own = Path(how["weights"]).rename(tmp_path / "a+b.safetensors")
    flavor.save_model(predictor, tmp_path / "model", **{**how, "weights": str(own)})
    own.unlink()
    served = mlflow.pyfunc.load_model(str(tmp_path / "model"))
    assert len(served.predict(np.zeros((2, 1, 8, 8), np.float32))) == 2


@pytest.mark.parametrize("kind", ["pt2", "onnx", "function"])
def test_every_kind_of_model(mlflow: Any, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = nearest(), toy(4)[0]
    path, more = tmp_path / f"net.{kind}", {}
    if kind == "pt2":
        shapes = ({0: torch.export.Dim("batch", min=1, max=4096)},)
        torch.export.save(torch.export.export(model, (images,), dynamic_shapes=shapes), path)
    elif kind == "onnx":
        dynamic = ({0: torch.export.Dim("batch")},)
        torch.onnx.export(
            model, (images,), path, dynamo=True, dynamic_shapes=dynamic, external_data=False, verbose=False
        )
    else:
        (tmp_path / "own_net.py").write_text(MODULE)
        monkeypatch.syspath_prepend(str(tmp_path))
        more = {"code_paths": [str(tmp_path / "own_net.py")]}
    spec = "own_net:make" if kind == "function" else str(path)
    made = keepcover.calibrate(keepcover.specs.load_model(spec), toy(200, seed=1), **ASKED)  # type: ignore[attr-defined]
    made.save(tmp_path / "p.safetensors")
    flavor.save_model(tmp_path / "p.safetensors", tmp_path / "model", model=spec, **more)
    if kind != "function":
        path.unlink()  # what was copied is enough
    served = mlflow.pyfunc.load_model(str(tmp_path / "model"))
    assert served.predict(images.numpy())["size"].between(0, 4).all()
    assert (tmp_path / "model" / "code" / "own_net.py").is_file() == (kind == "function")


def test_tables_of_numbers(mlflow: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pandas = pytest.importorskip("pandas")
    torch.manual_seed(0)
    model, inputs = nn.Linear(3, 1), torch.randn(300, 3)
    torch.export.save(
        torch.export.export(model, (inputs[:4],), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},)),
        tmp_path / "net.pt2",
    )
    exported = keepcover.specs.load_model(str(tmp_path / "net.pt2"))  # type: ignore[attr-defined]
    made = keepcover.calibrate(exported, (inputs, model(inputs).detach()), task="regression", **ASKED)
    flavor.save_model(made, tmp_path / "model", model=str(tmp_path / "net.pt2"))
    frame = mlflow.pyfunc.load_model(str(tmp_path / "model")).predict(pandas.DataFrame(inputs[:5].double().numpy()))
    assert list(frame.columns) == ["intervals", "size", "trivial"]


def test_what_could_not_be_served_is_not_saved(mlflow: Any, small: Any, tmp_path: Path) -> None:
    made, reference = small
    torch.manual_seed(1)
    save_file(keepcover.models.network("small-cnn", 4).state_dict(), tmp_path / "other.safetensors")  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="the model differs from the one calibrated"):
        flavor.save_model(made, tmp_path / "model", model="small-cnn", weights=str(tmp_path / "other.safetensors"))
    assert list((tmp_path / "model").iterdir()) == []
    with pytest.raises(InputError, match="no predictor at"):
        flavor.save_model(tmp_path / "none.safetensors", tmp_path / "model", **reference)
    images, labels = torch.rand(200, 1, 8, 8), torch.arange(200) % 4
    per = keepcover.Promise(per=["a", "b"] * 100)
    grouped = keepcover.calibrate(made.running.model, (images, labels), promise=per, **ASKED)
    with pytest.raises(InputError, match="the promise is per group"):
        flavor.save_model(grouped, tmp_path / "model", **reference)
    (tmp_path / "model" / "something").write_text("of yours")
    with pytest.raises(InputError, match="new or empty folder"):
        flavor.save_model(made, tmp_path / "model", **reference)


def test_an_altered_model_is_not_loaded(mlflow: Any, small: Any, tmp_path: Path) -> None:
    made, reference = small
    flavor.save_model(made, tmp_path / "model", **reference)
    file = tmp_path / "model" / "data" / "predictor.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(InputError, match="does not match its checksum"):
        flavor.load_model(str(tmp_path / "model"))


def test_a_real_server(mlflow: Any, small: Any, tmp_path: Path) -> None:
    made, reference = small
    flavor.save_model(made, tmp_path / "model", **reference)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = Path(sys.executable).parent
    paths = os.pathsep.join([str(Path(keepcover.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": paths}
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "models",
        "serve",
        "-m",
        str(tmp_path / "model"),
        "--env-manager",
        "local",
    ]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--port", str(port)], stdout=log, stderr=log, env=environment, start_new_session=True
        )
    try:
        answer, deadline = None, time.monotonic() + 120
        body = json.dumps({"inputs": torch.rand(3, 1, 8, 8).tolist(), "params": {"epsilon": 0.1}}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/invocations", body, {"content-type": "application/json"}
        )
        while answer is None and time.monotonic() < deadline and process.poll() is None:
            try:
                answer = json.load(urllib.request.urlopen(request, timeout=30))
            except urllib.error.HTTPError as error:
                raise AssertionError(error.read().decode()) from None
            except OSError:
                time.sleep(0.5)
        assert answer is not None, (tmp_path / "log").read_text()
        assert [set(row) for row in answer["predictions"]] == [{"labels", "size", "trivial"}] * 3
    finally:
        os.killpg(process.pid, 15)  # the group that it began
        process.wait()


def test_without_mlflow_the_flavour_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    monkeypatch.setitem(sys.modules, "mlflow.pyfunc", None)
    with pytest.raises(InputError, match="needs mlflow") as found:
        flavor.load_model("models:/none/1")
    assert install("mlflow") in str(found.value)
