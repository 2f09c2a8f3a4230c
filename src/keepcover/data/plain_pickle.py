"""Pickles that hold plain data, read without unpickling.

The official python versions of CIFAR are pickles, and a pickle is a program: :mod:`pickle` runs whatever it names. This
reader is a small stack machine that has no operation to import or to call. It builds dict, list, tuple, str, bytes, int,
float, bool, None, and uint8 arrays as Python 2 and numpy wrote them. Any other opcode or global is refused by name.

What a file can cost is bounded by its own length: opcodes are counted, array bytes are budgeted, nesting is shallow, and
no container may appear twice, so neither cycles nor exponential sharing get through.
"""

from __future__ import annotations

import math
import pickletools
import struct
from enum import Enum
from typing import Any, NoReturn

import numpy as np

from keepcover.errors import InputError

MOST_BYTES = 1 << 28  # the largest official file, CIFAR-100's training set, has 155 MB
MOST_OPCODES = 2_000_000  # and about 400 000 opcodes
DEEPEST = 16

_NAMES = {opcode.code.encode("latin-1"): opcode.name for opcode in pickletools.opcodes}
_NUMBERS = {"BININT": "<i", "BININT1": "<B", "BININT2": "<H", "BINFLOAT": ">d"}
_SIZES = {
    "SHORT_BINSTRING": "<B",
    "BINSTRING": "<i",
    "SHORT_BINUNICODE": "<B",
    "BINUNICODE": "<I",
    "SHORT_BINBYTES": "<B",
    "BINBYTES": "<I",
    "LONG1": "<B",
}
_MEMO = {"BINPUT": "<B", "LONG_BINPUT": "<I", "BINGET": "<B", "LONG_BINGET": "<I"}


class _Name(Enum):
    """The three globals of an official file. They stand for themselves; nothing is imported."""

    RECONSTRUCT = "numpy.core.multiarray._reconstruct"
    NDARRAY = "numpy.ndarray"
    DTYPE = "numpy.dtype"


class _Uint8:
    """What ``numpy.dtype('u1')`` stands for."""


class _Array:
    """An array that the pickle has announced, and its values once they have come."""

    values: np.ndarray | None = None


def loads(data: bytes, source: str = "the pickle") -> Any:
    """The plain data in a pickle; Python 2 strings come as ``str``, byte by byte.

    Args:
        data: the whole file.
        source: how error messages call it.

    Example:
        >>> loads(b"\\x80\\x02}q\\x01(U\\x06labels]q\\x02(K\\x03K\\x08eU\\x01nNu.")
        {'labels': [3, 8], 'n': None}
        >>> loads(b"cos\\nsystem\\n(S'echo unsafe'\\ntR.", "batch")
        Traceback (most recent call last):
        keepcover.errors.InputError: batch: the global os.system at byte 0 is refused: ...
    """
    return _Machine(data, source).run()


class _Machine:
    def __init__(self, data: bytes, source: str) -> None:
        self.data, self.source = data, source
        self.at = self.start = 0
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # stacks under a mark
        self.memo: dict[int, Any] = {}
        self.budget = len(data)  # bytes of arrays: a string in the memo may be used again and again
        self.seen: set[int] = set()

    def refuse(self, what: str) -> NoReturn:
        raise InputError(
            f"{self.source}: {what} at byte {self.start} is refused: only plain data are read, and no official file has it. "
            "Nothing was run; get the file again from its official address"
        )

    # -- reading -------------------------------------------------------------------------------------------------------

    def take(self, count: int) -> bytes:
        if not 0 <= count <= len(self.data) - self.at:
            self.refuse(f"a value of {count} bytes with {len(self.data) - self.at} left")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def line(self) -> str:
        end = self.data.find(b"\n", self.at, self.at + 256)
        if end < 0:
            self.refuse("a name without end")
        text = self.data[self.at : end]
        self.at = end + 1
        return text.decode("ascii", "backslashreplace")

    def run(self) -> Any:
        if len(self.data) > MOST_BYTES:
            self.refuse(f"a file of {len(self.data)} bytes (at most {MOST_BYTES})")
        for _ in range(MOST_OPCODES):
            self.start = self.at
            code = self.take(1)
            name = _NAMES.get(code, f"byte {code!r}")
            if name == "STOP":
                if self.at != len(self.data) or self.below or len(self.stack) != 1:
                    self.refuse("an end that is not the end")
                return self.plain(self.stack[0])
            self.step(name)
        self.refuse(f"a pickle of more than {MOST_OPCODES} opcodes")

    def step(self, name: str) -> None:
        if name in _NUMBERS:
            self.stack.append(self.number(_NUMBERS[name]))
        elif name in _SIZES:
            self.stack.append(self.value(name, self.take(self.number(_SIZES[name]))))
        elif name in _MEMO:
            self.remember(self.number(_MEMO[name]), name.endswith("PUT"))
        else:
            self.build(name)

    def value(self, name: str, raw: bytes) -> str | bytes | int:
        if name.endswith("BINSTRING"):
            return raw.decode("latin-1")
        if name.endswith("BINUNICODE"):
            try:
                return raw.decode("utf-8", "surrogatepass")
            except UnicodeDecodeError:
                self.refuse("text that is not UTF-8")
        return int.from_bytes(raw, "little", signed=True) if name == "LONG1" else raw

    def remember(self, key: int, put: bool) -> None:
        if put:
            self.memo[key] = self.top()
        elif key in self.memo:
            self.stack.append(self.memo[key])
        else:
            self.refuse(f"memo entry {key}, which was never stored,")

    # -- building ------------------------------------------------------------------------------------------------------

    def build(self, name: str) -> None:
        """Opcodes that take their arguments from the stack."""
        match name:
            case "PROTO":
                self.take(1)
            case "FRAME":
                self.take(8)  # a promise about lengths that nothing here relies on
            case "MEMOIZE":
                self.memo[len(self.memo)] = self.top()
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                self.stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[name])
            case "EMPTY_LIST" | "EMPTY_DICT" | "EMPTY_TUPLE":
                self.stack.append({"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple}[name]())
            case "MARK":
                self.below.append(self.stack)
                self.stack = []
            case "TUPLE":
                items = tuple(self.marked())  # before the stack is named: it changes
                self.stack.append(items)
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                self.stack.append(tuple(self.pop(int(name[-1]))))
            case "APPEND":
                self.extend(self.pop(1))
            case "APPENDS":
                self.extend(self.marked())
            case "SETITEM":
                self.update(self.pop(2))
            case "SETITEMS":
                self.update(self.marked())
            case "GLOBAL":
                self.name(f"{self.line()}.{self.line()}")
            case "REDUCE":
                self.reduce(*self.pop(2))
            case "BUILD":
                (state,) = self.pop(1)
                self.fill(self.top(), state)
            case _:
                self.refuse(f"the opcode {name}")

    def top(self) -> Any:
        if not self.stack:
            self.refuse("an opcode without its operand")
        return self.stack[-1]

    def pop(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            self.refuse("an opcode without its operand")
        taken = self.stack[-count:]
        del self.stack[-count:]
        return taken

    def marked(self) -> list[Any]:
        if not self.below:
            self.refuse("an opcode without its mark")
        taken, self.stack = self.stack, self.below.pop()
        return taken

    def extend(self, items: list[Any]) -> None:
        if not isinstance(self.top(), list):
            self.refuse("APPEND to something that is no list")
        self.stack[-1].extend(items)

    def update(self, items: list[Any]) -> None:
        # Keys are text alone: a nested tuple would take exponential time to hash.
        keys = items[::2]
        if not isinstance(self.top(), dict) or len(items) % 2 or not all(isinstance(key, str | bytes) for key in keys):
            self.refuse("SETITEM other than of a text key in a dict")
        self.stack[-1].update(zip(keys, items[1::2]))

    def name(self, full: str) -> None:
        if full not in {known.value for known in _Name}:
            self.refuse(f"the global {full}")
        self.stack.append(_Name(full))

    def reduce(self, function: Any, arguments: Any) -> None:
        """The two calls that an official file asks for, recognised by every argument; nothing is called."""
        match function, arguments:
            case _Name.RECONSTRUCT, tuple((_Name.NDARRAY, tuple((int(0),)), str("b") | bytes(b"b"))):
                self.stack.append(_Array())
            case _Name.DTYPE, tuple((str("u1" | "|u1"), int(), int())):
                self.stack.append(_Uint8())
            case _:
                self.refuse("REDUCE, a call other than of numpy's constructor of uint8 arrays,")

    def fill(self, target: Any, state: Any) -> None:
        """What ``__setstate__`` would do for a uint8 dtype (nothing) and for an array of it."""
        match target, state:
            case _Uint8(), tuple() if all(item is None or type(item) in (int, str) for item in state):
                pass  # byte order, alignment and fields mean nothing to single bytes
            case _Array(), tuple((int(), tuple() as shape, _Uint8(), int() as fortran, (str() | bytes()) as raw)):
                self.fill_array(target, shape, "F" if fortran else "C", raw)
            case _:
                self.refuse("BUILD, a state other than of a uint8 array,")

    def fill_array(self, target: _Array, shape: tuple[Any, ...], order: Any, raw: str | bytes) -> None:
        sized = 1 <= len(shape) <= 4 and all(type(side) is int and side >= 0 for side in shape)
        if not sized or math.prod(shape) != len(raw) or target.values is not None:
            self.refuse("an array whose shape and values disagree")
        self.budget -= len(raw)
        if self.budget < 0:
            self.refuse("more array than file")
        try:
            content = raw.encode("latin-1") if isinstance(raw, str) else raw
        except UnicodeEncodeError:
            self.refuse("an array made of text")
        target.values = np.frombuffer(content, np.uint8).reshape(shape, order=order)

    def plain(self, value: Any, depth: int = 0) -> Any:
        """The finished value, made of plain types alone, as a tree."""
        if isinstance(value, dict | list | tuple) and value:
            if depth == DEEPEST or id(value) in self.seen:
                self.refuse("a container nested too deep or used twice")
            self.seen.add(id(value))
            if isinstance(value, dict):
                return {key: self.plain(item, depth + 1) for key, item in value.items()}
            return type(value)(self.plain(item, depth + 1) for item in value)
        if isinstance(value, _Array) and value.values is not None:
            return value.values
        if isinstance(value, _Array | _Uint8 | _Name):
            self.refuse("a part of an array without the rest")
        return value
