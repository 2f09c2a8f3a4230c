"""A predictor on disk: one safetensors file, checksummed throughout; whatever does not match is refused.

The file holds the calibration points' scores, the holdout scores of PTT, and what the model and the score give on a few
fixed inputs; its metadata hold a JSON manifest (format, promises, rules, score, numerics, model, checksums) and the
manifest's own checksum. Nothing is executed on loading. A checksum is no signature, so everything that follows from
something else in the file is derived again and compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialize
from torch import Tensor

from keepcover.engine.fingerprint import Identity, identifier, probes
from keepcover.engine.inputs import InputRange
from keepcover.engine.progress import Report
from keepcover.engine.smoother import Classifier, Smoother
from keepcover.errors import InputError
from keepcover.files import write_file
from keepcover.methods import METHODS, Method, Setting
from keepcover.prediction.predictor import Calibrated, Level, Predictor
from keepcover.scores.draws import Draws
from keepcover.scores.scores import SCORES, CustomScore, Score, get_score
from keepcover.scores.transforms import PTT

FORMAT = 2
_KEYS = (
    "classes",
    "class_names",
    "sigma",
    "numerics",
    "score",
    "model_fingerprint",
    "model_structure",
    "probe_shape",
    "holdout_size",
    "inputs",
    "provenance",
    "levels",
)
_AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_MOST = 2**24  # classes, points and draws: more would be asked of memory before they could be compared


def _digest(tensor: Tensor) -> str:
    tensor = tensor.contiguous()
    return hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode() + tensor.numpy().tobytes()).hexdigest()


def save(predictor: Predictor, path: str | Path, fingerprint: str | None = None) -> None:
    """Write a predictor to one file."""
    identity, smoother = predictor.identity, predictor.smoother
    if identity is None or predictor.inputs is None:
        raise InputError(
            "this predictor does not know what model and inputs it was calibrated with; save a calibrated one"
        )
    if fingerprint and fingerprint != identity.fingerprint:
        identity = replace(identity, fingerprint=fingerprint, structure=None)
    identity = replace(identity, fingerprint=identifier(smoother.model, identity.fingerprint))
    foreign = [type(c.rule) for c in predictor.levels.values() if METHODS.get(c.rule.name) is not type(c.rule)]
    foreign += [] if identity.runs_plainly(smoother) else [type(smoother)]
    if foreign:
        raise InputError(
            f"{foreign[0].__name__} is code of yours, which no file can hold; it would be loaded as another"
        )
    tensors = {"calibration": predictor.calibration, "probe_scores": _probe_scores(predictor.score, predictor.classes)}
    if predictor.holdout is not None:
        tensors["holdout"] = predictor.holdout
    if identity.logits is not None:
        tensors["probe_logits"] = identity.logits
    tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(_manifest(predictor, identity, tensors), sort_keys=True)
    metadata = {"keepcover": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    write_file(path, serialize(tensors, metadata))


def _manifest(predictor: Predictor, identity: Identity, tensors: dict[str, Tensor]) -> dict[str, Any]:
    assert predictor.inputs is not None
    return {
        "format": FORMAT,
        "classes": predictor.classes,
        "class_names": predictor.class_names,
        "sigma": predictor.smoother.sigma,
        "numerics": predictor.smoother.numerics,
        "score": predictor.score.config(),
        "model_fingerprint": identity.fingerprint,
        "model_structure": identity.structure,
        "probe_shape": identity.shape,
        "holdout_size": predictor.holdout_size,
        "inputs": asdict(predictor.inputs),
        "provenance": predictor.provenance,
        "levels": [_entry(calibrated, predictor.score.name) for calibrated in predictor.levels.values()],
        "checksums": {name: _digest(tensor) for name, tensor in tensors.items()},
    }


def _entry(calibrated: Calibrated, score: str) -> dict[str, Any]:
    rule = calibrated.rule
    return {
        "method": rule.name,
        "transform": calibrated.transform,
        "setting": asdict(rule.setting),
        "parameters": rule.parameters(),
        "threshold": repr(calibrated.threshold),
        "guarantee": rule.guarantee(score, calibrated.transform).to_dict(),
    }


def _probe_scores(score: Score, classes: int) -> Tensor:
    """What a score gives on fixed logits: it tells other settings, and other code under the same name."""
    logits, u = probes((classes,), -4.0, 4.0), torch.tensor([0.2, 0.4, 0.6, 0.8])
    return torch.stack([score(logits, u), score.order(logits, u)])


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
    except InputError as error:
        raise error if str(path) in str(error) else InputError(f"{path}: {error}") from None
    except (LookupError, TypeError, ValueError, AttributeError, AssertionError, RuntimeError, ArithmeticError) as error:
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        raise InputError(f"the manifest of {path} makes no sense ({reason}); save the predictor again") from None


def _agree(field: str, stated: Any, found: Any) -> None:
    """The one way in which a file is inconsistent: it states something that does not follow from the rest of it."""
    one, other = (json.dumps(value, sort_keys=True) for value in (stated, found))  # in which 1, 1.0 and true differ
    if one != other:
        if isinstance(stated, dict) and isinstance(found, dict):
            for key in sorted({*stated, *found}):
                _agree(f"{field}.{key}" if field else key, stated.get(key), found.get(key))
        raise InputError(
            f"it states {field} {_brief(one)}, the rest of it gives {_brief(other)}; save the predictor again"
        )


def _brief(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


_KINDS: dict[str, Callable[[Any], bool]] = {
    "int": lambda value: type(value) is int and 0 <= value <= _MOST,
    "float": lambda value: type(value) is float and not math.isnan(value),
    "int | None": lambda value: value is None or _KINDS["int"](value),
    "tuple[float, ...]": lambda value: type(value) is tuple and all(map(_KINDS["float"], value)),
    "str": lambda value: type(value) is str,
    "bool": lambda value: type(value) is bool,
}


def _made(cls: Any, values: dict[str, Any], **more: Any) -> Any:
    """A dataclass of JSON values, each of the type its field names: JSON takes 1.5 for a count, and true for 1."""
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    for field in fields(cls):
        if field.name not in more and not _KINDS[str(field.type)](values[field.name]):
            raise InputError(f"expected {field.type} for {field.name}, got {_brief(str(values[field.name]))}")
    return cls(**more, **values)


def promises(path: str | Path, manifest: dict[str, Any], tensors: dict[str, Tensor]) -> dict[Level, Calibrated]:
    """The rules of a checked file, each threshold and guarantee derived again and compared with what it states."""
    levels: dict[Level, Calibrated] = {}
    with _malformed(path):
        points, classes, names = tensors["calibration"], manifest["classes"], manifest["class_names"]
        if points.ndim != 2 or not points.is_floating_point() or points.isnan().any():
            raise InputError("expected calibration scores [n, draws] without NaN; save the predictor again")
        if names is not None and not all(isinstance(name, str) for name in names):
            raise InputError("expected class names as strings; save the predictor again")
        for name in ("probe_scores", "probe_logits"):
            if name in tensors:
                _agree("classes", classes, tensors[name].shape[-1])
        _agree("number of class_names", classes if names is None else len(names), classes)
        held = tensors.get("holdout")
        if held is not None:
            _agree("holdout_size", manifest["holdout_size"], len(held))
            if (held.diff() < 0).any():
                raise InputError("its holdout scores are not sorted; save the predictor again")
        _agree("holdout scores", held is not None, any(entry["transform"] == "ptt" for entry in manifest["levels"]))
        for entry in manifest["levels"]:
            calibrated = _level(entry, manifest, points, held)
            setting = calibrated.rule.setting
            levels[setting.alpha, setting.epsilon] = calibrated
        _agree("number of different levels", len(manifest["levels"]), len(levels))
        if not levels:
            raise InputError("it makes no promise; calibrate again")
    return levels


def _level(entry: dict[str, Any], manifest: dict[str, Any], points: Tensor, held: Tensor | None) -> Calibrated:
    setting: Setting = _made(Setting, entry["setting"])
    rule: Method = _made(METHODS[entry["method"]], entry["parameters"], setting=setting)
    _agree("setting.sigma", setting.sigma, manifest["sigma"])
    _agree("setting.classes", setting.classes, manifest["classes"])
    _agree("setting.n", setting.n, len(points))
    rule.verify()
    saved = float(entry["threshold"])
    calibrated = Calibrated(rule, entry["transform"], saved)
    _agree("", entry, _entry(calibrated, manifest["score"]["name"]))
    scores = points
    if entry["transform"] == "ptt":
        assert held is not None
        scores = PTT(held, b=1 - setting.alpha)(points)
    threshold = rule.threshold(rule.calibration_statistic(Draws(scores).first(rule.calibration_draws)))
    if not (threshold == saved or math.isclose(threshold, saved, rel_tol=1e-12)):
        raise InputError(f"the threshold {saved} does not follow from the calibration scores ({threshold})")
    # Another machine may round otherwise: the larger of the two keeps more labels.
    return replace(calibrated, threshold=max(threshold, saved))


def _score(
    config: dict[str, Any], probed: Tensor, classes: int, given: str | Score | Callable[..., Tensor] | None
) -> Score:
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
    found = _probe_scores(score, classes)
    if found.shape != probed.shape or not torch.allclose(found.double(), probed.double(), rtol=1e-4, atol=1e-6):
        raise InputError(
            f"the score {score.name!r} gives other values than it did at calibration; pass the one that was calibrated with"
        )
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
        model: the very model it was calibrated with; weights, structure and the logits of a few fixed inputs are compared.
        fingerprint: the string given at calibration for a model that is not an ``nn.Module``.
        score: only for custom scores, which are code and therefore not in the file.
        batch_size, device, progress: see :class:`Smoother`; numerics are restored from the file.
    """
    manifest, tensors = read(path)
    levels = promises(path, manifest, tensors)
    with _malformed(path):
        numerics, names, classes = manifest["numerics"], manifest["class_names"], manifest["classes"]
        flags = numerics["channels_last"], numerics["compile"]
        if not (_KINDS["int"](manifest["holdout_size"]) and all(map(_KINDS["bool"], flags))):
            raise InputError("expected holdout_size as a number, channels_last and compile as true or false")
        autocast = None if numerics["autocast"] is None else _AUTOCAST[numerics["autocast"]]
        inputs = InputRange.from_dict(manifest["inputs"])
        if not -math.inf < inputs.low <= inputs.high < math.inf:
            raise InputError(f"expected inputs in a finite range, got {inputs}; save the predictor again")
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
        identity = Identity(
            manifest["model_fingerprint"],
            manifest["model_structure"],
            tuple(manifest["probe_shape"]),
            inputs.low,
            inputs.high,
            tensors.get("probe_logits"),
        )
        _agree("probe_shape", identity.shape, inputs.shape or identity.shape)
        loaded = Predictor(
            smoother,
            _score(manifest["score"], tensors["probe_scores"], classes, score),
            levels,
            tensors["calibration"],
            tensors.get("holdout"),
            classes,
            None if names is None else tuple(names),
            identity,
            manifest["holdout_size"],
            inputs,
            manifest["provenance"],
        )
        _agree("", {**manifest, "levels": []}, {**_manifest(loaded, identity, tensors), "levels": []})
        identity.refuse_other(smoother, fingerprint)
    return loaded
