"""A loaded program, looked through call by call and rehearsed on tensors without data before it runs.

The file states the shapes of everything it computes, and may state anything. The rehearsal computes them again, so that what
a program returns and how much memory it takes are known before any of it is taken.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from keepcover.errors import InputError, refusing

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
                    raise InputError(
                        f"{name}: {n.name} would take {value.untyped_storage().nbytes() / 2**30:.1f} GiB for {shape[0]} images; "
                        f"keepcover runs programs that take up to {MOST_PER_IMAGE >> 20} MiB per tensor and image"
                    )
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
