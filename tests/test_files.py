"""Files are written whole or not at all, through links, and never over what is no file."""

from __future__ import annotations

import os
import socket
import stat
import sys
from pathlib import Path

import pytest
from safetensors.torch import save_file

from keepcover.cli import main
from keepcover.errors import InputError
from keepcover.files import check_folder, check_place, make_folder, write_atomically, write_file


def test_atomic_writes_replace(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in (b"one", b"another", b""):
        write_atomically(path, content)
        assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    """The file it leads to gets the content, also where that file is new, elsewhere, or behind another link."""
    (tmp_path / "there").mkdir()
    (tmp_path / "here").symlink_to("there/file")
    (tmp_path / "first").symlink_to(tmp_path / "here")
    for content in (b"new", b"old"):
        check_place(tmp_path / "first")
        write_file(tmp_path / "first", content)
        assert (tmp_path / "here").is_symlink()
        assert (tmp_path / "first").is_symlink()
        assert (tmp_path / "there" / "file").read_bytes() == content
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "first", "here", "there"]


def test_a_replaced_file_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "private"
    path.write_bytes(b"secret")
    path.chmod(0o600)
    write_file(path, b"another")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def odd_places(folder: Path) -> dict[str, Path]:
    """Everything that a name may lead to besides a file."""
    os.mkfifo(folder / "pipe")
    (folder / "to-pipe").symlink_to("pipe")
    (folder / "loop").symlink_to("loop")
    (folder / "folder").mkdir()
    (folder / "to-folder").symlink_to("folder")
    (folder / "plain").write_bytes(b"plain")
    (folder / "nowhere").symlink_to("absent/file")
    with socket.socket(socket.AF_UNIX) as listening:
        before = Path.cwd()
        os.chdir(folder)  # the name of a socket must be short
        listening.bind("socket")
        os.chdir(before)
    places = [path for path in folder.iterdir() if path.name != "plain"]
    if os.geteuid() == 0:
        os.mknod(folder / "device", stat.S_IFCHR | 0o666, os.makedev(1, 3))  # a private /dev/null
        places.append(folder / "device")
    more = {"absent": folder / "absent" / "file", "below-a-file": folder / "plain" / "file", "null": Path("/dev/null")}
    return {path.name: path for path in places} | more


def test_only_files_and_new_names_are_written(tmp_path: Path) -> None:
    places = odd_places(tmp_path)
    assert len(places) >= 10
    before = {path: path.lstat().st_mode for path in tmp_path.rglob("*")}
    for path in places.values():
        for attempt in (lambda p: check_place(p), lambda p: write_file(p, b"x"), lambda p: write_atomically(p, b"x")):
            with pytest.raises(InputError, match=r"no folder|is a folder|is no regular file|cannot write") as caught:
                attempt(path)
            assert "\n" not in str(caught.value)
    assert {path: path.lstat().st_mode for path in tmp_path.rglob("*")} == before


def test_names_that_no_disk_takes_are_refused_before_the_work(tmp_path: Path) -> None:
    for name in ("x" * 300, "x" * 240, "nul\0"):  # the second leaves no room for a temporary name beside it
        with pytest.raises(InputError, match="cannot write"):
            check_place(tmp_path / name)


def test_read_only_places_are_refused_before_the_work(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    (tmp_path / "file").write_bytes(b"kept")
    (tmp_path / "file").chmod(0o400)
    with pytest.raises(InputError, match="file is read-only"):
        check_place(tmp_path / "file")
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(InputError, match=r"cannot write .*\(Permission denied\)"):
        check_folder(tmp_path / "closed", "file")


def test_checking_a_place_leaves_nothing(tmp_path: Path) -> None:
    check_place(tmp_path / "file", tmp_path / "other")
    check_folder(tmp_path / "a" / "b")
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "b"]
    with pytest.raises(InputError, match="cannot create the folder"):
        make_folder(Path("/proc/nothing"))
    with pytest.raises(InputError, match="cannot create the folder"):
        make_folder(tmp_path / "nul\0")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /dev/full")
def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"old")

    def full(self: Path, content: bytes) -> int:
        with open("/dev/full", "wb", buffering=0) as disk:  # noqa: PTH123
            return disk.write(content)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(InputError, match=r"cannot write .*file \(No space left on device\); make room"):
        write_file(tmp_path / "file", b"new")
    monkeypatch.undo()
    assert (tmp_path / "file").read_bytes() == b"old"


MODEL = ["--model", "module.that.is:absent", "--data", "nothing.npz"]
COMMANDS: dict[str, list[str]] = {
    "calibrate": ["calibrate", *MODEL, "--sigma", "0.1", "--epsilon", "0.1", "--out", "FILE"],
    "predict": ["predict", "nothing.safetensors", *MODEL, "--out", "FILE"],
    "report": ["report", "nothing.safetensors", *MODEL, "--out", "FILE"],
    "report-figures": ["report", "nothing.safetensors", *MODEL, "--out", "GOOD", "--figures", "FOLDER"],
    "evaluate": ["evaluate", "nothing.npz", "--epsilon", "0.1", "--sigma", "0.1", "--out", "FILE"],
    "evaluate-report": ["evaluate", "nothing.npz", "--epsilon", "0.1", "--sigma", "0.1", "--report", "FILE"],
    "evaluate-figures": ["evaluate", "nothing.npz", "--epsilon", "0.1", "--report", "GOOD", "--figures", "FOLDER"],
    "audit": ["audit", *MODEL, "--out", "FOLDER"],
    "demo": ["demo", "--out", "FOLDER"],
    "reproduce": ["reproduce", "table1", "--out", "FOLDER"],
    "train": ["train", "base", "--sigma", "0.1", "--epochs", "1", "--out", "FILE.safetensors"],
}


@pytest.mark.parametrize("case", list(COMMANDS))
def test_every_command_looks_at_the_place_first(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line about the place, although the model and the data that are named do not exist either."""
    monkeypatch.chdir(tmp_path)
    save_file({}, tmp_path / "taken")
    os.mkfifo(tmp_path / "pipe")
    os.mkfifo(tmp_path / "pipe.safetensors")
    words = {"FILE": "pipe", "FOLDER": "taken", "GOOD": "page.html", "FILE.safetensors": "pipe.safetensors"}
    assert main([words.get(word, word) for word in COMMANDS[case]]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "pipe" in line or "taken" in line
    assert stat.S_ISFIFO((tmp_path / "pipe").lstat().st_mode)
