"""A predictor on disk: one safetensors file, checksummed throughout; whatever does not match is refused.

The file holds the calibration items' scores, or how much weight they have above the thresholds of the grid, the holdout scores of PTT, and what the model and the task give on a few fixed
inputs; its metadata hold a JSON manifest (format, task, noise, promises, rules, numerics, model, checksums) and the
manifest's own checksum. Nothing is executed on loading. A checksum is no signature, so everything that follows from
something else in the file is derived again and compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialize
from torch import Tensor

from keepcover.engine.fingerprint import Identity, identifier
from keepcover.engine.inputs import InputRange
from keepcover.engine.progress import Progress
from keepcover.engine.smoother import Classifier, Smoother, numeric_options
from keepcover.errors import InputError
from keepcover.files import write_file
from keepcover.methods import Asked, Rule, saved_method
from keepcover.noise import NOISES, get_noise
from keepcover.noise.stream import probes
from keepcover.prediction.predictor import Calibrated, Predictor
from keepcover.prediction.question import Level
from keepcover.prediction.report import Accuracy
from keepcover.promises import CLAUSES
from keepcover.scores import PTT, Draws, Items, Tally
from keepcover.tasks import TASKS, Task

FORMAT = 3  # 1 and 2 were holdfast's
_MOST = 2**24  # classes, points and draws: more would be asked of memory before they could be compared


def digest(tensor: Tensor) -> str:
    """SHA-256 of a tensor with its type and shape."""
    raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)  # numpy has no bfloat16
    return hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode() + raw.numpy().tobytes()).hexdigest()


# -- writing -----------------------------------------------------------------------------------------------------------


def save(predictor: Predictor, path: str | Path, fingerprint: str | None = None) -> None:
    """Write a predictor to one file."""
    identity, smoother = predictor.identity, predictor.smoother
    if smoother is not None:
        if identity is None:
            raise InputError("this predictor does not know its model; attach it with predictor.with_model(model)")
        if fingerprint and fingerprint != identity.fingerprint:
            identity = replace(identity, fingerprint=fingerprint, structure=None)
        identity = replace(identity, fingerprint=identifier(smoother.model, identity.fingerprint))
        predictor = replace(predictor, identity=identity)
    _refuse_code(predictor)
    known = {"probe_scores": predictor.task.probe(), "probe_outputs": None if identity is None else identity.outputs}
    known |= {**predictor.items.tensors(), "reference": predictor.reference}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in known.items() if tensor is not None}
    text = json.dumps(_manifest(predictor, tensors), sort_keys=True)
    write_file(path, serialize(tensors, {"keepcover": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}))


def _refuse_code(predictor: Predictor) -> None:
    """Parts that are exactly what a registry names can be written; others are code of the user's."""
    task, noise, smoother, identity = predictor.task, predictor.noise, predictor.smoother, predictor.identity
    parts: list[tuple[Any, Any]] = [(task, TASKS.get(task.name)), (noise, NOISES.get(noise.name))]
    if smoother is not None and identity is not None and not identity.runs_plainly(smoother):
        parts.append((smoother, Smoother))
    for rule in (one.rule for one in predictor.levels.values()):
        parts.append((rule.method, type(saved_method(rule.name, {}))))
        parts += [(clause, type(CLAUSES[clause.keyword].of(clause.stated()))) for clause in rule.asked.promise.clauses]
        parts += [(rule.method.transform, PTT)] if rule.method.transform is not None else []
        parts.append((rule, type(_rule(_stated(rule), rule.asked, predictor.reference))))
    for own, known in parts:
        if type(own) is not known:
            raise InputError(f"{type(own).__name__} is code of yours, which a file cannot hold; another would load")


def _manifest(predictor: Predictor, tensors: dict[str, Tensor]) -> dict[str, Any]:
    identity = predictor.identity
    probed = None if identity is None or identity.inputs is None else list(identity.inputs.shape[1:])
    model = identity and {"fingerprint": identity.fingerprint, "structure": identity.structure, "probe_shape": probed}
    return {
        "format": FORMAT,
        "task": predictor.task.config(),
        "noise": predictor.noise.config(),
        "numerics": predictor.numerics,
        "model": model,
        "points": predictor.items.points,
        "holdout_size": predictor.holdout_size,
        "inputs": predictor.inputs and asdict(predictor.inputs),
        "accuracy": predictor.accuracy and asdict(predictor.accuracy),
        "among": list(predictor.among),
        "history": list(predictor.history),
        "levels": [_entry(calibrated, predictor) for calibrated in predictor.levels.values()],
        "checksums": {name: digest(tensor) for name, tensor in tensors.items()},
    }


def _stated(rule: Rule) -> dict[str, Any]:
    return {"method": rule.name, "options": rule.method.options(), "parameters": rule.parameters()}


def _entry(calibrated: Calibrated, predictor: Predictor) -> dict[str, Any]:
    rule, guarantee = calibrated.rule, predictor.promised(calibrated).to_dict()
    threshold = [repr(value) for value in calibrated.threshold.flatten().tolist()]
    promised = {"asked": rule.asked.config(), "threshold": threshold, "guarantee": guarantee}
    return {**_stated(rule), **promised, "size": calibrated.size}


# -- reading -----------------------------------------------------------------------------------------------------------


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
    if "holdfast" in metadata:
        raise InputError(f"{path} was saved by holdfast 0.1.0, as keepcover was called before; calibrate again")
    if "keepcover" not in metadata or "sha256" not in metadata:
        raise InputError(f"{path} is a safetensors file but not a keepcover predictor; make one with Predictor.save")
    text = metadata["keepcover"]
    if hashlib.sha256(text.encode()).hexdigest() != metadata["sha256"]:
        raise InputError(f"the manifest of {path} does not match its checksum: the file was altered; save it again")
    with _malformed(path):
        manifest = json.loads(text)
        version, expected = manifest.get("format"), dict(manifest["checksums"])
    if version != FORMAT:
        raise InputError(f"{path} has format {version}, this version reads {FORMAT}; calibrate again")
    found = {name: digest(tensor) for name, tensor in tensors.items()}
    if found != expected:
        differ = sorted(set(found) ^ set(expected)) or sorted(name for name in found if found[name] != expected[name])
        raise InputError(f"{path}: tensor {differ[0]!r} does not match its checksum: it was altered; save it again")
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
        one, other = _brief(one), _brief(other)
        raise InputError(f"it states {field} {one}, the rest of it gives {other}; save the predictor again")


def _brief(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


_KINDS: dict[str, Callable[[Any], bool]] = {
    "int": lambda value: type(value) is int and 0 <= value <= _MOST,
    "float": lambda value: type(value) is float and not math.isnan(value),
    "float | None": lambda value: value is None or _KINDS["float"](value),
    "int | None": lambda value: value is None or _KINDS["int"](value),
    "tuple[float, ...]": lambda value: type(value) is tuple and all(map(_KINDS["float"], value)),
    "str": lambda value: type(value) is str,
    "bool": lambda value: type(value) is bool,
}


def _typed(value: Any) -> Any:
    """A dataclass made of JSON values, each field of the type it names: JSON takes 1.5 for a count, and true for 1."""
    for field in fields(value) if is_dataclass(value) else ():
        own = getattr(value, field.name)
        if is_dataclass(own) and not isinstance(own, type):
            _typed(own)
        elif str(field.type) in _KINDS and not _KINDS[str(field.type)](own):
            raise InputError(f"expected {field.type} for {field.name}, got {_brief(str(own))}")
    return value


def _rule(entry: dict[str, Any], asked: Asked, reference: Tensor | None) -> Rule:
    """The rule that an entry states."""
    method = saved_method(entry["method"], entry["options"])
    if method.transform is not None and reference is None:
        raise InputError(f"{method.name} transforms scores, and there are no holdout scores; save the predictor again")
    steps = None if method.transform is None or reference is None else method.transform.fit(reference, asked.alpha)
    listed = {key: tuple(value) if isinstance(value, list) else value for key, value in entry["parameters"].items()}
    return method.rule(asked, steps, **listed)


def restore(path: str | Path, score: Any = None) -> Predictor:
    """The promises of a saved predictor without its model, each number derived again and compared with what is stated."""
    manifest, tensors = read(path)
    with _malformed(path):
        held, config = tensors.get("reference"), manifest["task"]
        if held is not None and (held.diff() < 0).any():
            raise InputError("its holdout scores are not sorted; save the predictor again")
        task = _typed(TASKS[config["name"]].from_config(config, score))
        task.check_probe(tensors["probe_scores"])
        items, size = _items(task, manifest, tensors), manifest["holdout_size"]
        if held is not None:  # points whose truth no set can hold have no score there
            _agree("holdout_size", size, max(size, len(held)) if task.open_labels else len(held))
        model, inputs = manifest["model"], manifest["inputs"]
        _agree("numerics", bool(numeric_options(manifest["numerics"])), model is not None)
        if model is None and (inputs is not None or "probe_outputs" in tensors):
            raise InputError("it knows inputs of its model, and no model; save the predictor again")
        seen = None if inputs is None else InputRange.from_dict(inputs)
        if seen is not None and not -math.inf < seen.low <= seen.high < math.inf:
            raise InputError(f"expected inputs in a finite range, got {seen}; save the predictor again")
        identity = None
        if model is not None:
            shape = model["probe_shape"]
            _agree("probe_shape", shape, None if seen is None else shape if seen.shape is None else list(seen.shape))
            fixed = None if seen is None else probes(tuple(shape), seen.low, seen.high, seen.tokens)
            identity = Identity(model["fingerprint"], model["structure"], fixed, tensors.get("probe_outputs"))
        predictor = Predictor(
            task,
            {},
            items,
            get_noise(manifest["noise"]),
            reference=held,
            identity=identity,
            holdout_size=size,
            inputs=seen,
            numerics=manifest["numerics"],
            accuracy=None if manifest["accuracy"] is None else _typed(Accuracy(**manifest["accuracy"])),
            among=tuple(manifest["among"]),
            history=_history(manifest, items),
        )
        levels = dict(_level(entry, predictor) for entry in manifest["levels"])
        _agree("number of different levels", len(manifest["levels"]), len(levels))
        if not levels:
            raise InputError("it makes no promise; calibrate again")
        _agree("holdout scores", held is not None, any(c.rule.transform is not None for c in levels.values()))
        predictor = replace(predictor, levels=levels)
        _agree("", {**manifest, "levels": []}, {**_manifest(predictor, tensors), "levels": []})
    return predictor


def _items(task: Task, manifest: dict[str, Any], tensors: dict[str, Tensor]) -> Items | Tally:
    """What must not be missed: one item per point, or what rules ask of several."""
    points, values = manifest["points"], tensors["calibration"]
    if values.ndim not in (2, 3) or not values.is_floating_point() or values.isnan().any():
        raise InputError("expected calibration scores [items, draws] without NaN; save the predictor again")
    known = {name: tensors.get(name) for name in ("label", "group", "batch", "count")}
    for name, of in known.items():
        if of is not None and (of.shape != values.shape[:1] or of.dtype != torch.int64):
            raise InputError(f"expected the {name} of every calibration point; save the predictor again")
    known.pop("count")
    if not (_KINDS["int"](points) and _KINDS["int"](manifest["holdout_size"])):
        raise InputError("expected points and holdout_size as numbers; save the predictor again")
    _agree("several things per point", values.ndim == 3, not task.single)
    _agree("weights of several things", "weight" in tensors, not task.single)
    if task.single:
        items = Items(Draws(values), len(values), **known)
    else:
        items = Tally(values, tensors["weight"], tensors["count"], task.thresholds, known["group"], known["batch"])
        items.check()
    _agree("points", points, items.points)
    return items


def _history(manifest: dict[str, Any], items: Any) -> tuple[dict[str, Any], ...]:
    """What was done to the predictor; its newest entry names the batches that the calibration points come from."""
    history = manifest["history"]
    counts, of = [entry["points"] for entry in history], history[-1]["of"]
    if not all(map(_KINDS["int"], [*counts, *(entry["unknown"] for entry in history), *of])):
        raise InputError("expected numbers of points in its history; save the predictor again")
    _agree("history", of, [*sorted(set(of) - {len(history) - 1}), len(history) - 1])
    _agree("batches", len(of) > 1, items.batch is not None)
    names, place = items.numbered(of[0]).batch.unique(return_inverse=True)
    found = dict(zip(names.tolist(), place.bincount(items.count).tolist(), strict=True))
    _agree("points of batches in its history", {at: float(counts[at]) for at in of}, found)
    return tuple(history)


def _level(entry: dict[str, Any], predictor: Predictor) -> tuple[Level, Calibrated]:
    asked = _typed(Asked.from_config(entry["asked"]))
    rule = _typed(_rule(entry, asked, predictor.reference))
    _agree("noise", asked.threat.noise.config(), predictor.noise.config())
    _agree("candidates", asked.candidates, predictor.task.candidates)
    _agree("n", asked.n, predictor.items.points)
    if asked.threat.shape is not None and predictor.inputs is not None:
        _agree("shape", list(asked.threat.shape), list(predictor.inputs.shape or ()))
    rule.verify(predictor.task)
    groups = asked.promise.groups
    for name, most in (("label", asked.candidates), ("group", len(groups.per) if groups else 0)):
        known = getattr(predictor.items, name)
        _agree(name, known is not None, name in asked.promise.reads)
        if known is not None and not bool(((known >= 0) & (known < most)).all()):
            raise InputError(f"a calibration point has a {name} that there is none of; save the predictor again")
    again, size = rule.threshold(rule.read(predictor.items)), entry["size"]
    _agree("number of thresholds", len(entry["threshold"]), again.numel())
    saved = torch.tensor([float(value) for value in entry["threshold"]], dtype=torch.float64).view(again.shape)
    if not _KINDS["float | None"](size):
        raise InputError(f"expected a mean size, got {_brief(str(size))}")
    _agree("", entry, _entry(Calibrated(rule, saved, size), predictor))
    if not bool(((again == saved) | torch.isclose(again, saved, rtol=1e-12, atol=0)).all()):
        found = again.tolist()
        raise InputError(f"the threshold {saved.tolist()} does not follow from the calibration scores ({found})")
    # Another machine may round otherwise: the larger of the two keeps more labels.
    return (asked.alpha, asked.threat.epsilon), Calibrated(rule, torch.maximum(again, saved), size)


def load(
    path: str | Path,
    model: Classifier | None = None,
    *,
    fingerprint: str | None = None,
    score: Any = None,
    batch_size: int | None = None,
    device: torch.device | str | None = None,
    progress: Progress = True,
) -> Predictor:
    """Read a predictor and put the model back under it; refuses another model, an altered or a foreign file.

    Args:
        path: what :meth:`Predictor.save` wrote.
        model: the very model it was calibrated with; weights, structure and the outputs of a few fixed inputs are compared.
            None for one that was calibrated on noisy outputs, or to look at its promises.
        fingerprint: the string given at calibration for a model that is not an ``nn.Module``.
        score: only for custom scores, which are code and therefore not in the file.
        batch_size, device, progress: see :class:`Smoother`; numerics are restored from the file.
    """
    predictor = restore(path, score)
    if model is None:
        return predictor
    with _malformed(path):
        options: dict[str, Any] = {"batch_size": batch_size, "device": device, "progress": progress}
        smoother = Smoother(model, predictor.noise, **options, **numeric_options(predictor.numerics))
        return predictor.with_model(smoother, fingerprint)
