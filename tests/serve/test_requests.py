"""What clients send wrong is refused with a message that helps: JSON, forms, image files."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
import subprocess
import sys
import time
import zlib
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile, ImageOps
from torch import Tensor

from keepcover.engine.smoother import Smoother
from keepcover.prediction.calibration import calibrate
from keepcover.prediction.predictor import Predictor
from keepcover.serve import Settings, create_app
from keepcover.serve.reading import decode
from keepcover.web.requests import Problem

from .client import IMAGES, ask, client, refused
from .serving import ROOT, file_of, make_predictor

patient = settings(deadline=None, derandomize=True, max_examples=60)


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return make_predictor(alpha=(0.1, 0.2), epsilon=(0.1, 0.05))


# -- requests that are refused -----------------------------------------------------------------------------------------


def body_with(pixel: str) -> bytes:
    return json.dumps({"images": IMAGES[:2].tolist()}).replace("0.0", pixel, 1).encode()


NESTED = IMAGES[:1].tolist()
BAD: dict[str, tuple[bytes, int, str, str]] = {
    "empty": (b"", 400, "bad_request", "expected JSON: EOF"),
    "no JSON": (b"{images: 1}", 400, "bad_request", "expected JSON"),
    "half": (body_with("0.0")[:-9], 400, "bad_request", "expected JSON: EOF"),
    "not UTF-8": (b'{"images": "\xff"}', 400, "bad_request", "expected JSON"),
    "deep": (b'{"images": ' + b"[" * 100_000, 422, "invalid", "which take 19 lists at most, got 100000"),
    "long integer": (body_with("1" * 5000), 400, "bad_request", "number out of range"),
    "no object": (b"[]", 422, "invalid", "the body"),
    "no images": (b"{}", 422, "invalid", "expected the field images: a list of images of shape 1 x 4 x 4"),
    "zero images": (b'{"images": []}', 422, "invalid", "expected 1 to 3 images in one request, got 0"),
    "many images": (json.dumps({"images": NESTED * 4}).encode(), 422, "invalid", "1 to 3 images in one request, got 4"),
    "one image unbatched": (json.dumps({"images": NESTED[0]}).encode(), 422, "invalid", "shape 1 x 4 x 4"),
    "text": (b'{"images": "abc"}', 422, "invalid", "images is 'abc', not a list"),
    "wide": (
        json.dumps({"images": [[[[0.0] * 5] * 4]]}).encode(),
        422,
        "invalid",
        "images[0][0][0] has 5 entries, not 4",
    ),
    "low": (json.dumps({"images": [[[[0.0] * 4] * 3]]}).encode(), 422, "invalid", "images[0][0] has 3 entries, not 4"),
    "NaN": (body_with("NaN"), 422, "invalid", "expected a finite number at images[0][0][0][0], got nan"),
    "infinity": (body_with("Infinity"), 422, "invalid", "expected a finite number at images[0][0][0][0], got inf"),
    "overflow": (body_with("1e999"), 422, "invalid", "expected a finite number at images[0][0][0][0], got inf"),
    "null": (body_with("null"), 422, "invalid", "expected a finite number at images[0][0][0][0], got None"),
    "bool": (body_with("true"), 422, "invalid", "expected a finite number at images[0][0][0][0], got True"),
    "string": (body_with('"0.5"'), 422, "invalid", "expected a finite number at images[0][0][0][0], got '0.5'"),
    "bytes": (body_with("255"), 422, "invalid", "pixels in [0, 1], got 255 at images[0][0][0][0]; divide 0-255 by 255"),
    "negative": (body_with("-0.001"), 422, "invalid", "expected pixels in [0, 1], got -0.001 at images[0][0][0][0]"),
    "alpha as text": (
        body_with("0.0")[:-1] + b', "alpha": "0.1"}',
        422,
        "invalid",
        "finite number at alpha, got '0.1'",
    ),
    "alpha NaN": (body_with("0.0")[:-1] + b', "alpha": NaN}', 422, "invalid", "calibrated for"),
    "unknown": (
        body_with("0.0")[:-1] + b', "draws": 9}',
        422,
        "invalid",
        "unknown field 'draws'; the fields are images",
    ),
    "unknown and long": (b'{"%s": 1}' % (b"x" * 2**22), 422, "invalid", "unknown field 'xxxxxxxxxxxx..."),
    "unknown and escaped": (
        body_with("0.0")[:-1] + b', "%s": 1}' % (rb"\u001b" * 1000),
        422,
        "invalid",
        r"unknown field '\x1b\x1b\x1b",
    ),
    "twice": (
        body_with("0.0")[:-1] + b', "alpha": 0.1, "alpha": 0.2}',
        422,
        "invalid",
        "the field alpha once, got it again",
    ),
    "long text": (b'{"images": "%s"}' % (b"x" * 2**22), 422, "invalid", "images is 'xxxxxxx"),
    "texts": (b'{"images": [%s 0]}' % (b'"", ' * 30), 422, "invalid", "6 quotation marks at most, got 62"),
    "objects": (b'{"images": %s' % (b"{" * 100), 422, "invalid", "1 objects at most, got 101"),
    "numbers": (b'{"images": [%s 0]}' % (b"0," * 200), 422, "invalid", "which take 50 commas at most, got 200"),
}


@pytest.mark.parametrize("case", list(BAD))
def test_bad_json_is_refused_with_a_useful_message(predictor: Predictor, case: str) -> None:
    body, status, code, match = BAD[case]
    headers = {"content-type": "application/json"}
    app = create_app(predictor, Settings(max_images=3))
    message = refused(ask(app, "POST", "/v1/predict", content=body, headers=headers), status, code, match)
    assert len(message) < 400
    assert app.state.service.metrics.own("accepted_total") == 0


def test_a_body_of_unknown_names_costs_no_more_than_a_look(predictor: Predictor) -> None:
    """Eight MiB of names, of one name, of texts and of empty lists: each is refused before the parser builds any of it."""
    app = create_app(predictor)
    names = b",".join(b'"%x":0' % k for k in range(750_000))
    texts, lists = b",".join([b'""'] * 2_500_000), b",".join([b"[]"] * 2_500_000)
    again = b",".join([b'"alpha":0'] * 750_000)
    bodies = (b"{%s}" % names, b'{"images":[%s]}' % texts, b'{"images":[%s]}' % lists, b"{%s}" % again)
    parsed: list[bytes] = []
    app.state.service.reader.model.model_validate_json = lambda body: parsed.append(body)

    async def all_of_them() -> float:
        async with client(app) as inner:
            begin = time.perf_counter()
            for body in bodies:
                assert 2**22 < len(body) < 2**23
                headers = {"content-type": "application/json"}
                message = refused(await inner.post("/v1/predict", content=body, headers=headers), 422, "invalid")
                assert len(message) < 200
            return time.perf_counter() - begin

    assert asyncio.run(all_of_them()) < 2  # the first alone took 7 s where each name became an error of its own
    assert parsed == []


def test_pixels_on_the_border_are_fine(predictor: Predictor) -> None:
    body = {"images": [[[[0, 1, -0.0, 1.0]] * 4]]}
    assert ask(create_app(predictor), "POST", "/v1/predict", json=body).status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/octet-stream", "application/x-www-form-urlencoded", None])
def test_other_content_types_are_refused(predictor: Predictor, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    response = ask(create_app(predictor), "POST", "/v1/predict", content=b"x", headers=headers)
    refused(response, 415, "unsupported_media_type", f"or multipart/form-data with image files, got {kind or 'none'}")


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nowhere", 404), ("GET", "/v1/predict", 405)])
def test_other_routes_and_methods_are_refused_alike(predictor: Predictor, method: str, path: str, status: int) -> None:
    response = ask(create_app(predictor), method, path)
    refused(response, status, {404: "not_found", 405: "method_not_allowed"}[status])
    assert status == 404 or response.headers["allow"] == "POST"


def test_a_failure_of_the_model_is_a_plain_500_and_leaves_its_neighbours_alone(
    predictor: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = Predictor.predict

    def picky(predictor: Predictor, images: Tensor, **options: Any) -> Any:
        if (images.flatten(1).sum(1) == 0).any():
            raise RuntimeError("secret internals")
        return inner(predictor, images, **options)

    monkeypatch.setattr(Predictor, "predict", picky)
    app = create_app(predictor, Settings(batch_wait=0.2, max_batch=7))

    async def three() -> list[httpx.Response]:
        async with client(app) as inner:
            bodies = [{"images": images.tolist()} for images in (IMAGES, 0 * IMAGES[:1], IMAGES[:1])]
            return await asyncio.gather(*(inner.post("/v1/predict", json=body) for body in bodies))

    one, two, three_ = asyncio.run(three())
    assert (one.status_code, three_.status_code) == (200, 200)
    refused(two, 500, "internal")
    assert "secret" not in two.text


# -- image files -------------------------------------------------------------------------------------------------------


GREY = np.arange(0, 256, 16, dtype=np.uint8).reshape(4, 4)
COLOUR = np.random.default_rng(0).integers(0, 256, (6, 5, 3), dtype=np.uint8)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *chunks: bytes, depth: int = 8, colour: int = 0) -> bytes:
    """A PNG by hand, true or not."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + b"".join(chunks) + chunk(b"IEND", b"")


def test_files_are_their_pixels_divided_by_255(predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    inner = Predictor.predict
    monkeypatch.setattr(
        Predictor, "predict", lambda own, images, **o: (seen.append(images), inner(own, images, **o))[1]
    )
    other = np.flipud(GREY).copy()
    files = [("images", ("a.png", file_of(GREY))), ("images", ("b", file_of(other, optimize=True)))]
    response = ask(create_app(predictor), "POST", "/v1/predict", files=files, data={"alpha": "0.2", "epsilon": "0.05"})
    assert response.status_code == 200
    assert (response.json()["alpha"], response.json()["epsilon"]) == (0.2, 0.05)
    expected = torch.from_numpy(np.stack([GREY, other])[:, None].astype(np.float32) / np.float32(255))
    assert torch.equal(seen[0], expected)


def test_modes_that_need_no_choice_are_converted() -> None:
    rgb = decode(file_of(COLOUR), (3, 6, 5), "f")
    assert np.array_equal(rgb, COLOUR.transpose(2, 0, 1).astype(np.float32) / np.float32(255))
    assert np.array_equal(decode(file_of(GREY), (3, 4, 4), "f"), np.repeat(decode(file_of(GREY), (1, 4, 4), "f"), 3, 0))
    palette = Image.fromarray(COLOUR).quantize(16)
    assert np.array_equal(
        decode(file_of(palette), (3, 6, 5), "f"), decode(file_of(palette.convert("RGB")), (3, 6, 5), "f")
    )
    assert decode(file_of(Image.new("1", (4, 4), 1)), (1, 4, 4), "f").tolist() == np.ones((1, 4, 4)).tolist()
    assert decode(file_of(Image.new("RGBA", (4, 4), (0, 51, 255, 102))), (4, 4, 4), "f")[
        :, 0, 0
    ].tolist() == pytest.approx([0, 0.2, 1, 0.4])
    assert np.array_equal(decode(file_of(COLOUR, "WEBP", lossless=True), (3, 6, 5), "f"), rgb)
    jpeg = decode(file_of(GREY, "JPEG", quality=95), (1, 4, 4), "f")
    assert np.abs(jpeg - GREY / 255).max() < 0.1


def animation(kind: str) -> bytes:
    frames = [Image.fromarray(GREY), Image.fromarray(np.flipud(GREY).copy())]
    return file_of(frames[0], kind, save_all=True, append_images=frames[1:], duration=100)


PIXELS = chunk(b"IDAT", zlib.compress(b"".join(b"\0" + bytes(row) for row in GREY)))
FILES: dict[str, tuple[bytes, str]] = {
    "text": (b"not an image", "images[0]: not a readable image"),
    "empty": (b"", "not a readable image"),
    "another size": (file_of(COLOUR), "expected an image 4 wide and 4 high, got 5 x 6; resize it as the calibration"),
    "colour": (file_of(np.zeros((4, 4, 3), np.uint8)), "expected greyscale with 8 bits per channel, got mode RGB"),
    "alpha": (file_of(Image.new("LA", (4, 4))), "got mode LA"),
    "transparent": (file_of(Image.fromarray(GREY), transparency=3), "got mode L with transparency"),
    "sixteen bits": (file_of(GREY.astype(np.uint16)), "got mode I;16"),
    "animated png": (animation("PNG"), "expected one image, got an animation of 2 frames"),
    "animated webp": (animation("WEBP"), "expected one image, got an animation of 2 frames"),
    "gif": (file_of(GREY, "GIF"), "not a readable image"),
    "tiff": (file_of(GREY, "TIFF"), "not a readable image"),
    "truncated": (file_of(np.random.default_rng(0).integers(0, 256, (4, 4), np.uint8))[:-30], "not a readable image"),
    "truncated jpeg": (file_of(GREY, "JPEG")[:150], "not a readable image"),
    "no pixels": (png(4, 4), "not a readable image"),
    "bad checksum": (png(4, 4, PIXELS).replace(PIXELS[8:-4], bytes(len(PIXELS) - 12)), "not a readable image"),
    "bomb by header": (png(50_000, 50_000, PIXELS), "far more pixels than are read here"),
    "large by header": (png(9_000, 9_000, PIXELS), "expected an image 4 wide and 4 high, got 9000 x 9000"),
    "bomb of text": (
        png(4, 4, chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(2**27), 9)), PIXELS),
        "not a readable image",
    ),
    "bomb of pixels": (png(4, 4, chunk(b"IDAT", zlib.compress(bytes(2**27), 9))), ""),
}


@pytest.mark.parametrize("case", list(FILES))
def test_bad_files_are_refused_cleanly(predictor: Predictor, case: str) -> None:
    content, match = FILES[case]
    begin = time.perf_counter()
    response = ask(create_app(predictor), "POST", "/v1/predict", files={"images": content})
    assert time.perf_counter() - begin < 5
    if match:
        refused(response, 422, "invalid", match)
    else:  # 128 MiB of zeros behind a 4 x 4 header: the decoder stops after the sixteen pixels it needs
        assert response.status_code in (200, 422)


def scans(width: int, height: int, count: int) -> bytes:
    """A progressive JPEG whose last scan is there again and again; each is a pass over all pixels."""
    content = file_of(Image.new("L", (width, height), 128), "JPEG", progressive=True)
    at = content.rfind(b"\xff\xda")
    return content[:at] + content[at:-2] * (count + 1 - content.count(b"\xff\xda")) + b"\xff\xd9"


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (scans(4, 4, 65), "expected at most 64 scans"),
        (scans(4096, 4096, 17), "16777216 pixels in 17 scans are more work than the 268435456 pixels"),
        (png(4, 4, *[chunk(b"iCCP", b"k\0\0" + zlib.compress(bytes(2**20), 9))] * 257, PIXELS), "256 compressed texts"),
        (png(4, 4, *[chunk(b"tEXt", b"k\0v")] * 9000, PIXELS), "not a readable image"),
        (b"\xff\xd8" + b"\xff\xfe\0\2" * 9000 + file_of(GREY, "JPEG")[2:], "not a readable image"),
        (b"\xff\xd8\xff\xfe\0\2" + b"\0" * 9000 + file_of(GREY, "JPEG")[2:], "not a readable image"),
    ],
    ids=["scans", "scans of many pixels", "compressed chunks", "chunks", "segments", "junk"],
)
def test_files_that_are_small_and_slow_are_not_decoded(
    content: bytes, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[object] = []
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda image: loaded.append(image))
    with pytest.raises(Problem, match=match):
        decode(content, (1, 4, 4), "f", "stretch")
    assert loaded == []


def test_usual_progressive_files_and_thumbnails_are_read() -> None:
    assert decode(scans(4096, 4096, 16), (1, 4, 4), "f", "stretch").shape == (1, 4, 4)
    assert decode(scans(4, 4, 64), (1, 4, 4), "f").shape == (1, 4, 4)
    inside = file_of(GREY, "JPEG")
    exif = b"Exif\0\0" + inside
    file = inside[:2] + b"\xff\xe1" + struct.pack(">H", 2 + len(exif)) + exif + inside[2:]
    assert np.array_equal(decode(file, (1, 4, 4), "f"), decode(inside, (1, 4, 4), "f"))


def test_the_files_of_one_request_share_its_work(predictor: Predictor) -> None:
    settings = Settings(resize="stretch", max_pixels=2**12)  # 2**16 pixels in all
    files = [("images", scans(64, 64, 10))] * 2
    refused(
        ask(create_app(predictor, settings), "POST", "/v1/predict", files=files),
        422,
        "invalid",
        "send fewer or smaller",
    )
    assert ask(create_app(predictor, settings), "POST", "/v1/predict", files=files[:1]).status_code == 200
    small = [("images", scans(4, 4, 16))] * 32
    assert ask(create_app(predictor, settings), "POST", "/v1/predict", files=small).status_code == 200


def test_metadata_fills_no_log(recwarn: pytest.WarningsRecorder) -> None:
    """A directory of a thousand broken tags is a thousand warnings where it is parsed."""
    tags = b"".join(struct.pack("<HHII", 1 + k, 7, 2**20, 8) for k in range(1000))
    exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 1000) + tags
    plain = file_of(GREY, "JPEG").replace(b"JFIF", b"JFIX")
    file = plain[:2] + b"\xff\xe1" + struct.pack(">H", 2 + len(exif)) + exif + plain[2:]
    assert decode(file, (1, 4, 4), "f").shape == (1, 4, 4)
    assert len(recwarn) == 0


def test_a_bomb_costs_no_memory() -> None:
    """In a process of its own: the peak of all bombs together stays near where it was."""
    code = (
        "import resource, sys, warnings; from keepcover.serve.reading import decode\n"
        "from keepcover.web.requests import Problem\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024\n"
        "warnings.simplefilter('ignore')\n"
        "contents = [bytes.fromhex(line.strip()) for line in sys.stdin]; before = peak()\n"
        "for content in contents:\n"
        "    for resize in ('refuse', 'stretch', 'crop'):\n"
        "        try: decode(content, (1, 4, 4), 'f', resize, 2**24)\n"
        "        except Problem: pass\n"
        "print(peak() - before)\n"
    )
    bombs = [FILES[name][0] for name in ("bomb by header", "large by header", "bomb of text", "bomb of pixels")]
    source = ROOT / "src"
    done = subprocess.run(
        [sys.executable, "-c", code],
        input="\n".join(bomb.hex() for bomb in bombs),
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"},
        timeout=120,
        check=True,
    )
    assert float(done.stdout) < 60


def test_resizing_is_the_operators_choice() -> None:
    size, bilinear = (4, 4), Image.Resampling.BILINEAR
    content, image = file_of(COLOUR), Image.fromarray(COLOUR)
    stretched = np.asarray(image.resize(size, bilinear)).transpose(2, 0, 1) / np.float32(255)
    cropped = np.asarray(ImageOps.fit(image, size, bilinear)).transpose(2, 0, 1) / np.float32(255)
    assert np.array_equal(decode(content, (3, 4, 4), "f", "stretch"), stretched)
    assert np.array_equal(decode(content, (3, 4, 4), "f", "crop"), cropped)
    assert not np.array_equal(stretched, cropped)
    with pytest.raises(Problem, match="at most 29 pixels are resized"):
        decode(content, (3, 4, 4), "f", "crop", max_pixels=29)
    decode(content, (3, 4, 4), "f", "crop", max_pixels=30)


@given(st.sampled_from([n for n in FILES if "bomb" not in n]), st.data())
@patient
def test_damaged_files_raise_nothing_but_refusals(case: str, data: st.DataObject) -> None:
    content = bytearray(FILES[case][0] or b"x")
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(Problem):
        assert decode(bytes(content), (1, 4, 4), "f", "stretch").shape == (1, 4, 4)


@pytest.mark.parametrize(
    ("change", "status", "code", "match"),
    [
        ({"data": {"alpha": "0.1"}, "files": {"other": b"x"}}, 422, "invalid", "unexpected form field 'other'"),
        ({"files": {"images": (None, "text")}}, 422, "invalid", "every part needs a filename"),
        ({"files": {"alpha": (None, "0.1")}}, 422, "invalid", "at least one file in the form field images"),
        (
            {"files": {"images": file_of(GREY)}, "data": {"alpha": "high"}},
            422,
            "invalid",
            "one number in the form field alpha",
        ),
        ({"files": {"images": file_of(GREY), "alpha": b"0.1"}}, 422, "invalid", "one number in the form field alpha"),
        ({"files": {"images": file_of(GREY)}, "data": {"alpha": ["0.1", "0.2"]}}, 422, "invalid", "one number"),
        ({"files": {"images": file_of(GREY)}, "data": {"alpha": "nan"}}, 422, "invalid", "calibrated for"),
        ({"files": {"images": file_of(GREY)}, "data": {"alpha": "0" * 2000}}, 400, "bad_request", "expected multipart"),
        ({"files": [("images", file_of(GREY))] * 4}, 400, "bad_request", "Too many files"),
        ({"content": b"junk", "headers": {"content-type": "multipart/form-data"}}, 400, "bad_request", "boundary"),
        ({"content": b"junk", "headers": {"content-type": "multipart/form-data; boundary=x"}}, 400, "bad_request", ""),
    ],
)
def test_bad_forms_are_refused(
    predictor: Predictor, change: dict[str, Any], status: int, code: str, match: str
) -> None:
    response = ask(create_app(predictor, Settings(max_images=3)), "POST", "/v1/predict", **change)
    refused(response, status, code, match)


@pytest.mark.parametrize("charset", ["punycode", "idna", "undefined", "hex", "no-such", "utf-7", "unicode_escape"])
def test_no_charset_of_a_form_is_a_failure(predictor: Predictor, charset: str) -> None:
    headers = {"content-type": f"multipart/form-data; boundary=x; charset={charset}"}
    app = create_app(predictor)
    for name in (b"xn--a", b"x-999999999", b"images", b"\xff", b"\\u"):
        part = b'--x\r\ncontent-disposition: form-data; name="%s"\r\n\r\n%s\r\n--x--\r\n' % (name, name)
        response = ask(app, "POST", "/v1/predict", content=part, headers=headers)
        assert response.status_code in (400, 422), response.text


def test_shapes_that_no_file_has_take_json_only() -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(6, 3)).eval()
    images = torch.rand(200, 6)
    labels = model(images).argmax(dim=1)
    predictor = calibrate(Smoother(model, 0.1, progress=False), (images, labels), epsilon=0.05, draws=2)
    app = create_app(predictor)
    assert ask(app, "POST", "/v1/predict", json={"images": images[:2].tolist()}).status_code == 200
    refused(ask(app, "POST", "/v1/predict", files={"images": b"x"}), 415, "unsupported_media_type")
    assert ask(app, "GET", "/v1/predictor").json()["image_files"] == []
    body = ask(app, "GET", "/openapi.json").json()["paths"]["/v1/predict"]["post"]["requestBody"]
    assert list(body["content"]) == ["application/json"]
