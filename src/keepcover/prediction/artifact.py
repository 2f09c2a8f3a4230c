"""A predictor on disk: one safetensors file, checksummed throughout; whatever does not match is refused.

The file holds the calibration points' scores and the holdout scores of PTT; its metadata hold a JSON manifest (format,
promises, rules, score, numerics, model fingerprint, checksums) and the manifest's own checksum. Nothing is executed on
loading, and every threshold is computed again from the scores and compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import secrets
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialize
from torch import Tensor

from keepcover.engine.inputs import InputRange
from keepcover.engine.progress import Report
from keepcover.engine.smoother import Classifier, Smoother
from keepcover.engine.smoother import fingerprint as fingerprint_of
from keepcover.errors import InputError, KeepcoverWarning
from keepcover.methods import METHODS, Setting
from keepcover.prediction.predictor import Calibrated, Level, Predictor
from keepcover.scores.draws import Draws
from keepcover.scores.scores import SCORES, CustomScore, Score, get_score
from keepcover.scores.transforms import PTT

FORMAT = 1
_KEYS = (
    "classes",
    "class_names",
    "sigma",
    "numerics",
    "score",
    "model_fingerprint",
    "holdout_size",
    "inputs",
    "provenance",
    "levels",
)
_AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def _digest(tensor: Tensor) -> str:
    tensor = tensor.contiguous()
    return hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode() + tensor.numpy().tobytes()).hexdigest()


def make_folder(path: Path) -> Path:
    """Create a folder for output, or say why not."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot create the folder {path} ({error.strerror}); choose another place") from None
    return path


def check_place(path: Path) -> None:
    """Say why a file cannot be written there, before any work is done for it."""
    if not path.parent.is_dir():
        raise InputError(f"no folder {path.parent} to write {path.name} into; create it first")
    if path.is_dir():
        raise InputError(f"{path} is a folder; give the name of a file")


def write_atomically(path: Path, content: bytes) -> None:
    """Write beside the target, then rename: a reader sees the old file or the new one, never half of one.

    The content is on the disk before it gets its name, so that holds after a power failure too. Temporary names are
    random: writers in several processes or on several machines do not meet.
    """
    check_place(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        temporary.write_bytes(content)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def save(predictor: Predictor, path: str | Path) -> None:
    """Write a predictor to one file."""
    tensors = {"calibration": predictor.calibration.cpu().contiguous()}
    if predictor.holdout is not None:
        tensors["holdout"] = predictor.holdout.cpu().contiguous()
    manifest = {
        "format": FORMAT,
        "classes": predictor.classes,
        "class_names": predictor.class_names,
        "sigma": predictor.smoother.sigma,
        "numerics": predictor.smoother.numerics,
        "score": predictor.score.config(),
        "model_fingerprint": predictor.model_fingerprint,
        "holdout_size": predictor.holdout_size,
        "inputs": None if predictor.inputs is None else asdict(predictor.inputs),
        "provenance": predictor.provenance,
        "levels": [
            {
                "method": calibrated.rule.name,
                "transform": calibrated.transform,
                "setting": asdict(calibrated.rule.setting),
                "parameters": calibrated.rule.parameters(),
                "threshold": repr(calibrated.threshold),
                "guarantee": predictor.guarantee_for(*level).to_dict(),
            }
            for level, calibrated in predictor.levels.items()
        ],
        "checksums": {name: _digest(tensor) for name, tensor in tensors.items()},
    }
    text = json.dumps(manifest, sort_keys=True)
    metadata = {"keepcover": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    write_atomically(Path(path), serialize(tensors, metadata))


def read(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The checked manifest and tensors of a saved predictor, without any model."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"no predictor at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError, OSError) as error:
        raise InputError(f"{path} is not a complete safetensors file ({error}); save the predictor again") from None
    if "keepcover" not in metadata or "sha256" not in metadata:
        raise InputError(f"{path} is a safetensors file but not a keepcover predictor; make one with Predictor.save")
    text = metadata["keepcover"]
    if hashlib.sha256(text.encode()).hexdigest() != metadata.get("sha256"):
        raise InputError(f"the manifest of {path} does not match its checksum: the file was altered; save it again")
    with _malformed(path):
        manifest = json.loads(text)
        version = manifest.get("format")
    if version != FORMAT:
        raise InputError(f"{path} has format {version}, this version reads {FORMAT}; calibrate again")
    found = {name: _digest(tensor) for name, tensor in tensors.items()}
    with _malformed(path):
        expected = dict(manifest["checksums"])
        absent = [name for name in _KEYS if name not in manifest]
    if absent:
        raise InputError(f"the manifest of {path} lacks {absent[0]!r}; save the predictor again")
    if found != expected:
        differ = sorted(set(found) ^ set(expected)) or sorted(name for name in found if found[name] != expected[name])
        raise InputError(
            f"{path}: tensor {differ[0]!r} does not match its checksum: the file was altered; save it again"
        )
    return manifest, tensors


@contextlib.contextmanager
def _malformed(path: str | Path) -> Iterator[None]:
    """A manifest whose checksum is right and whose content makes no sense was not written by this library."""
    try:
        yield
    except InputError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, AssertionError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        raise InputError(f"the manifest of {path} makes no sense ({reason}); save the predictor again") from None


def promises(path: str | Path, manifest: dict[str, Any], tensors: dict[str, Tensor]) -> dict[Level, Calibrated]:
    """The rules of a checked file, each threshold and guarantee derived again and compared with what it states."""
    levels: dict[Level, Calibrated] = {}
    with _malformed(path):
        for entry in manifest["levels"]:
            parameters = {
                key: tuple(value) if isinstance(value, list) else value for key, value in entry["parameters"].items()
            }
            rule = METHODS[entry["method"]](setting=Setting(**entry["setting"]), **parameters)
            scores = tensors["calibration"]
            if entry["transform"] == "ptt":
                scores = PTT(tensors["holdout"], b=1 - rule.setting.alpha)(scores)
            threshold = rule.threshold(rule.calibration_statistic(Draws(scores).first(rule.calibration_draws)))
            saved = float(entry["threshold"])
            if not (threshold == saved or math.isclose(threshold, saved, rel_tol=1e-12)):
                raise InputError(
                    f"{path}: the threshold {saved} does not follow from the calibration scores ({threshold})"
                )
            if rule.guarantee(manifest["score"]["name"], entry["transform"]).to_dict() != entry["guarantee"]:
                raise InputError(f"{path}: the guarantee it states is not the one its rule gives; calibrate again")
            levels[rule.setting.alpha, rule.setting.epsilon] = Calibrated(rule, entry["transform"], saved)
    return levels


def _score(config: dict[str, Any], given: str | Score | Callable[..., Tensor] | None) -> Score:
    if not config.get("custom"):
        score = SCORES[config["name"]](**{key: value for key, value in config.items() if key != "name"})
        given = score if given is None else get_score(given)
    elif given is None:
        raise InputError(
            f"this predictor uses the custom score {config['name']!r}; pass it: load(path, model, score=...)"
        )
    else:
        score = given = get_score(given) if isinstance(given, str | Score) else CustomScore(given, config["name"])
    if given.config() != config:
        raise InputError(f"this predictor was calibrated with score {config}, not {given.config()}")
    return score


def load(
    path: str | Path,
    model: Classifier,
    *,
    fingerprint: str | None = None,
    score: str | Score | Callable[..., Tensor] | None = None,
    batch_size: int | None = None,
    device: torch.device | str | None = None,
    progress: bool | Report = True,
) -> Predictor:
    """Read a predictor and put the model back under it; refuses another model, an altered or a foreign file.

    Args:
        path: what :meth:`Predictor.save` wrote.
        model: the very model it was calibrated with; its fingerprint is compared.
        fingerprint: the string given at calibration for a model that is not an ``nn.Module``.
        score: only for custom scores, which are code and therefore not in the file.
        batch_size, device, progress: see :class:`Smoother`; numerics are restored from the file.
    """
    manifest, tensors = read(path)
    levels = promises(path, manifest, tensors)
    with _malformed(path):
        numerics, names = manifest["numerics"], manifest["class_names"]
        autocast = None if numerics["autocast"] is None else _AUTOCAST[numerics["autocast"]]
        inputs = None if manifest["inputs"] is None else InputRange.from_dict(manifest["inputs"])
        smoother = Smoother(
            model,
            manifest["sigma"],
            batch_size=batch_size,
            device=device,
            autocast=autocast,
            channels_last=numerics["channels_last"],
            compile=numerics["compile"],
            progress=progress,
        )
        loaded = Predictor(
            smoother,
            _score(manifest["score"], score),
            levels,
            tensors["calibration"],
            tensors.get("holdout"),
            manifest["classes"],
            None if names is None else tuple(names),
            manifest["model_fingerprint"],
            manifest["holdout_size"],
            inputs,
            manifest["provenance"],
        )
    expected, found = loaded.model_fingerprint, fingerprint or fingerprint_of(model)
    if expected is None or found is None:
        warnings.warn(
            "the model cannot be compared with the one calibrated: it has no fingerprint. Give a callable one with "
            "fingerprint=... at calibration and loading",
            KeepcoverWarning,
            stacklevel=2,
        )
    elif expected != found:
        raise InputError(
            f"the model differs from the one calibrated: fingerprint {found[:12]}, expected {expected[:12]}; load the weights "
            "that were calibrated (or give the fingerprint= string of calibration), or calibrate again"
        )
    return loaded
