"""A ``torch.export`` archive, copied without anything that could run code.

``torch.export.load`` unpickles example inputs and odd weights, loads compiled libraries, evaluates size expressions with
sympy (which calls ``eval``), looks operators up as attributes of ``torch`` and compiles names and guards into Python. None
of that is needed to run a classifier. What is needed is copied into a new archive after it was checked; the rest is left
out, and a program that cannot do without it is refused.
"""

from __future__ import annotations

import ast
import io
import json
import math
import re
import zipfile
from typing import Any

from keepcover.adapters.operators import is_allowed
from keepcover.errors import InputError, refusing
from keepcover.store.logits_file import refuse_packed

_PROGRAM = "models/model.json"
_SAMPLES = "data/sample_inputs/model.pt"
_PAYLOADS = ("data/weights/model_weights_config.json", "data/constants/model_constants_config.json")
_COPIED = re.compile(r"archive_(format|version)|byteorder|\.data/\w+|data/(weights|constants)/(weight|tensor)_\d+")
_IGNORED = re.compile(r"extra/.*")

_NAME = re.compile(r"[\w.]*")
_VERSION = re.compile(r"[\w.+-]*")
_SYMBOL = re.compile(r"[a-z_]*[a-z]\d+")
_FUNCTION = re.compile(
    r"FloorDiv|CeilDiv|CleanDiv|IntTrueDiv|FloatTrueDiv|PythonMod|Mod|ModularIndexing|Max|Min|Eq|Ne|"
    r"CeilToInt|FloorToInt|TruncToInt|RoundToInt|TruncToFloat|ToFloat|Identity|Where|floor|ceiling|Add|Integer"
)

MOST_JSON = 1 << 24  # bytes of a program without its weights; a ResNet-50 has 0.4 MB
MOST_TEXT = 2000  # characters of a size expression
MOST_TERMS = 1000  # of it, once it is multiplied out


def checked_copy(content: bytes, name: str) -> bytes:
    """The archive without pickles, compiled code, guards and metadata; InputError if the program needs any of them."""
    # A file of unknown origin may break every expectation about types and depth.
    with refusing(f"{name} is not a program saved by torch.export.save"):
        records = _records(content, name)
        for record in (_PROGRAM, *_PAYLOADS):
            if record not in records:
                raise InputError(f"{name} is not a program saved by torch.export.save (no {record!r})")
            stated = json.loads(records[record])
            if record == _PROGRAM:
                stated["guards_code"] = []
            else:
                _check_payload(stated, record.rpartition("/")[0], records, name)
            records[record] = json.dumps(_checked(stated, "", name)).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as copy:
        for record, data in {**records, _SAMPLES: b""}.items():
            copy.writestr(f"archive/{record}", data)
    return buffer.getvalue()


def _records(content: bytes, name: str) -> dict[str, bytes]:
    """What is copied, by its name inside the archive's one folder."""
    records: dict[str, bytes] = {}
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        refuse_packed(archive, len(content), name)
        for info in archive.infolist():
            record = info.filename.partition("/")[2]
            if record == _SAMPLES or _IGNORED.fullmatch(record):
                continue
            if record in records:
                raise InputError(f"{name} holds {record!r} twice; export the program again")
            if not (record in (_PROGRAM, *_PAYLOADS) or _COPIED.fullmatch(record)):
                raise InputError(
                    f"{name} holds {info.filename!r}, which keepcover does not open: it may be a pickle or compiled code. "
                    "Export again with a recent torch, without custom objects or AOTInductor; or load the program in a "
                    "function of your own and give package.module:function"
                )
            if record.endswith(".json") and info.file_size > MOST_JSON:
                size = f"{info.file_size} bytes, more than {MOST_JSON}"
                raise InputError(f"{name}: {record} has {size}; it is no usual classifier")
            records[record] = archive.read(info)
    return records


def _check_payload(payload: Any, folder: str, records: dict[str, bytes], name: str) -> None:
    for tensor, meta in payload["config"].items():
        if meta.get("use_pickle") or not _COPIED.fullmatch(f"data/weights/{meta.get('path_name')}"):
            raise InputError(f"{name}: {tensor!r} is stored as a pickle, which is never opened; make it a plain tensor")
        # torch fills in zeros where a tensor has a size and no bytes.
        sizes = [size["as_int"] for size in meta["tensor_meta"]["sizes"]]
        if min(sizes, default=0) < 0 or math.prod(sizes) > len(records[f"{folder}/{meta['path_name']}"]):
            raise InputError(f"{name}: {tensor!r} has the sizes {sizes}, more than it has bytes; export it again")


def _checked(value: Any, key: str, name: str) -> Any:
    """The value, in which every string is of a kind that cannot be code; without metadata, free text that nothing needs."""
    if isinstance(value, dict):
        for inner in value:
            if not _NAME.fullmatch(inner):
                raise InputError(f"{name}: {inner!r} is not a name; export the program again")
        return {inner: {} if inner == "metadata" else _checked(item, inner, name) for inner, item in value.items()}
    if isinstance(value, list):
        return [_checked(item, key, name) for item in value]
    if isinstance(value, str):
        _check_text(value, key, name)
    return value


def _check_text(text: str, key: str, name: str) -> None:
    problem = f"{text!r} ({key}) is not a name; export the program again"
    match key:
        case "target" | "as_operator":
            fine = is_allowed(text)
            problem = (
                f"it calls {text!r}, which is not among the operators that keepcover runs from a file. Export without "
                "run_decompositions(), or give package.module:function, a function of your own that loads the program"
            )
        case "expr_str":
            fine = _is_arithmetic(text)
            problem = f"the size expression {text!r} is not arithmetic; export the program again"
        case "in_spec" | "out_spec":
            fine = _is_tree(text)
            problem = f"expected a program of one tensor in, one tensor out; its signature is {text!r}"
        case "as_string" | "as_strings":
            fine = True  # an argument such as the mode of an interpolation: handed over as it is, never compiled
        case _:
            fine = (_VERSION if key == "torch_version" else _NAME).fullmatch(text)
            fine = fine or (key == "as_float" and text == "-Infinity")
    if not fine:
        raise InputError(f"{name}: {problem}")


def _is_arithmetic(text: str) -> bool:
    """Numbers, symbols and known functions, joined by arithmetic and comparison, and small once they are multiplied out.

    Example:
        >>> _is_arithmetic("4*Max(1, s0)"), _is_arithmetic("Symbol('s0', positive=True, integer=True)")
        (True, True)
        >>> _is_arithmetic("__import__('os')"), _is_arithmetic("s0.real"), _is_arithmetic("9**9**9")
        (False, False, False)
    """
    try:
        return len(text) <= MOST_TEXT and _terms(ast.parse(text, mode="eval").body) <= MOST_TERMS
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _terms(node: ast.expr) -> int:
    """A bound on how many terms an expression has once it is multiplied out, as sympy does; ValueError if it is no arithmetic."""
    match node:
        case ast.Constant(value=bool() | int() | float() as value) if abs(value) < 1 << 64 or value == math.inf:
            return 1
        case ast.Name(id=name) if _SYMBOL.fullmatch(name):
            return 1
        case ast.Call(func=ast.Name(id="Symbol"), args=[ast.Constant(value=str(name))], keywords=assumptions) if (
            _SYMBOL.fullmatch(name) and all(isinstance(a.value, ast.Constant) for a in assumptions)
        ):
            return 1
        case (
            ast.BinOp(left=base, op=ast.Pow(), right=power)
            | ast.Call(func=ast.Name(id="Pow" | "PowByNatural" | "FloatPow"), args=[base, power], keywords=[])
        ):
            match power:
                case ast.Constant(value=int() | float() as times) if 0 <= times <= 16:
                    return min(max(2, _terms(base)) ** math.ceil(times), MOST_TERMS + 1)
        case ast.BinOp(left=left, op=ast.Mult() | ast.Div() | ast.FloorDiv() | ast.Mod(), right=right):
            return min(_terms(left) * _terms(right), MOST_TERMS + 1)
        case ast.Call(func=ast.Name(id="Mul"), args=arguments, keywords=[]):
            return min(math.prod(map(_terms, arguments)), MOST_TERMS + 1)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
            return _terms(left) + _terms(right)
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if _FUNCTION.fullmatch(name):
            return 1 + sum(map(_terms, arguments))
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() | ast.Not(), operand=operand):
            return _terms(operand)
        case ast.Compare(left=left, comparators=others):
            return sum(map(_terms, [left, *others]))
    raise ValueError(f"{type(node).__name__} is not arithmetic")


def _is_tree(text: str) -> bool:
    """A signature of tuples, lists and dictionaries, as JSON."""

    def plain(node: Any) -> bool:
        return (
            isinstance(node, dict)
            and node.get("type") in (None, "builtins.tuple", "builtins.list", "builtins.dict")
            and node.get("context") in (None, "null", "[]")
            and all(plain(child) for child in node.get("children_spec", []))
        )

    try:
        version, tree = json.loads(text)
        return version == 1 and plain(tree)
    except (ValueError, TypeError, RecursionError):
        return False
