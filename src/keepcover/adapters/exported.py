"""``torch.export`` programs (``.pt2``) as classifiers."""

from __future__ import annotations

import hashlib
import io
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.passes import move_to_device_pass

from keepcover.adapters.batching import check_sizes, in_batches
from keepcover.adapters.program import checked_copy
from keepcover.adapters.rehearsal import MOST, arguments, check_calls, rehearse, written
from keepcover.errors import InputError, reason, refusing


class ExportedClassifier(nn.Module):
    """A program saved by ``torch.export.save`` as a classifier: ``images [n, ...] -> logits [n, K]``, with gradients.

    The file is checked and copied before torch opens it, so that nothing in it is unpickled, compiled or evaluated
    (:mod:`keepcover.adapters.program`). It may call the operators of usual classifiers (:mod:`keepcover.adapters.operators`), and
    is rehearsed on tensors without data before it runs. A program exported with a fixed batch size gets padded batches of that size; export
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
        name = self.path.name
        program = _load(checked_copy(content, name), name, device)
        shape, self._sizes, self._least, self._most = _input(program, name)
        check_calls(program.graph, name)
        _refuse_train_mode(program, name)
        self.program = program.module()
        returned = rehearse(self.program, shape, name)
        if not isinstance(returned, Tensor) or returned.ndim != 2 or len(returned) != shape[0]:
            raise InputError(
                f"{name}: expected one output, logits [n, classes]; export a model that returns only those"
            )
        self.classes = int(returned.shape[1])

    def forward(self, images: Tensor) -> Tensor:
        check_sizes(self.path.name, images, self._sizes)
        return in_batches(self._run, images, self._least, self._most)

    def _run(self, images: Tensor) -> Tensor:
        try:
            return self.program(images)
        except torch.OutOfMemoryError:
            raise  # a smaller batch is tried
        except Exception as error:  # operators refuse what does not fit with exceptions of every kind
            raise InputError(f"{self.path.name} fails on inputs {tuple(images.shape)}: {reason(error)}") from None

    def train(self, mode: bool = True) -> ExportedClassifier:
        """A program has one mode, the one it was exported in; it refuses to be asked for another."""
        self.training = mode
        return self


def _load(content: bytes, name: str, device: torch.device | str | None) -> Any:
    log = logging.getLogger("torch.export")
    level = log.level
    log.setLevel(logging.ERROR)  # torch logs a traceback before it raises
    what = f"{name} is not a program that torch {torch.__version__} can load"
    try:
        with refusing(what, advice="export it again with this version"):
            program = torch.export.load(io.BytesIO(content))
            return program if device is None else move_to_device_pass(program, str(device))
    finally:
        log.setLevel(level)


def _input(program: Any, name: str) -> tuple[list[int], list[int | None], int, int | None]:
    """The shape of an example batch, the sizes of one image (None where free), and the least and most images per batch."""
    inputs = program.graph_signature.user_inputs
    found = [node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder" and node.name in inputs]
    given = found[0] if len(inputs) == len(found) == 1 else None
    if not isinstance(given, Tensor) or given.dtype != torch.float32 or given.ndim < 2:
        kinds = ", ".join(f"{getattr(v, 'dtype', type(v).__name__)} {list(getattr(v, 'shape', []))}" for v in found)
        raise InputError(f"{name}: expected one float32 input [n, ...], the images; it takes {kinds or 'nothing'}")
    sizes = [size if isinstance(size, int) else None for size in given.shape]
    example = [size if isinstance(size, int) else size.node.hint for size in given.shape]
    least, most = sizes[0] or 1, sizes[0]
    if sizes[0] is None:
        symbol: Any = given.shape[0]
        limits = program.range_constraints.get(symbol.node.expr)
        least = 1 if limits is None or limits.lower < 1 else int(limits.lower)
        # torch's infinity is not a number that int() takes; batches beyond 2^31 images do not come.
        most = None if limits is None or limits.upper > 2**31 else int(limits.upper)
        example[0] = max(least, min(2, most or 2))
    if not all(isinstance(size, int) and 0 < size <= MOST for size in example):
        raise InputError(f"{name}: expected images of sizes up to {MOST}, it states {example}; export it again")
    return example, sizes[1:], least, most


def _refuse_train_mode(program: Any, name: str) -> None:
    """Dropout or batch statistics would make every call another function."""
    if any("MUTATION" in spec.kind.name for spec in program.graph_signature.output_specs):
        what = "it updates its buffers"
    elif call := written(program):
        what = f"{call} updates its weights or buffers"
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
    operator, given = node.target._schema.name, {argument.name: value for argument, value in arguments(node)}
    if "batch_norm" in operator:
        return given.get("training") is True
    if torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    if "scaled_dot_product" in operator:
        return given.get("dropout_p", 0.0) != 0
    return given.get("train", given.get("training")) is not False
