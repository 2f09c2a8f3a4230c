"""The plain reader: official layouts read right, everything else refused by name, nothing ever run, costs bounded."""

from __future__ import annotations

import codecs
import copy
import pickle
import struct
import sys
import tracemalloc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from keepcover.data import plain_pickle
from keepcover.data.plain_pickle import loads
from keepcover.errors import InputError

# -- what Python 2 wrote -----------------------------------------------------------------------------------------------


class Python2:
    """Protocol 2 as cPickle of Python 2 writes it: byte strings, memo numbers from 1, lists in batches of a thousand."""

    def __init__(self) -> None:
        self.out, self.stored = bytearray(b"\x80\x02"), 0

    def put(self) -> None:
        self.stored += 1
        short = self.stored < 256
        self.out += struct.pack("<cB" if short else "<cI", b"q" if short else b"r", self.stored)

    def write(self, value: Any) -> None:
        match value:
            case None | True | False:
                self.out += {None: b"N", True: b"\x88", False: b"\x89"}[value]
            case int():
                small = b"K" + bytes([value]) if 0 <= value < 256 else b""
                self.out += small or (
                    b"M" + struct.pack("<H", value) if 0 <= value < 65536 else b"J" + struct.pack("<i", value)
                )
            case float():
                self.out += b"G" + struct.pack(">d", value)
            case str() | bytes():
                raw = value.encode("latin-1") if isinstance(value, str) else value
                self.out += (b"U" + bytes([len(raw)]) if len(raw) < 256 else b"T" + struct.pack("<i", len(raw))) + raw
                self.put()
            case list():
                self.out += b"]"
                self.put()
                for at in range(0, len(value), 1000):
                    self.out += b"("
                    for item in value[at : at + 1000]:
                        self.write(item)
                    self.out += b"e"
            case dict():
                self.out += b"}"
                self.put()
                self.out += b"("
                for key, item in value.items():
                    self.write(key)
                    self.write(item)
                self.out += b"u"
            case tuple():
                self.out += b"(" if len(value) > 3 else b""
                for item in value:
                    self.write(item)
                self.out += [b")", b"\x85", b"\x86", b"\x87"][len(value)] if len(value) <= 3 else b"t"
                self.put()
            case np.ndarray():
                self.array(value)

    def array(self, value: np.ndarray) -> None:
        fortran = value.flags.f_contiguous and not value.flags.c_contiguous
        self.out += b"cnumpy.core.multiarray\n_reconstruct\n"
        self.put()
        self.out += b"cnumpy\nndarray\n"
        self.put()
        for item in ((0,), "b"):
            self.write(item)
        self.out += b"\x87"
        self.put()
        self.out += b"R"
        self.put()
        self.out += b"("
        for item in (1, value.shape):
            self.write(item)
        self.out += b"cnumpy\ndtype\n"
        self.put()
        self.write((value.dtype.str.lstrip("|"), 0, 1))
        self.out += b"R"
        self.put()
        self.write((3, "|", None, None, None, -1, -1, 0))
        self.out += b"b"
        self.write(fortran)
        self.write(value.tobytes("F" if fortran else "C"))
        self.out += b"tb"


def python2(value: Any) -> bytes:
    """A file as the authors of CIFAR wrote it."""
    writer = Python2()
    writer.write(value)
    return bytes(writer.out) + b"."


def batch(n: int = 3, key: str = "labels", classes: int = 10, seed: int = 0, fortran: bool = False) -> dict[str, Any]:
    """What one official python file holds."""
    generator = np.random.default_rng(seed)
    pixels = generator.integers(0, 256, (n, 3072), dtype=np.uint8)
    return {
        "batch_label": "testing batch 1 of 1",
        key: generator.integers(0, classes, n).tolist(),
        "data": np.asfortranarray(pixels) if fortran else pixels,
        "filenames": [f"domestic_cat_s_{i:06d}.png" for i in range(n)],
    }


def unpickled(content: bytes) -> Any:
    """What Python itself makes of it; the name numpy.core is no longer current."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pickle.loads(content, encoding="latin1")


def equal(a: Any, b: Any) -> bool:
    """Equal in type and value, all the way down; NaN equals NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b or (a != a and b != b)


# -- what may not happen -----------------------------------------------------------------------------------------------

FORBIDDEN = (
    "import",
    "exec",
    "compile",
    "open",
    "os.",
    "subprocess.",
    "pickle.",
    "socket.",
    "ctypes.",
    "marshal.",
    "code.",
)
_events: list[str] = []
codecs.lookup("raw-unicode-escape")  # Python imports its codecs when they are first used
_armed = False


def _audit(event: str, _: tuple[Any, ...]) -> None:
    if _armed and event.startswith(FORBIDDEN):
        _events.append(event)


sys.addaudithook(_audit)


@contextmanager
def nothing_runs() -> Iterator[None]:
    """Python reports to its audit hooks whatever imports, executes, opens or starts something."""
    global _armed
    _events.clear()
    _armed = True
    try:
        yield
    finally:
        _armed = False
    assert _events == []


def refused(content: bytes, match: str) -> None:
    with nothing_runs(), pytest.raises(InputError, match=match) as caught:
        loads(content, "batch")
    assert str(caught.value).startswith("batch: ")
    assert "\n" not in str(caught.value)


def test_the_watch_notices_what_a_pickle_runs(tmp_path: Path) -> None:
    attack = f"cos\nmkdir\n(S'{tmp_path / 'made'}'\ntR.".encode()
    with pytest.raises(AssertionError), nothing_runs():
        pickle.loads(attack)
    assert {"pickle.find_class", "os.mkdir"} <= set(_events)


# -- official layouts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fortran", [False, True])
@pytest.mark.parametrize("n", [1, 3, 1001])
def test_official_files_read_back(n: int, fortran: bool) -> None:
    """In either memory order, and past the thousand items and 255 memo entries after which cPickle changes its opcodes."""
    value = batch(n, fortran=fortran)
    content = python2(value)
    with nothing_runs():
        found = loads(content)
    assert equal(found, value)
    assert equal(found, unpickled(content))  # so these are pickles, and the same ones


def test_an_array_may_be_looked_up_again() -> None:
    """The memo holds an array before its values have come, as in Python's own reader."""
    content = python2([np.arange(6, dtype=np.uint8)])
    stored = content.index(b"\x87q") + 6  # the array itself is stored right after REDUCE
    assert content[stored - 3 : stored - 1] == b"Rq"
    again = content[:-2] + b"h" + content[stored - 1 : stored] + b"e."
    assert equal(loads(again), unpickled(again))
    assert len(loads(again)) == 2


def test_keys_and_strings_of_either_kind() -> None:
    assert loads(pickle.dumps({b"data": b"\xff\x00", "text": "é"}, 3)) == {b"data": b"\xff\x00", "text": "é"}
    assert loads(python2({"data": bytes(range(256))})) == {"data": bytes(range(256)).decode("latin-1")}


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**2000), 2**2000) | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.binary(), inner, max_size=5)
    ),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None)
@given(PLAIN, st.sampled_from([3, 4, 5]))
def test_plain_data_of_any_protocol_read_as_python_reads_them(value: Any, protocol: int) -> None:
    content = pickle.dumps(copy.deepcopy(value), protocol)
    with nothing_runs():
        assert equal(loads(content), pickle.loads(content))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=4),
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5),
    st.floats(allow_nan=False),
)
def test_arrays_of_any_shape(shape: list[int], numbers: list[int], number: float) -> None:
    array = (np.arange(np.prod(shape)) % 251).astype(np.uint8).reshape(shape)
    value = {"data": array, "numbers": numbers, "number": number, "nested": ((1, 2), [()], None, True, False)}
    content = python2(value)
    assert equal(loads(content), unpickled(content))


# -- attacks -----------------------------------------------------------------------------------------------------------


def _reduce_of(function: bytes, argument: bytes) -> bytes:
    return b"c" + function + b"(S'" + argument + b"'\ntR"


def attacks(target: Path) -> dict[str, tuple[bytes, str]]:
    """Pickles that make a folder, each in another way, and what must be said of them."""
    path = str(target).encode()
    text = f"__import__('os').mkdir({str(target)!r})".encode()
    short = b"\x8c" + bytes([len(path)]) + path  # SHORT_BINUNICODE
    string = b"U" + bytes([len(path)]) + path
    call = b"cos\nmkdir\n" + string + b"\x85R"

    class Reduced:
        def __reduce__(self) -> Any:
            return eval, (text.decode(),)

    listed = {
        "os.system": (b"cos\nsystem\nU" + bytes([len(path) + 6]) + b"mkdir " + path + b"\x85R.", "global os.system"),
        "os.mkdir": (call + b".", "global os.mkdir"),
        "text protocol": (_reduce_of(b"os\nmkdir\n", path) + b".", "global os.mkdir"),
        "builtins.eval": (
            b"cbuiltins\neval\nX" + struct.pack("<I", len(text)) + text + b"\x85R.",
            "global builtins.eval",
        ),
        "Python 2 eval": (
            b"c__builtin__\neval\nX" + struct.pack("<I", len(text)) + text + b"\x85R.",
            "global __builtin__.eval",
        ),
        "in a list": (b"]q\x01(K\x01]" + call + b"ae.", "global os.mkdir"),
        "in a dict": (b"}U\x01a" + call + b"s.", "global os.mkdir"),
        "as a key": (b"}" + call + b"U\x01as.", "global os.mkdir"),
        "dropped at once": (call + b"0N.", "global os.mkdir"),
        "after a batch": (python2(batch(1))[:-1] + b"0" + call + b".", "opcode POP|global os.mkdir"),
        "within a batch": (python2({"labels": []})[:-2] + b"U\x01a" + call + b"u.", "global os.mkdir"),
        "INST": (b"(" + string + b"ios\nmkdir\n.", "opcode INST"),
        "OBJ": (b"(cos\nmkdir\n" + string + b"o.", "global os.mkdir"),
        "STACK_GLOBAL": (b"\x80\x04\x8c\x02os\x8c\x05mkdir\x93" + short + b"\x85R.", "opcode STACK_GLOBAL"),
        "getattr": (b"cbuiltins\ngetattr\ncos\npath\nU\x02os\x86R.", "global builtins.getattr"),
        "copyreg": (
            b"ccopyreg\n_reconstructor\ncbuiltins\nobject\ncbuiltins\nobject\nN\x87R.",
            "global copyreg._reconstructor",
        ),
    }
    for protocol in range(6):
        expected = "global (builtins|__builtin__).eval" if protocol < 4 else "opcode STACK_GLOBAL"
        listed[f"__reduce__, protocol {protocol}"] = pickle.dumps([Reduced()], protocol), expected
    return {name: (content, match.replace("(b", "(?:b")) for name, (content, match) in listed.items()}


HARMLESS = ("getattr", "copyreg")  # until something is done with what they give


@pytest.mark.parametrize("name", list(attacks(Path("/"))))
def test_attacks_are_refused_by_name(name: str, tmp_path: Path) -> None:
    content, match = attacks(tmp_path / "made")[name]
    refused(content, match if name != "__reduce__, protocol 0" else "opcode|global")
    assert not (tmp_path / "made").exists()
    unpickled(content)  # the attack is a real one
    assert (tmp_path / "made").exists() == (name not in HARMLESS)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"\x80\x02cnumpy\nndarray\n)\x81.", "opcode NEWOBJ"),
        (b"\x80\x04cnumpy\nndarray\n)}\x92.", "opcode NEWOBJ_EX"),
        (b"(cnumpy\nndarray\no.", "opcode OBJ"),
        (b"Pname\n.", "opcode PERSID"),
        (b"NQ.", "opcode BINPERSID"),
        (b"\x82\x01.", "opcode EXT1"),
        (b"\x83\x01\x00.", "opcode EXT2"),
        (b"\x84\x01\x00\x00\x00.", "opcode EXT4"),
        (b"\x97.", "opcode NEXT_BUFFER"),
        (b"\x96\x01\x00\x00\x00\x00\x00\x00\x00a.", "opcode BYTEARRAY8"),
        (b"\x8f.", "opcode EMPTY_SET"),
        (b"I1\n.", "opcode INT"),
        (b"S'd'\n.", "opcode STRING"),
        (b"V\\ud800\n.", "opcode UNICODE"),
        (b"\x00.", r"opcode b'\\x00' unknown"),
        (b"cnumpy\nfromfile\n.", "global numpy.fromfile"),
        (b"cnumpy.core.multiarray\nscalar\n.", "global numpy.core.multiarray.scalar"),
        (b"cnumpy._core.multiarray\n_reconstruct\n.", "global numpy._core.multiarray._reconstruct"),
        (b"cnumpy\nndarray.tofile\n.", "global numpy.ndarray.tofile"),
        (b"cnumpy.ndarray\ntofile\n.", "global numpy.ndarray.tofile"),
        (b"c\xff\n\n.", "a broken pickle"),
        (b"c" + b"a" * 300, "a broken pickle .no newline found"),
        (b"cnumpy\n", "a broken pickle .no newline found"),
    ],
)
def test_everything_else_is_refused_by_name(content: bytes, match: str) -> None:
    refused(content, match)


DTYPE = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
ARRAY = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"


def state(shape: bytes = b"K\x02\x85", dtype: bytes = DTYPE, raw: bytes = b"U\x02ab") -> bytes:
    return ARRAY + b"(K\x01" + shape + dtype + b"\x89" + raw + b"tb."


def test_the_pieces_make_an_array() -> None:
    assert loads(state()).tolist() == [97, 98]


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (DTYPE.replace(b"u1", b"O8") + b".", "REDUCE, a call other than"),  # an object dtype
        (DTYPE.replace(b"u1", b"i8") + b".", "REDUCE"),
        (ARRAY.replace(b"K\x00\x85", b"M\xff\xff\x85") + b".", "REDUCE"),  # memory before any values
        (ARRAY.replace(b"U\x01b", b"U\x01O") + b".", "REDUCE"),
        (ARRAY.replace(b"cnumpy\nndarray\n", b"cnumpy\ndtype\n") + b".", "REDUCE"),
        (b"cnumpy\nndarray\nK\x05\x85R.", "REDUCE"),
        (b"U\x01aU\x01b\x85R.", "REDUCE"),
        (b"NNR.", "REDUCE"),
        (ARRAY + b"Nb.", "BUILD, a state other than"),
        (b"]Nb.", "BUILD"),
        (b"}}U\x01aNsb.", "BUILD"),  # a dict's own state
        (b"cnumpy\ndtype\n)b.", "BUILD"),
        (DTYPE + b"(K\x03" + DTYPE + b"tb.", "BUILD"),  # a subarray type
        (state(dtype=b"N"), "BUILD"),
        (state(raw=b"](Nue"), "BUILD|SETITEM"),
        (state(shape=b"K\x03\x85"), "shape and values disagree"),
        (state(shape=b"J\xff\xff\xff\xffJ\xfe\xff\xff\xff\x86"), "shape and values disagree"),
        (state(shape=b")", raw=b"U\x01a"), "shape and values disagree"),
        (state(shape=b"\x88\x85", raw=b"U\x01a"), "shape and values disagree"),
        (state(shape=b"K\x01K\x01\x86K\x02\x86"), "shape and values disagree"),
        (state(raw=b"X\x03\x00\x00\x00a\xc4\x80"), "an array made of text"),
        (state()[:-1] + b"(K\x01K\x02\x85" + DTYPE + b"\x89U\x02abtb.", "shape and values disagree"),  # filled twice
        (ARRAY + b".", "part of an array without the rest"),
        (b"](" + DTYPE + b"e.", "part of an array"),
        (b"cnumpy\nndarray\n.", "part of an array"),
    ],
)
def test_nothing_but_uint8_arrays_is_built(content: bytes, match: str) -> None:
    refused(content, match)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "exhausted before seeing STOP"),
        (b".", "not the end"),
        (b"NN.", "not the end"),
        (b"(N.", "not the end"),
        (b"N.N", "not the end"),
        (b"N", "exhausted before seeing STOP"),
        (b"a", "without its operand"),
        (b"Na", "without its operand"),
        (b"(a", "without its operand"),
        (b"NNa", "APPEND to something that is no list"),
        (b"e", "without its mark"),
        (b"}Ns", "without its operand"),
        (b"]NNs", "SETITEM"),
        (b"}(Nu", "SETITEM"),
        (b"}(K\x01K\x02u", "SETITEM"),
        (b"}(]Nu", "SETITEM"),
        (b"q\x00", "without its operand"),
        (b"h\x07", "memo entry 7, which was never stored"),
        (b"U\x05ab", "expected 5 bytes .* only 2 remain"),
        (b"T\xff\xff\xff\xffab", "byte count < 0: -1"),
        (b"X\x01\x00\x00\x00\xff.", "'utf-8' codec can't decode"),
        (b"G\x00.", "not enough data"),
    ],
)
def test_broken_pickles_are_refused(content: bytes, match: str) -> None:
    refused(content, match)


# -- bombs -------------------------------------------------------------------------------------------------------------


def peak_of(content: bytes, match: str) -> int:
    tracemalloc.start()
    try:
        refused(content, match)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "content",
    [
        b"B\xff\xff\xff\xffab.",
        b"T\xff\xff\xff\x7fab.",
        b"X\xff\xff\xff\xffab.",
        b"\x8d" + b"\xff" * 8 + b".",
        b"\x8e" + b"\xff" * 7 + b"\x7f.",
        b"\x8b\xff\xff\xff\x7f.",
        b"\x95" + b"\xff" * 8 + b"N",
        b"Nr\xff\xff\xff\xff0.",  # Python's own reader makes room for four billion entries
    ],
)
def test_announced_lengths_cost_nothing(content: bytes) -> None:
    assert peak_of(content, "is refused") < 1 << 20


def test_a_frame_may_say_what_it_likes() -> None:
    assert loads(b"\x80\x04\x95" + b"\xff" * 8 + b"K\x07.") == 7


def test_shared_containers_and_cycles_are_refused() -> None:
    """A thousand bytes that stand for 2^100 items, or for an endless one."""
    doubled = b"(K\x01tq\x00"
    for i in range(100):
        doubled += b"(h" + bytes([i]) + b"h" + bytes([i]) + b"tq" + bytes([i + 1])
    assert peak_of(b"](" + doubled + b"e.", "nested too deep or used twice") < 1 << 20
    assert peak_of(b"}(" + doubled + b"Nu.", "SETITEM") < 1 << 20  # as a key it would have to be hashed
    refused(b"]q\x00h\x00a.", "used twice")
    refused(b"}q\x00U\x01ah\x00s.", "used twice")


def test_nesting_is_shallow() -> None:
    assert loads(b"]" * 16 + b"K\x01" + b"a" * 15 + b"a.") != []
    refused(b"]" * 17 + b"K\x01" + b"a" * 16 + b"a.", "nested too deep")
    refused(b"N" + b"\x85" * 20_000 + b".", "nested too deep")


def test_one_string_does_not_become_many_arrays() -> None:
    """A string in the memo is short to repeat; what arrays take together is bounded by the file."""
    raw = b"a" * 10_000
    first = b"T" + struct.pack("<i", len(raw)) + raw + b"q\x00"
    again = state(shape=b"M\x10'\x85", raw=b"h\x00")[:-1]
    assert len(loads(b"](" + first + again + b"e.")) == 2
    refused(b"](" + first + 3 * again + b"e.", "more array than file")


def test_opcodes_and_bytes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_pickle, "MOST_OPCODES", 100)
    assert loads(b"](" + 96 * b"N" + b"e.") == 96 * [None]
    refused(b"](" + 97 * b"}" + b"e.", "more than 100 opcodes")
    monkeypatch.setattr(plain_pickle, "MOST_BYTES", 9)
    refused(10 * b"N", "a file of 10 bytes")


def test_the_limits_leave_room_for_the_largest_official_file() -> None:
    """CIFAR-100's training set: 50 000 images, of which each has two labels and a file name."""
    assert plain_pickle.MOST_BYTES > 50_000 * (3072 + 60)
    assert plain_pickle.MOST_OPCODES > 4 * 50_000 * 2


# -- fuzzing -----------------------------------------------------------------------------------------------------------


def plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str | bytes) and plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(plain, value))
    return value is None or type(value) in (str, bytes, int, float, bool) or value.dtype == np.uint8


def attempt(content: bytes) -> None:
    """Plain data or an InputError; nothing runs, and nothing large comes of a small file."""
    value, message = None, ""
    with nothing_runs():
        try:
            value = loads(content)
        except InputError as error:
            message = str(error)
    assert "\n" not in message
    assert plain(value)


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=200))
@example(b"\x80\x02}q\x01.")
def test_arbitrary_bytes(content: bytes) -> None:
    attempt(content)


OPCODES = [opcode.encode("latin-1") for opcode in "(.JKMTUX]}aestuqhbRcN\x85\x86\x87\x88\x89\x80\x94\x95C"]
PIECES = st.sampled_from(
    [
        *OPCODES,
        b"K\x00",
        b"U\x01b",
        b"U\x02u1",
        b"q\x01",
        b"h\x01",
        b"numpy\n",
        b"ndarray\n",
        b"cos\nsystem\n",
        DTYPE,
        ARRAY,
    ]
)


@settings(max_examples=400, deadline=None)
@given(st.lists(PIECES | st.binary(max_size=3), max_size=40).map(b"".join))
def test_arbitrary_programs(content: bytes) -> None:
    attempt(content)
    attempt(content + b".")


OFFICIAL = python2(batch(2) | {"data": np.arange(40, dtype=np.uint8).reshape(2, 20)})


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_mutated_official_files(data: st.DataObject) -> None:
    """Bytes changed, cut out, repeated and put in, attacks among them."""
    content = bytearray(OFFICIAL)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        length = data.draw(st.integers(0, 12))
        patch = data.draw(st.binary(max_size=6) | PIECES | st.just(bytes(content[at : at + length])))
        content[at : at + data.draw(st.sampled_from([0, len(patch), length]))] = patch
    attempt(bytes(content))
