"""Which other files an ONNX model reads: enough of the protobuf wire format to follow tensors to their external data.

Two readers that disagree on a file let weights escape the fingerprint. Protobuf cuts the tag of a field to 32 bits and takes
numbers with needless bytes, so here both are refused: what writes a model, writes each tag and length in its shortest form.
"""

from __future__ import annotations

from collections.abc import Iterator

# Which fields of a message hold messages that may hold tensors, by the numbers in onnx.proto.
_INSIDE = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {13: "entry"},
}


def external_files(content: bytes) -> list[str]:
    """Names of the external data files of a model, sorted; ValueError where it is not protobuf.

    Example:
        >>> external_files(b"")
        []
    """
    found: set[str] = set()
    todo: list[tuple[str, memoryview]] = [("model", memoryview(content))]
    while todo:
        kind, message = todo.pop()
        if kind == "entry":
            key, value = (dict(_fields(message)).get(number, memoryview(b"")) for number in (1, 2))
            if bytes(key) == b"location":
                found.add(bytes(value).decode())
            continue
        inside = _INSIDE[kind]
        todo += [(inside[number], part) for number, part in _fields(message) if number in inside]
    return sorted(found)


def _fields(message: memoryview) -> Iterator[tuple[int, memoryview]]:
    """The length-delimited fields of one message: (number, content)."""
    at = 0
    while at < len(message):
        tag, at = _short(message, at)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            _, at = _varint(message, at)
        elif wire in (1, 5):
            at += 8 if wire == 1 else 4
        elif wire == 2:
            size, at = _short(message, at)
            if at + size > len(message):
                raise ValueError("a field is longer than its message")
            yield number, message[at : at + size]
            at += size
        else:
            raise ValueError(f"no such wire type: {wire}")
    if at > len(message):
        raise ValueError("the last field is cut short")


def _short(message: memoryview, at: int) -> tuple[int, int]:
    """A tag or a length: 32 bits, in as few bytes as they take."""
    value, end = _varint(message, at)
    if value >= 1 << 32 or end - at != max(1, -(-value.bit_length() // 7)):
        raise ValueError("a tag or a length is written in an unusual form; save the model again with onnx")
    return value, end


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            raise ValueError("a number is cut short")
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("a number is too long")
