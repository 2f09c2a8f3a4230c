"""What can be wrong with a Markdown page, found by reading it: each function here returns complaints, and none means well."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer.main

from keepcover.cli import _repeat_method, app

SHELLS = ("sh", "bash", "console")
VALUED = ("--extra-index-url", "--index-url", "--constraint", "-c", "-r")  # options of pip that a value follows
NOT_RUN = re.compile(r"^\*Not run by the tests: \w.*\.\*$")


@dataclass(frozen=True)
class Fence:
    """A fenced block: its language, its text without indentation, and the last line of prose before it."""

    language: str
    code: str
    before: str

    @property
    def runs(self) -> bool:
        """Python that is not marked, for every reader to see, as not run."""
        return self.language in ("python", "py") and not NOT_RUN.match(self.before)


def fences(text: str) -> list[Fence]:
    found: list[Fence] = []
    inside: list[str] | None = None
    language = indent = before = ""
    for line in text.splitlines():
        opening = re.match(r"^( *)```(\w*)\s*$", line)
        if inside is None and opening:
            (indent, language), inside = opening.groups(), []
        elif inside is not None and line.strip() == "```":
            found.append(Fence(language, "\n".join(inside) + "\n", before))
            inside, before = None, ""
        elif inside is not None:
            inside.append(line.removeprefix(indent))
        elif line.strip():
            before = line.strip()
    return found


def prose(text: str) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^( *)```.*?^ *```\s*$", "", text, flags=re.MULTILINE | re.DOTALL)


# -- commands ----------------------------------------------------------------------------------------------------------


def shell_commands(text: str) -> Iterator[list[str]]:
    """Every ``keepcover ...`` of the shell blocks, as words."""
    for fence in fences(text):
        if fence.language in SHELLS:
            for line in fence.code.replace("\\\n", " ").splitlines():
                for part in line.removeprefix("$ ").split("&&"):
                    words = shlex.split(part, comments=True)
                    if words[:1] == ["keepcover"]:
                        yield words[1:]


def inline_commands(text: str) -> Iterator[list[str]]:
    """Every `keepcover ...` in running text that has an option; values may be placeholders."""
    for code in re.findall(r"`(keepcover [^`\n]+)`", prose(text)):
        if " -" in code:
            yield code.split()[1:]


def command_problem(words: Sequence[str], strict: bool = True) -> str | None:
    """What the real command line would say: an unknown command or option, a bad value, something missing.

    Files are not looked for. ``...`` stands for what was left out. Not ``strict``: only names are checked, not values.
    """
    command: Any = typer.main.get_command(app)
    rest = [word for word in _repeat_method(words) if word != "..."]
    path = "keepcover"
    while hasattr(command, "commands"):
        name = rest.pop(0) if rest else ""
        if name not in command.commands:
            return f"no command {path} {name}"
        path, command = f"{path} {name}", command.commands[name]
    if "--help" in rest:
        return None
    try:
        if strict and "..." not in words:
            command.make_context(path, rest)
        else:
            context = command.context_class(command, info_name=path)
            _, left, _ = command.make_parser(context).parse_args(rest)
            return f"{path}: too many arguments: {' '.join(left)}" if left else None
    except Exception as error:  # the classes of the command line's parser are not public
        return f"{path}: {error.format_message()}" if hasattr(error, "format_message") else f"{path}: {error!r}"
    return None


def command_problems(text: str) -> list[str]:
    problems = [command_problem(words) for words in shell_commands(text)]
    problems += [command_problem(words, strict=False) for words in inline_commands(text)]
    return [problem for problem in problems if problem]


def missing_targets(text: str, makefile: str) -> list[str]:
    """Targets that a page tells readers to make and the Makefile does not have."""
    named = set(re.findall(r"`make ([a-z][a-z-]*)", prose(text)))
    for fence in fences(text):
        if fence.language in SHELLS:
            named |= set(re.findall(r"^\s*make ([a-z][a-z-]*)", fence.code, re.MULTILINE))
    return sorted(named - set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE)))


def missing_files(text: str, root: Path) -> list[str]:
    """Files under ``out/`` that commands and images read, and that the page's own Python has not made there."""
    code = [fence.code for fence in fences(text) if fence.language in SHELLS or fence.language == "dockerfile"]
    read = {name for one in code for name in re.findall(r"(?<!--out )(?<!-f )(?<!--file )\bout/[\w./-]+", one)}
    return sorted(name for name in read if not (root / name).is_file())


def installs(text: str) -> list[str]:
    """What every ``pip install`` of a page, a message or a Dockerfile installs, without pip's own options.

    A sentence may name another extra of the checkout without repeating the command: ``'.[demo]'``.
    """
    found: list[str] = re.findall(r"(?<![\w/])'(\.\[[\w,-]+\])'", text)
    for line in re.findall(r"pip install +(.+)", text.replace("\\\n", " ")):
        words = iter(re.findall(r"'[^']*'|[^\s'`]+", line))
        for word in words:  # the first that is no option; what follows may be running text
            if word in VALUED:
                next(words, None)
            elif not word.startswith("-"):
                found.append(word.strip("'").rstrip('",;:)'))
                break
    return sorted(set(found))


def install_problems(text: str, pyproject: str) -> list[str]:
    """Installs of something else than the checkout with extras that it has. Nothing of ours is on a package index."""
    extras = set(tomllib.loads(pyproject)["project"]["optional-dependencies"])
    problems = []
    for target in installs(text):
        checkout = re.fullmatch(r"(?:\.|/src)(?:\[([\w,-]+)\])?", target)
        if checkout is None:
            problems.append(f"{target} is not the checkout")
        elif unknown := sorted(set((checkout[1] or "").split(",")) - extras - {""}):
            problems.append(f"{target}: no extra {', '.join(unknown)}")
    return problems


# -- links -------------------------------------------------------------------------------------------------------------


def slug(heading: str) -> str:
    """A heading's anchor on GitHub, and on the site."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.strip().lower())
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors(text: str) -> set[str]:
    """Anchors of a page: its headings, and the names that the Python reference fills in."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.+?) *$", prose(text), re.MULTILINE):
        name, number = slug(heading), 0
        while (candidate := f"{name}-{number}" if number else name) in found:
            number += 1
        found.add(candidate)
    return found | set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))


def dead_links(page: Path) -> list[str]:
    """Links and images of a page whose file or anchor is not there."""
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose(page.read_text(encoding="utf-8")))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        other = (page.parent / name).resolve() if name else page
        if not other.exists() or (
            anchor and other.suffix == ".md" and anchor not in anchors(other.read_text(encoding="utf-8"))
        ):
            dead.append(target)
    return dead


def hidden_lists(text: str) -> list[str]:
    """Lists that follow a paragraph without an empty line: GitHub shows them as lists, the site as running text."""
    lines = re.sub(r"<!--.*?-->", "", prose(text), flags=re.DOTALL).splitlines()
    item = re.compile(r"^ *(?:[-*]|\d+\.) ")
    found, in_list = [], False
    for before, line in zip(["", *lines], lines, strict=False):
        starts = item.match(line)
        if starts and not in_list and before.strip() and not before.lstrip().startswith("#"):
            found.append(line)
        in_list = bool(starts) or (in_list and (line.startswith(" ") or not line.strip() or bool(before.strip())))
    return found


# -- names -------------------------------------------------------------------------------------------------------------


def imported_names(code: str) -> set[str]:
    """Full names that a snippet imports from keepcover."""
    return {
        f"{node.module}.{alias.name}"
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "keepcover"
        for alias in node.names
    }


def value_of(name: str) -> object:
    """What a full name stands for: an attribute, or a module."""
    path, _, last = name.rpartition(".")
    module = importlib.import_module(path)
    return getattr(module, last) if hasattr(module, last) else importlib.import_module(name)


def undocumented(names: set[str], documented: set[str], value: Callable[[str], object] = value_of) -> list[str]:
    """Names that the reference lists neither as such nor under another name of the same object."""
    known = {id(value(name)) for name in documented}
    return sorted(name for name in names - documented if id(value(name)) not in known)
