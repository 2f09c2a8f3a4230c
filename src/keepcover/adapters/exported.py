"""``torch.export`` programs (``.pt2``) as classifiers.

A loaded program is looked through call by call and rehearsed on tensors without data before it runs. The file states the shapes
of everything it computes, and may state anything. The rehearsal computes them again, so that what a program returns and how much
memory it takes are known before any of it is taken.
"""

from __future__ import annotations

import hashlib
import io
import logging
import operator
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.passes import move_to_device_pass

from keepcover.adapters.batching import check_sizes, in_batches
from keepcover.adapters.program import checked_copy
from keepcover.errors import InputError, reason, refusing

MOST_PER_IMAGE = 1 << 28  # bytes of one tensor, per image of a batch: 64 channels of 1024 x 1024 float32 values
MOST = 1 << 24  # any number among the arguments: sizes, strides, counts
TO_THE_END = 2**63 - 1  # how slices say so
MOST_BITS = 128  # of a computed size
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_DTYPES = (*_FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
_KINDS: dict[str, Any] = {
    "ScalarType": lambda value: value in _DTYPES,
    "Layout": lambda value: value == torch.strided,
    "Device": lambda value: isinstance(value, torch.device) and value.type in ("cpu", "cuda", "mps", "xpu"),
    "MemoryFormat": lambda value: isinstance(value, torch.memory_format),
}


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
            raise InputError(f"{name}: expected one output, logits [n, classes]; export a model that returns only that")
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
            f"{name} was exported in train mode ({what}): another function every call; call model.eval() first"
        )


def _varies(node: Any) -> bool:
    """Whether an operator draws random numbers, or mixes the images of a batch as batch norm does in training."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    called, given = node.target._schema.name, {argument.name: value for argument, value in arguments(node)}
    if "batch_norm" in called:
        return given.get("training") is True
    if torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    if "scaled_dot_product" in called:
        return given.get("dropout_p", 0.0) != 0
    return given.get("train", given.get("training")) is not False


# -- before it runs ----------------------------------------------------------------------------------------------------


def arguments(node: fx.Node) -> Iterator[tuple[Any, Any]]:
    """The arguments of an operator's schema with what a node gives for them."""
    for at, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if at < len(node.args):
            yield argument, node.args[at]
        elif argument.name in node.kwargs:
            yield argument, node.kwargs[argument.name]


def check_calls(graph: fx.Graph, name: str) -> None:
    """Refuse arguments of another kind than the operator's, numbers beyond reason, and sizes that grow without bound.

    Some operators take any integer for a dtype and crash. A product of sizes that is multiplied with itself again and again
    doubles its digits every time; so the bits of every size are counted.
    """
    bits: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if not isinstance(node.target, torch._ops.OpOverload):
            given = [bits.get(a, 64) if isinstance(a, fx.Node) else int(a).bit_length() for a in _numbers(node.args)]
            bits[node] = sum(given) if node.target is operator.mul else max(given, default=0) + 1
            if bits[node] > MOST_BITS:
                raise InputError(f"{name} computes sizes of {bits[node]} bits ({node.name}); export the program again")
            continue
        for argument, value in arguments(node):
            kind = str(argument.real_type).removeprefix("Optional[").removesuffix("]")
            if value is not None and kind in _KINDS and not _KINDS[kind](value):
                raise InputError(f"{name}: {node.target} gets {value!r} as {argument.name}; export the program again")
            for number in _numbers([value]) if "int" in kind.lower() else ():
                if not isinstance(number, fx.Node) and abs(number) > MOST and number != TO_THE_END:
                    raise InputError(f"{name}: {node.target} gets {number} as {argument.name}, more than {MOST}")


def _numbers(values: Sequence[Any]) -> Iterator[Any]:
    """Integers, and nodes that may stand for some, among values and lists of them."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from _numbers(value)
        elif isinstance(value, int | fx.Node):
            yield value


def rehearse(module: fx.GraphModule, shape: Sequence[int], name: str) -> Any:
    """What a program returns for images of this shape: a tensor that has a shape and no data."""
    held = [*module.parameters(), *module.buffers()]
    most = shape[0] * MOST_PER_IMAGE + sum(tensor.nbytes for tensor in held)
    device = held[0].device if held else "cpu"

    class Rehearsal(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            for value in result if isinstance(result, list | tuple) else [result]:
                if isinstance(value, Tensor) and value.untyped_storage().nbytes() > most:
                    takes = f"would take {value.untyped_storage().nbytes() / 2**30:.1f} GiB for {shape[0]} images"
                    allowed = f"keepcover runs programs that take up to {MOST_PER_IMAGE >> 20} MiB per tensor and image"
                    raise InputError(f"{name}: {n.name} {takes}; {allowed}")
            return result

    fails = refusing(f"{name} fails on inputs {tuple(shape)}")
    with fails, FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        return Rehearsal(module).run(torch.empty(tuple(shape), device=device))


def written(program: Any) -> str | None:
    """The call that writes into a weight or a buffer, or into a view of one; None where there is none."""
    inputs = set(program.graph_signature.user_inputs)
    held = {node for node in program.graph.nodes if node.op == "placeholder" and node.name not in inputs}
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        if not isinstance(node.target, torch._ops.OpOverload):
            if any(argument in held for argument in node.args):
                held.add(node)  # one of several views
            continue
        for argument, value in arguments(node):
            if argument.alias_info is not None and isinstance(value, fx.Node) and value in held:
                if argument.alias_info.is_write:
                    return str(node.target)
                held.add(node)
    return None
