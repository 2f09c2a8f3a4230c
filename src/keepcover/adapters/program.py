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
import re
import zipfile
from typing import Any

from keepcover.errors import InputError

_PROGRAM = "models/model.json"
_SAMPLES = "data/sample_inputs/model.pt"
_PAYLOADS = ("data/weights/model_weights_config.json", "data/constants/model_constants_config.json")
_COPIED = re.compile(
    r"archive_format|archive_version|byteorder|\.data/\w+|data/(weights|constants)/(weight|tensor)_\d+"
)
_IGNORED = re.compile(r"extra/.*")

_OPERATOR = re.compile(
    r"torch\.ops\.(aten|prims)\.\w+\.\w+|torch\.sym_\w+|math\.\w+|"
    r"_operator\.(getitem|add|sub|mul|floordiv|truediv|mod|pow|neg|eq|ne|lt|le|gt|ge|and_|or_|not_)"
)
_FILES = re.compile(r"torch\.ops\.aten\.(from_file|save)\.\w+")  # operators that touch the disk
_NAME = re.compile(r"[\w.]*")
_VERSION = re.compile(r"[\w.+-]*")
_SYMBOL = re.compile(r"[a-z_]*[a-z]\d+")
_FUNCTION = re.compile(
    r"FloorDiv|CeilDiv|CleanDiv|IntTrueDiv|FloatTrueDiv|PythonMod|Mod|ModularIndexing|PowByNatural|FloatPow|Max|Min|Eq|Ne|"
    r"CeilToInt|FloorToInt|TruncToInt|RoundToInt|TruncToFloat|ToFloat|Identity|Where|floor|ceiling|Add|Mul|Pow|Integer"
)


def checked_copy(content: bytes, name: str) -> bytes:
    """The archive without pickles, compiled code, guards and metadata; InputError if the program needs any of them."""
    try:
        records = _records(content, name)
        config = json.loads(records[_PROGRAM])
        payloads = {record: json.loads(records[record]) for record in _PAYLOADS}
    except (zipfile.BadZipFile, KeyError, ValueError, EOFError, NotImplementedError, OSError) as error:
        if isinstance(error, InputError):
            raise
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise InputError(f"{name} is not a program saved by torch.export.save ({reason})") from None
    for payload in payloads.values():
        _check_payload(payload, name)
    config["guards_code"] = []
    _check(_without_metadata(config), "", name)
    with io.BytesIO() as buffer:
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as copy:
            for record, data in records.items():
                copy.writestr(f"archive/{record}", json.dumps(config).encode() if record == _PROGRAM else data)
            copy.writestr(f"archive/{_SAMPLES}", b"")
        return buffer.getvalue()


def _records(content: bytes, name: str) -> dict[str, bytes]:
    """What is copied, by its name inside the archive's one folder."""
    records: dict[str, bytes] = {}
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
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
            records[record] = archive.read(info)
    return records


def _check_payload(payload: Any, name: str) -> None:
    for tensor, meta in payload["config"].items():
        if meta.get("use_pickle") or not _COPIED.fullmatch(f"data/weights/{meta.get('path_name')}"):
            raise InputError(f"{name}: {tensor!r} is stored as a pickle, which is never opened; make it a plain tensor")
    _check(payload, "", name)


def _without_metadata(value: Any) -> Any:
    """Stack traces and the like: free text that nothing needs."""
    if isinstance(value, dict):
        for key, inner in value.items():
            value[key] = {} if key == "metadata" else _without_metadata(inner)
    elif isinstance(value, list):
        value[:] = [_without_metadata(inner) for inner in value]
    return value


def _check(value: Any, key: str, name: str) -> None:
    """Every string of the program is of a kind that cannot be code."""
    if isinstance(value, dict):
        for inner_key, inner in value.items():
            if not _NAME.fullmatch(inner_key):
                raise InputError(f"{name}: {inner_key!r} is not a name; export the program again")
            _check(inner, inner_key, name)
    elif isinstance(value, list):
        for inner in value:
            _check(inner, key, name)
    elif isinstance(value, str):
        _check_text(value, key, name)


def _check_text(text: str, key: str, name: str) -> None:
    if key in ("target", "as_operator"):
        if not _OPERATOR.fullmatch(text) or _FILES.fullmatch(text):
            raise InputError(
                f"{name} calls {text!r}; keepcover runs ATen operators only. Give package.module:function, a function of "
                "your own that loads the program"
            )
    elif key == "expr_str":
        if not _is_arithmetic(text):
            raise InputError(f"{name}: the size expression {text!r} is not arithmetic; export the program again")
    elif key in ("in_spec", "out_spec"):
        if not _is_tree(text):
            raise InputError(f"{name}: expected a program of one tensor in, one tensor out; its signature is {text!r}")
    elif key in ("as_string", "as_strings"):
        pass  # an argument such as the mode of an interpolation: handed over as it is, never compiled
    elif not (_VERSION if key == "torch_version" else _NAME).fullmatch(text):
        raise InputError(f"{name}: {text!r} ({key}) is not a name; export the program again")


def _is_arithmetic(text: str) -> bool:
    """Numbers, symbols and known functions, joined by arithmetic and comparison.

    Example:
        >>> _is_arithmetic("4*Max(1, s0)"), _is_arithmetic("Symbol('s0', positive=True, integer=True)")
        (True, True)
        >>> _is_arithmetic("__import__('os')"), _is_arithmetic("s0.real"), _is_arithmetic("Symbol('a b')")
        (False, False, False)
    """
    try:
        return _is_number(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _is_number(node: ast.expr) -> bool:
    match node:
        case ast.Constant(value=bool() | int() | float()):
            return True
        case ast.Name(id=name):
            return _SYMBOL.fullmatch(name) is not None
        case ast.Call(func=ast.Name(id="Symbol"), args=[ast.Constant(value=str(name))], keywords=assumptions):
            return _SYMBOL.fullmatch(name) is not None and all(isinstance(a.value, ast.Constant) for a in assumptions)
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            return _FUNCTION.fullmatch(name) is not None and all(map(_is_number, arguments))
        case ast.BinOp(left=left, right=right):
            return _is_number(left) and _is_number(right)
        case ast.UnaryOp(operand=operand):
            return _is_number(operand)
        case ast.Compare(left=left, comparators=others):
            return all(map(_is_number, [left, *others]))
        case _:
            return False


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
