"""The MLflow flavour: log, load and serve a predictor. Nothing is pickled.

An MLflow model holds the predictor's file and a reference to its model as the command line takes it: files that are named are
copied beside it, a built-in model or a function of a package stays a name. Loading compares the model with the one that was
calibrated, as ever.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import keepcover
from keepcover.errors import InputError, install
from keepcover.prediction import Predictor
from keepcover.prediction.artifact import restore
from keepcover.specs import load_predictor, with_files, with_weights_files

if TYPE_CHECKING:
    from mlflow.models.model import ModelInfo  # pyright: ignore[reportMissingImports]

FLAVOR = "keepcover"
FILE = "predictor.safetensors"
NEEDED = ("torch", "numpy", "scipy", "safetensors", "jaxtyping")


def _mlflow() -> Any:
    try:
        import mlflow.pyfunc  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise InputError(f"the MLflow flavour needs mlflow: {install('mlflow')}") from None
    return mlflow


# -- writing -----------------------------------------------------------------------------------------------------------


def save_model(
    predictor: Predictor | str | Path,
    path: str | Path,
    *,
    model: str,
    weights: str | None = None,
    model_output: str = "logits",
    fingerprint: str | None = None,
    code_paths: Sequence[str] | None = None,
    pip_requirements: Sequence[str] | None = None,
    mlflow_model: Any = None,
) -> None:
    """Write an MLflow model to a new folder, and load it once: what could not be served is not saved.

    Args:
        predictor: a predictor, or its file.
        path: the folder.
        model, weights, model_output, fingerprint: its model as ``keepcover predict`` takes it: a built-in name with weights,
            an ``.onnx`` or ``.pt2`` file, a Hugging Face folder, or ``package.module:function``.
        code_paths: Python files or packages of your own that the model needs, copied by MLflow.
        pip_requirements: what MLflow installs where it builds an environment. keepcover is on no package index: name a wheel
            of yours, or serve in an environment that has it (``--env-manager local``).
        mlflow_model: MLflow's own description, to be completed.
    """
    mlflow, path = _mlflow(), Path(path)
    described = mlflow_model or mlflow.models.Model()
    data = path / "data"
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InputError(f"expected a new or empty folder for the model, {path} is not; name another")
    data.mkdir(parents=True, exist_ok=True)
    try:
        if isinstance(predictor, Predictor):
            predictor.save(data / FILE, fingerprint=fingerprint)
        else:
            restore(predictor)  # says what is wrong with it
            shutil.copyfile(predictor, data / FILE)
        kept = partial(_kept, data=data)
        reference = {"model": with_files(model, kept), "model_output": model_output, "fingerprint": fingerprint}
        reference["weights"] = weights and with_weights_files(weights, kept)
        made = _load(data, reference)
        if made.rule.asked.promise.groups is not None:
            raise InputError("the promise is per group, and no query of MLflow can say its group; use keepcover serve")
    except BaseException:
        shutil.rmtree(data)
        raise
    code = mlflow.utils.model_utils._validate_and_copy_code_paths(code_paths, path)
    described.add_flavor(FLAVOR, data="data", keepcover_version=keepcover.__version__, code=code, **reference)
    described.signature = _signature(mlflow, made)
    described.metadata = {**(described.metadata or {}), "guarantee": str(made.guarantee), "predictor": made.digest}
    needed = [f"{name}=={version(name).partition('+')[0]}" for name in (*NEEDED, "mlflow-skinny")]
    wanted = list(pip_requirements) if pip_requirements is not None else needed
    mlflow.utils.environment._PythonEnv.current().to_yaml(str(path / "python_env.yaml"))
    (path / "requirements.txt").write_text("\n".join(wanted) + "\n")
    mlflow.pyfunc.add_to_model(described, loader_module=__name__, data="data", code=code, python_env="python_env.yaml")
    described.save(str(path / "MLmodel"))


def log_model(predictor: Predictor | str | Path, name: str, **options: Any) -> ModelInfo:
    """Log a predictor to the active run of MLflow; ``options`` are those of :func:`save_model`, and ``registered_model_name``."""
    log = _mlflow().models.Model.log
    return log(artifact_path=None, flavor=sys.modules[__name__], name=name, predictor=predictor, **options)


def _kept(name: str, data: Path) -> str:
    """A file or folder copied to where the predictor lies, under a name that is free; other names as they are."""
    source = Path(name)
    if not source.exists():
        return name
    place, number = data / source.name, 1
    while place.exists():
        place, number = data / f"{number}-{source.name}", number + 1
    (shutil.copytree if source.is_dir() else shutil.copyfile)(source, place)
    return place.name


def _signature(mlflow: Any, predictor: Predictor) -> Any:
    """Inputs of the shape that was calibrated; alpha and epsilon are parameters. No parameter is a seed."""
    from mlflow.types import DataType, ParamSchema, ParamSpec, Schema, TensorSpec  # pyright: ignore[reportMissingImports]

    alpha, epsilon = next(iter(predictor.levels))
    params = ParamSchema([ParamSpec("alpha", DataType.double, alpha), ParamSpec("epsilon", DataType.double, epsilon)])
    seen, inputs = predictor.inputs, None
    if seen is not None and seen.shape is not None:
        kind = np.int64 if seen.tokens else np.float64 if len(seen.shape) == 1 else np.float32  # tables are float64
        inputs = Schema([TensorSpec(np.dtype(kind), (-1, *seen.shape))])
    return mlflow.models.ModelSignature(inputs=inputs, params=params)


# -- reading -----------------------------------------------------------------------------------------------------------


def load_model(model_uri: str, *, device: str | None = None) -> Predictor:
    """The predictor of a logged model, with its model under it: all of :class:`keepcover.Predictor`."""
    mlflow = _mlflow()
    path = Path(mlflow.artifacts.download_artifacts(model_uri))
    flavor = mlflow.utils.model_utils._get_flavor_configuration(str(path), FLAVOR)
    mlflow.utils.model_utils._add_code_from_conf_to_system_path(str(path), flavor)
    return _load(path / flavor["data"], flavor, device)


def _load(data: Path, reference: dict[str, Any], device: str | None = None) -> Predictor:
    def found(name: str) -> str:
        return str(data / name) if (data / name).exists() else name

    weights = reference["weights"] and with_weights_files(reference["weights"], found)
    how = (reference["model_output"], None, reference["fingerprint"])
    return load_predictor(data / FILE, with_files(reference["model"], found), weights, device, *how)


class Served:
    """What MLflow serves: arrays in, a data frame out, one row per set. Noise is fresh in every call."""

    def __init__(self, predictor: Predictor) -> None:
        self.predictor = predictor
        if predictor.smoother is not None:
            predictor.smoother.progress = False

    def predict(self, model_input: Any, params: dict[str, Any] | None = None) -> Any:
        """Sets of inputs ``[n, ...]``, with the alpha and epsilon of ``params`` where they name one of the levels."""
        asked = {name: value for name, value in (params or {}).items() if name in ("alpha", "epsilon")}
        return self.predictor.predict(torch.as_tensor(np.array(model_input)), **asked).to_pandas()


def _load_pyfunc(path: str) -> Served:
    """MLflow's entry: ``path`` is the folder of the data."""
    flavor = _mlflow().utils.model_utils._get_flavor_configuration(str(Path(path).parent), FLAVOR)
    return Served(_load(Path(path), flavor))
