"""Pickles that hold plain data, read without unpickling.

The official python versions of CIFAR are pickles, and a pickle is a program: :mod:`pickle` runs whatever it names. This
reader takes the opcodes from :mod:`pickletools`, which only reads them, into a small stack machine that has no operation
to import or to call. It builds dict, list, tuple, str, bytes, int,
float, bool, None, and uint8 arrays as Python 2 and numpy wrote them. Any other opcode or global is refused by name.

What a file can cost is bounded by its own length: opcodes are counted, array bytes are budgeted, nesting is shallow, and
no container may appear twice, so neither cycles nor exponential sharing get through.
"""

from __future__ import annotations

import math
import pickletools
from enum import Enum
from typing import Any, NoReturn

import numpy as np

from keepcover.errors import InputError, reason

MOST_BYTES = 1 << 28  # the largest official file, CIFAR-100's training set, has 155 MB
MOST_OPCODES = 2_000_000  # and about 400 000 opcodes
DEEPEST = 16

_TEXTS = ("SHORT_BINSTRING", "BINSTRING", "SHORT_BINUNICODE", "BINUNICODE", "SHORT_BINBYTES", "BINBYTES")
_VALUES = ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", *_TEXTS)
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}


class _Name(Enum):
    """The three globals of an official file, and what one of them makes. They stand for themselves; nothing is imported."""

    RECONSTRUCT = "numpy.core.multiarray _reconstruct"
    NDARRAY = "numpy ndarray"
    DTYPE = "numpy dtype"
    UINT8 = "numpy.dtype('u1')"  # no global: the name of one has a space


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
        self.data, self.source, self.at = data, source, 0
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # stacks under a mark
        self.memo: dict[int, Any] = {}
        self.budget = len(data)  # bytes of arrays: a string in the memo may be used again and again
        self.seen: set[int] = set()

    def refuse(self, what: str) -> NoReturn:
        why = "only plain data are read, and no official file has it. Nothing was run"
        advice = "get the file again from its official address"
        raise InputError(f"{self.source}: {what} at byte {self.at} is refused: {why}; {advice}")

    def run(self) -> Any:
        if len(self.data) > MOST_BYTES:
            self.refuse(f"a file of {len(self.data)} bytes (at most {MOST_BYTES})")
        try:
            for count, (opcode, argument, at) in enumerate(pickletools.genops(self.data)):
                self.at = at or 0
                if count == MOST_OPCODES:
                    self.refuse(f"a pickle of more than {MOST_OPCODES} opcodes")
                self.step(opcode.name, argument)
        except InputError:
            raise
        except Exception as error:  # arguments that are cut short, or no text or number
            self.refuse(f"a broken pickle ({reason(error)})")
        if self.at + 1 != len(self.data) or self.below or len(self.stack) != 1:
            self.refuse("an end that is not the end")
        return self.plain(self.stack[0])

    def step(self, name: str, argument: Any) -> None:
        match name:
            case "PROTO" | "FRAME" | "STOP":
                pass  # versions and promises about lengths: nothing here relies on them
            case _ if name in _VALUES:
                self.stack.append(argument)
            case _ if name in _CONSTANTS:
                self.stack.append(_CONSTANTS[name])
            case "EMPTY_LIST" | "EMPTY_DICT":
                self.stack.append([] if name == "EMPTY_LIST" else {})
            case "BINPUT" | "LONG_BINPUT" | "MEMOIZE":
                self.memo[len(self.memo) if argument is None else argument] = self.top()
            case "BINGET" | "LONG_BINGET":
                if argument not in self.memo:
                    self.refuse(f"memo entry {argument}, which was never stored,")
                self.stack.append(self.memo[argument])
            case "MARK":
                self.below.append(self.stack)
                self.stack = []
            case "TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
                items = self.marked() if name == "TUPLE" else self.pop(int(name[-1]))
                self.stack.append(tuple(items))
            case "APPEND" | "APPENDS":
                items = self.pop(1) if name == "APPEND" else self.marked()
                if not isinstance(self.top(), list):
                    self.refuse("APPEND to something that is no list")
                self.stack[-1].extend(items)
            case "SETITEM" | "SETITEMS":
                items = self.pop(2) if name == "SETITEM" else self.marked()
                keys = items[::2]
                # Keys are text alone: a nested tuple would take exponential time to hash.
                texts = all(isinstance(key, str | bytes) for key in keys)
                if not isinstance(self.top(), dict) or len(items) % 2 or not texts:
                    self.refuse("SETITEM other than of a text key in a dict")
                self.stack[-1].update(zip(keys, items[1::2]))
            case "GLOBAL":
                if argument not in {known.value for known in _Name}:
                    self.refuse(f"the global {argument.replace(' ', '.')}")
                self.stack.append(_Name(argument))
            case "REDUCE":
                self.stack.append(self.reduced(*self.pop(2)))
            case "BUILD":
                (state,) = self.pop(1)
                self.fill(self.top(), state)
            case _:
                self.refuse(f"the opcode {name}")

    def top(self, count: int = 1) -> Any:
        if len(self.stack) < count:
            self.refuse("an opcode without its operand")
        return self.stack[-1]

    def pop(self, count: int) -> list[Any]:
        self.top(count)
        taken = self.stack[-count:]
        del self.stack[-count:]
        return taken

    def marked(self) -> list[Any]:
        if not self.below:
            self.refuse("an opcode without its mark")
        taken, self.stack = self.stack, self.below.pop()
        return taken

    def reduced(self, function: Any, arguments: Any) -> _Array | _Name:
        """The two calls that an official file asks for, recognised by every argument; nothing is called."""
        match function, arguments:
            case _Name.RECONSTRUCT, tuple((_Name.NDARRAY, tuple((int(0),)), str("b") | bytes(b"b"))):
                return _Array()
            case _Name.DTYPE, tuple((str("u1" | "|u1"), int(), int())):
                return _Name.UINT8
            case _:
                self.refuse("REDUCE, a call other than of numpy's constructor of uint8 arrays,")

    def fill(self, target: Any, state: Any) -> None:
        """What ``__setstate__`` would do for a uint8 dtype (nothing) and for an array of it."""
        match target, state:
            case _Name.UINT8, tuple() if all(item is None or type(item) in (int, str) for item in state):
                pass  # byte order, alignment and fields mean nothing to single bytes
            case _Array(), tuple((int(), tuple() as shape, _Name.UINT8, int() as fortran, (str() | bytes()) as raw)):
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
                target.values = np.frombuffer(content, np.uint8).reshape(shape, order="F" if fortran else "C")
            case _:
                self.refuse("BUILD, a state other than of a uint8 array,")

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
        if isinstance(value, _Array | _Name):
            self.refuse("a part of an array without the rest")
        return value
