"""``torch.export`` programs (``.pt2``) as classifiers."""

from __future__ import annotations

import hashlib
import io
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from keepcover.adapters.batching import in_batches
from keepcover.adapters.program import checked_copy
from keepcover.errors import InputError


class ExportedClassifier(nn.Module):
    """A program saved by ``torch.export.save`` as a classifier: ``images [n, ...] -> logits [n, K]``, with gradients.

    The file is checked and copied before torch opens it, so that nothing in it is unpickled, compiled or evaluated
    (:mod:`keepcover.adapters.program`). A program exported with a fixed batch size gets padded batches of that size; export
    with ``dynamic_shapes={"images": {0: torch.export.Dim("batch", min=1, max=4096)}}`` to avoid the padding.

    Args:
        path: the ``.pt2`` file of a model in eval mode with one tensor in and one out.
        device: where it runs; the CPU by default.

    Attributes:
        fingerprint: SHA-256 of the file.
        classes: outputs of the program.
    """

    def __init__(self, path: str | Path, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.path = Path(path)
        if not self.path.is_file():
            raise InputError(f"no program at {self.path}")
        content = self.path.read_bytes()
        self.fingerprint = hashlib.sha256(content).hexdigest()
        program = _load(checked_copy(content, self.path.name), self.path.name)
        if device is not None:
            from torch.export.passes import move_to_device_pass

            program = move_to_device_pass(program, str(device))
        self._fixed, self._least, self._most = _input(program, self.path.name)
        self.classes = _classes(program, self.path.name)
        _refuse_train_mode(program, self.path.name)
        self.program = program.module()

    def forward(self, images: Tensor) -> Tensor:
        shape = tuple(images.shape[1:])
        if len(shape) != len(self._fixed) or any(w not in (None, g) for w, g in zip(self._fixed, shape, strict=True)):
            raise InputError(
                f"{self.path.name} takes images [n, {', '.join('any' if e is None else str(e) for e in self._fixed)}], "
                f"got [n, {', '.join(map(str, shape))}]"
            )
        return in_batches(self.program, images, self._least, self._most)

    def train(self, mode: bool = True) -> ExportedClassifier:
        """A program has one mode, the one it was exported in; it refuses to be asked for another."""
        self.training = mode
        return self


def _load(content: bytes, name: str) -> Any:
    log = logging.getLogger("torch.export")
    level = log.level
    log.setLevel(logging.ERROR)  # torch logs a traceback before it raises
    try:
        return torch.export.load(io.BytesIO(content))
    except Exception as error:  # whatever torch raises on a damaged program, often an AssertionError
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"{name} is not a program that torch {torch.__version__} can load ({reason}); export it again with this version"
        ) from None
    finally:
        log.setLevel(level)


def _input(program: Any, name: str) -> tuple[list[int | None], int, int | None]:
    """Sizes of one image (None where free), and the least and most images per batch."""
    inputs = program.graph_signature.user_inputs
    found = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder" and node.name in inputs]
    if len(inputs) != 1 or not isinstance(found[0], Tensor) or found[0].dtype != torch.float32 or found[0].ndim < 2:
        kinds = ", ".join(f"{getattr(v, 'dtype', type(v).__name__)} {list(getattr(v, 'shape', []))}" for v in found)
        raise InputError(
            f"{name}: expected one float32 input [n, ...], the images; the program takes {kinds or 'nothing'}"
        )
    sizes = [size if isinstance(size, int) else None for size in found[0].shape]
    if sizes[0] is not None:
        return sizes[1:], sizes[0], sizes[0]
    symbol: Any = found[0].shape[0]
    limits = program.range_constraints.get(symbol.node.expr)
    least = 1 if limits is None or limits.lower < 1 else int(limits.lower)
    # torch's infinity is not a number that int() takes; nobody sends batches beyond 2^31.
    most = None if limits is None or limits.upper > 2**31 else int(limits.upper)
    return sizes[1:], least, most


def _classes(program: Any, name: str) -> int:
    outputs = program.graph_signature.user_outputs
    (returned,) = program.graph.output_node().args[0][-len(outputs) :] if len(outputs) == 1 else (None,)
    value = getattr(returned, "meta", {}).get("val")
    if not isinstance(value, Tensor) or value.ndim != 2 or not isinstance(value.shape[1], int):
        raise InputError(f"{name}: expected one output, logits [n, classes]; export a model that returns only those")
    return value.shape[1]


def _refuse_train_mode(program: Any, name: str) -> None:
    """Dropout or batch statistics would make every call another function."""
    if any("MUTATION" in spec.kind.name for spec in program.graph_signature.output_specs):
        what = "it updates its buffers"
    else:
        what = next((str(node.target) for node in program.graph.nodes if _varies(node)), None)
    if what:
        raise InputError(
            f"{name} was exported in train mode ({what}): every call would be another function; call model.eval() first"
        )


def _varies(node: Any) -> bool:
    """Whether an operator draws random numbers, or mixes the images of a batch as batch norm does in training."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    schema = node.target._schema
    given = {argument.name: value for argument, value in zip(schema.arguments, node.args, strict=False)} | node.kwargs
    if "batch_norm" in schema.name:
        return given.get("training") is True
    if torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    if "scaled_dot_product" in schema.name:
        return given.get("dropout_p", 0.0) != 0
    return given.get("train", given.get("training")) is not False
