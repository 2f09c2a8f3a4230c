"""Downloads against a server on this machine: resumed, checked, atomic; and the command that runs them."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

import pytest

from keepcover import cli
from keepcover.data import idx, known
from keepcover.data.download import complete_forms, download, inventory
from keepcover.data.known import File
from keepcover.errors import InputError
from tests.data.test_datasets import write_idx

CONTENT = random.Random(0).randbytes(700_001)
NAME = "cifar-10-binary.tar.gz"


class Server(ThreadingHTTPServer):
    """Files from memory, with the faults that servers have."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {NAME: CONTENT}
        self.ranges = True  # honour Range
        self.shift = 0  # send another range than asked for
        self.cut: int | None = None  # drop every connection after so many bytes
        self.go_on = threading.Event()  # a stalled connection continues when set
        self.stall: int | None = None  # after so many bytes
        self.log: list[tuple[str, str | None]] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        self.server.log.append((self.path, asked))
        if self.path.startswith("/moved/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/moved"))
            self.end_headers()
            return
        content = self.server.files.get(self.path[1:])
        if content is None:
            self.send_error(404)
            return
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and self.server.ranges else 0
        if start >= len(content) > 0:
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        if start:
            start += self.server.shift
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        body = content[start:]
        try:
            if self.server.stall is not None:
                self.wfile.write(body[: self.server.stall])
                self.wfile.flush()
                self.server.go_on.wait(20)
                body = body[self.server.stall :]
            self.wfile.write(body[: self.server.cut])
        except OSError:
            pass  # the other side is gone, which some tests are about
        self.close_connection = True


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server that counts as the official one, for a small archive of CIFAR-10."""
    monkeypatch.setenv("no_proxy", "*")
    server = Server()
    file = File(NAME, hashlib.md5(CONTENT).hexdigest(), len(CONTENT))
    source = replace(known.SOURCES["cifar10"]["binary"], address=server.address, files=(file,))
    monkeypatch.setitem(known.SOURCES["cifar10"], "binary", source)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.go_on.set()
    server.shutdown()
    server.server_close()
    thread.join()


def asked(server: Server) -> list[str | None]:
    return [given for _, given in server.log]


# -- whole and resumed -------------------------------------------------------------------------------------------------


def test_a_whole_download(server: Server, tmp_path: Path) -> None:
    reports: list[tuple[int, int]] = []
    paths = download("cifar10", tmp_path / "new" / "folder", progress=lambda done, total: reports.append((done, total)))
    assert paths == [tmp_path / "new" / "folder" / NAME]
    assert paths[0].read_bytes() == CONTENT
    assert list(paths[0].parent.iterdir()) == paths
    assert reports[-1] == (len(CONTENT), len(CONTENT))
    assert all(a < b for (a, _), (b, _) in pairwise(reports))
    assert download("cifar10", tmp_path / "new" / "folder", progress=False) == paths
    assert asked(server) == [None]  # what is there and right is not asked for again


@pytest.mark.parametrize("have", [1, 350_000, len(CONTENT) - 1])
def test_an_unfinished_download_continues(server: Server, have: int, tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.part").write_bytes(CONTENT[:have])
    (path,) = download("cifar10", tmp_path, progress=False)
    assert path.read_bytes() == CONTENT
    assert asked(server) == [f"bytes={have}-"]
    assert list(tmp_path.iterdir()) == [path]


def test_a_complete_part_needs_no_connection(server: Server, tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.part").write_bytes(CONTENT)
    assert download("cifar10", tmp_path, progress=False)[0].read_bytes() == CONTENT
    assert server.log == []


def test_dropped_connections_are_taken_up_again(server: Server, tmp_path: Path) -> None:
    server.cut = 200_000
    assert download("cifar10", tmp_path, progress=False)[0].read_bytes() == CONTENT
    assert asked(server) == [None, "bytes=200000-", "bytes=400000-", "bytes=600000-"]


def test_a_connection_that_brings_nothing_ends_it(server: Server, tmp_path: Path) -> None:
    server.cut = 0
    (tmp_path / f"{NAME}.part").write_bytes(CONTENT[:5000])
    with pytest.raises(
        InputError, match=r"ended after 5000 of 700001 bytes; they are kept in .*\.part, and the same command"
    ):
        download("cifar10", tmp_path, progress=False)
    assert (tmp_path / f"{NAME}.part").read_bytes() == CONTENT[:5000]
    assert len(server.log) == 1


def test_killed_halfway_and_resumed(server: Server, tmp_path: Path) -> None:
    """kill -9 in the middle: no file under its own name, and the second run asks only for the rest."""
    server.stall = 400_000
    code = (
        "import sys; from dataclasses import replace; from keepcover.data import known, download\n"
        "source = known.SOURCES['cifar10']['binary']; file = known.File(sys.argv[2], sys.argv[3], int(sys.argv[4]))\n"
        "known.SOURCES['cifar10']['binary'] = replace(source, address=sys.argv[1], files=(file,))\n"
        "download('cifar10', sys.argv[5], progress=False)"
    )
    arguments = [server.address, NAME, hashlib.md5(CONTENT).hexdigest(), str(len(CONTENT)), str(tmp_path)]
    process = subprocess.Popen([sys.executable, "-c", code, *arguments])
    part, until = tmp_path / f"{NAME}.part", time.monotonic() + 60
    while not (part.exists() and part.stat().st_size >= 200_000) and time.monotonic() < until:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(20) == -signal.SIGKILL
    kept = part.stat().st_size
    assert list(tmp_path.iterdir()) == [part]
    assert part.read_bytes() == CONTENT[:kept]
    assert kept >= 200_000
    server.go_on.set()
    server.stall = None
    assert download("cifar10", tmp_path, progress=False)[0].read_bytes() == CONTENT
    assert asked(server) == [None, f"bytes={kept}-"]
    assert list(tmp_path.iterdir()) == [tmp_path / NAME]


def test_a_server_that_falls_silent(server: Server, tmp_path: Path) -> None:
    """The connection times out, what came is kept, and the next one continues."""
    server.stall = 300_000

    def later(done: int, total: int) -> None:
        server.stall = None

    assert download("cifar10", tmp_path, timeout=0.5, progress=later)[0].read_bytes() == CONTENT
    first, second = asked(server)
    assert first is None
    assert second is not None
    assert 0 < int(second.removeprefix("bytes=").rstrip("-")) <= 300_000


# -- servers and files that are not as they should be ------------------------------------------------------------------


def test_a_server_without_ranges_starts_over(server: Server, tmp_path: Path) -> None:
    server.ranges = False
    (tmp_path / f"{NAME}.part").write_bytes(CONTENT[:300_000])
    assert download("cifar10", tmp_path, progress=False)[0].read_bytes() == CONTENT
    assert asked(server) == ["bytes=300000-"]


def test_a_server_that_sends_another_range_is_asked_for_all(server: Server, tmp_path: Path) -> None:
    server.shift = 7
    (tmp_path / f"{NAME}.part").write_bytes(CONTENT[:300_000])
    assert download("cifar10", tmp_path, progress=False)[0].read_bytes() == CONTENT
    assert asked(server) == ["bytes=300000-", None]


def test_a_range_beyond_the_servers_file(server: Server, tmp_path: Path) -> None:
    server.files[NAME] = CONTENT[:1000]
    (tmp_path / f"{NAME}.part").write_bytes(CONTENT[:300_000])
    with pytest.raises(InputError, match="ended after 1000 of 700001 bytes"):
        download("cifar10", tmp_path, progress=False)


def test_ranges_survive_a_redirect(server: Server, tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.part").write_bytes(CONTENT[:300_000])
    (path,) = download("cifar10", tmp_path, mirror=server.address + "moved", progress=False)
    assert path.read_bytes() == CONTENT
    assert server.log == [(f"/moved/{NAME}", "bytes=300000-"), (f"/{NAME}", "bytes=300000-")]


def test_a_wrong_checksum_leaves_nothing_behind(server: Server, tmp_path: Path) -> None:
    server.files[NAME] = CONTENT[:-1] + b"\x00"
    with pytest.raises(InputError, match=r"gave a file with the MD5 sum .*, the official one has .* it was deleted"):
        download("cifar10", tmp_path, progress=False)
    assert list(tmp_path.iterdir()) == []


def test_a_beginning_of_another_file_is_noticed_and_replaced(server: Server, tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.part").write_bytes(bytes(300_000))
    assert download("cifar10", tmp_path, progress=False)[0].read_bytes() == CONTENT
    assert asked(server) == ["bytes=300000-", None]


@pytest.mark.parametrize("have", [0, 300_000])
def test_no_more_is_taken_than_the_official_file_has(server: Server, have: int, tmp_path: Path) -> None:
    """The checksum says whether what came first is it."""
    server.files[NAME] = CONTENT + bytes(5_000_000)
    if have:
        (tmp_path / f"{NAME}.part").write_bytes(CONTENT[:have])
    assert download("cifar10", tmp_path, progress=False)[0].read_bytes() == CONTENT
    server.files[NAME] = bytes(5_000_000)
    with pytest.raises(InputError, match="gave a file with the MD5 sum"):
        download("cifar10", tmp_path / "other", progress=False)
    assert list((tmp_path / "other").iterdir()) == []


def test_a_part_that_is_too_long_is_dropped(server: Server, tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.part").write_bytes(CONTENT + b"more")
    assert download("cifar10", tmp_path, progress=False)[0].read_bytes() == CONTENT
    assert asked(server) == [None]


def test_a_damaged_file_is_replaced_only_by_a_good_one(server: Server, tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b"damaged")
    server.files[NAME] = b"x" * len(CONTENT)
    with pytest.raises(InputError, match="MD5"):
        download("cifar10", tmp_path, progress=False)
    assert (tmp_path / NAME).read_bytes() == b"damaged"
    server.files[NAME] = CONTENT
    assert download("cifar10", tmp_path, progress=False)[0].read_bytes() == CONTENT


def no_names(*_: object, **__: object) -> None:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def test_no_network_and_no_such_file(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.files = {}
    with pytest.raises(InputError, match=r"answered 404 Not Found; try another mirror"):
        download("cifar10", tmp_path, progress=False)
    closed = Server()
    address = closed.address
    closed.server_close()
    with pytest.raises(
        InputError, match=r"cannot reach http://127.* \(.*refused.*\)\. Where there is no network, .* put it at"
    ):
        download("cifar10", tmp_path, mirror=address, progress=False)
    with monkeypatch.context() as offline:
        offline.setattr(socket, "getaddrinfo", no_names)
        with pytest.raises(InputError, match=r"cannot reach http://mirror\.example/.* \(.*Name or service not known\)"):
            download("cifar10", tmp_path, mirror="http://mirror.example", progress=False)
    for address in ("file:///etc", "ftp://example.org", "/etc"):
        with pytest.raises(InputError, match="begins with http:// or https://"):
            download("cifar10", tmp_path, mirror=address, progress=False)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_disk_without_room_is_not_taken_for_a_lost_connection(server: Server, tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.part").symlink_to("/dev/full")
    with pytest.raises(InputError, match=r"cannot write .*\.part \(No space left on device\)"):
        download("cifar10", tmp_path, progress=False)
    assert len(server.log) == 1


def test_unknown_names_and_forms(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a dataset among cifar10, cifar100, mnist, fashion-mnist, got 'svhn'"):
        download("svhn", tmp_path)
    with pytest.raises(InputError, match="mnist comes in the form binary, not 'python'"):
        download("mnist", tmp_path, "python")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InputError, match="cannot create the folder"):
        download("cifar10", tmp_path / "file")


# -- several files -----------------------------------------------------------------------------------------------------


@pytest.fixture
def mnist(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The four files of a small MNIST."""
    write_idx(tmp_path / "origin", "mnist")
    source, files = known.SOURCES["mnist"]["binary"], []
    for file in source.files:
        content = (tmp_path / "origin" / file.name).read_bytes()
        server.files[file.name] = content
        inside = hashlib.md5(gzip.decompress(content)).hexdigest()
        files.append(File(file.name, hashlib.md5(content).hexdigest(), len(content), inside))
    monkeypatch.setitem(known.SOURCES["mnist"], "binary", replace(source, address=server.address, files=tuple(files)))
    return server


def test_what_is_downloaded_is_read(mnist: Server, tmp_path: Path) -> None:
    paths = download("mnist", tmp_path / "data", progress=False)
    assert [path.parent.name for path in paths] == ["mnist"] * 4
    assert len(idx("mnist", tmp_path / "data", "train")) == 5
    paths[2].unlink()
    download("mnist", tmp_path / "data", progress=False)
    assert [path for path, _ in mnist.log].count(f"/{paths[2].name}") == 2
    assert len(mnist.log) == 5


# -- the command -------------------------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    code = cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_command_lists_what_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "data", "--json")
    rows = json.loads(out)["datasets"]
    assert code == 0
    assert {(row["name"], row["form"]) for row in rows} == {
        ("cifar10", "binary"),
        ("cifar10", "python"),
        ("cifar100", "binary"),
        ("cifar100", "python"),
        ("mnist", "binary"),
        ("fashion-mnist", "binary"),
    }
    assert rows[0]["files"] == ["https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"]
    assert rows[0]["bytes"] == 170_052_171
    code, out, _ = run(capsys, "data")
    assert code == 0
    assert all(row["name"] in out for row in rows)


def test_the_command_downloads_and_checks(mnist: Server, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "data"
    assert run(capsys, "data", "mnist", "--out", folder, "--check")[:2] == (1, f"nothing of mnist in {folder}\n")
    assert mnist.log == []
    code, out, _ = run(capsys, "data", "mnist", "--out", folder, "--json")
    found = json.loads(out)
    assert (code, found["name"], found["complete"]) == (0, "mnist", ["binary"])
    assert [file["state"] for file in found["files"]] == ["verified"] * 4
    assert [file["bytes"] for file in found["files"]] == [Path(file["path"]).stat().st_size for file in found["files"]]
    code, out, _ = run(capsys, "data", "mnist", "--out", folder, "--check")
    assert (code, out.count("verified")) == (0, 4)
    labels = folder / "mnist" / "t10k-labels-idx1-ubyte.gz"
    labels.rename(f"{labels}.part")
    code, out, _ = run(capsys, "data", "mnist", "--out", folder, "--check")
    assert (code, out.count("verified"), out.count("unfinished")) == (1, 3, 1)
    (folder / "mnist" / "train-labels-idx1-ubyte.gz").write_bytes(b"damaged")
    code, out, _ = run(capsys, "data", "mnist", "--out", folder, "--check", "--json")
    assert (code, json.loads(out)["complete"]) == (1, [])
    assert [file["state"] for file in json.loads(out)["files"]] == ["verified", "damaged", "verified", "unfinished"]
    assert len(mnist.log) == 4
    code, out, _ = run(capsys, "data", "mnist", "--out", folder, "--json")  # mends both
    assert (code, json.loads(out)["complete"]) == (0, ["binary"])


def test_the_command_says_what_went_wrong(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", no_names)
    monkeypatch.setenv("no_proxy", "*")
    code, out, err = run(capsys, "data", "svhn", "--out", tmp_path)
    assert (code, out) == (2, "")
    assert err == "error: expected a dataset among cifar10, cifar100, mnist, fashion-mnist, got 'svhn'\n"
    code, _, err = run(capsys, "data", "mnist", "--out", tmp_path, "--mirror", "http://mirror.example")
    assert code == 2
    assert err.startswith("error: cannot reach http://mirror.example/train-images-idx3-ubyte.gz")
    assert err.count("\n") == 1


def test_the_inventory_tells_files_of_one_name_apart(mnist: Server, tmp_path: Path) -> None:
    """The files of MNIST in a folder where Fashion-MNIST is looked for."""
    found = inventory("fashion-mnist", tmp_path / "origin")
    assert [one.state for one in found] == [f"this is {file} of mnist" for file in (one.path.name for one in found)]
    assert len(found) == 4


def test_the_inventory_looks_at_extracted_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = known.SOURCES["cifar100"]["python"]
    (tmp_path / source.folder).mkdir()
    contents = {file.name: file.name.encode() for file in source.inside}
    for name, content in contents.items():
        (tmp_path / source.folder / name).write_bytes(content)
    ours = tuple(File(name, hashlib.md5(content).hexdigest()) for name, content in contents.items())
    monkeypatch.setitem(known.SOURCES["cifar100"], "python", replace(source, inside=ours))
    for folder in (tmp_path, tmp_path / source.folder):
        found = inventory("cifar100", folder)
        assert [(one.form, one.path.name, one.state) for one in found] == [
            ("python", "train", "verified"),
            ("python", "test", "verified"),
        ]
        assert complete_forms("cifar100", found) == ["python"]
        assert complete_forms("cifar100", found[:1]) == []
