"""README, docs and examples run as written, and say what the code and results say."""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import json
import pkgutil
import re
import runpy
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import keepcover
from keepcover import training
from keepcover.cli import every_command
from keepcover.methods import METHODS
from keepcover.noise import NOISES
from keepcover.promises import CLAUSES
from keepcover.tasks import TASKS
from keepcover.training import fit_under_noise

from . import documents

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]
TUNING = "fine_tune_your_network.py"
EXAMPLES = sorted(p.name for p in (ROOT / "examples").glob("*.py"))
NEEDS = {"hugging_face_model.py": "transformers", "docs/hugging-face.md": "transformers", "docs/mlflow.md": "mlflow"}
BRINGS = {"transformers": "make hugging-face-test", "mlflow": "make mlflow-test"}


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def skip_without(what: str) -> None:
    package = NEEDS.get(what)
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}: {BRINGS[package]} installs it")


# -- what runs ---------------------------------------------------------------------------------------------------------


TRAINED: dict[Any, dict[str, torch.Tensor]] = {}


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A reader's folder, with warnings shown instead of raised. Networks of one form are trained once for all pages, and what
    pages register is forgotten."""

    def fit_once(
        model: torch.nn.Module,
        images: torch.Tensor,
        labels: torch.Tensor | None = None,
        *,
        sigma: float | None = None,
        noise: Any = None,
        **options: Any,
    ) -> Any:
        key = (repr(model), tuple(images.shape), labels is None, sigma, noise)
        if key not in TRAINED:
            fit_under_noise(model, images, labels, sigma=sigma, noise=noise, **options)
            TRAINED[key] = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(TRAINED[key])
        return model.eval()

    monkeypatch.setattr(training, "fit_under_noise", fit_once)
    monkeypatch.chdir(tmp_path)
    registries: list[dict[str, Any]] = [NOISES, CLAUSES, TASKS, METHODS]
    before = [dict(registry) for registry in registries]
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        yield
    for registry, known in zip(registries, before, strict=True):
        registry.clear()
        registry.update(known)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(fence.runs for fence in documents.fences(text_of(page)))]
)
@pytest.mark.usefixtures("reader")
def test_every_python_block_of_a_page_runs(page: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Blocks of one page run in order, as a reader would paste them; every print prints."""
    skip_without(page)
    code = "\n".join(fence.code for fence in documents.fences(text_of(page)) if fence.runs)
    exec(compile(code, page, "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip() or "print(" not in code
    assert documents.missing_files(text_of(page), tmp_path) == []


@pytest.mark.parametrize("page", [page for page in PAGES if "```pycon" in text_of(page)])
def test_every_session_of_a_page_prints_what_it_shows(page: str) -> None:
    sessions = "\n".join(fence.code for fence in documents.fences(text_of(page)) if fence.language == "pycon")
    test = doctest.DocTestParser().get_doctest(sessions, {}, page, page, 0)
    assert test.examples
    outcome = doctest.DocTestRunner(verbose=False).run(test)
    assert outcome.failed == 0


@pytest.mark.parametrize("example", [name for name in EXAMPLES if name != TUNING])
@pytest.mark.usefixtures("reader")
def test_every_example_runs(example: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    skip_without(example)
    monkeypatch.setattr(sys, "argv", [example])
    runpy.run_path(str(ROOT / "examples" / example), run_name="__main__")
    assert capsys.readouterr().out.strip()


@pytest.mark.usefixtures("reader")
def test_the_tutorial_runs_and_shows_what_it_ends_with(capsys: pytest.CaptureFixture[str]) -> None:
    """Its cells in order, in one process: the value of a cell's last line is shown as a notebook would."""
    cells = json.loads(text_of("examples/tutorial.ipynb"))["cells"]
    names, shown = {"__name__": "__main__"}, []
    for code in ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"):
        *first, last = ast.parse(code).body
        value = isinstance(last, ast.Expr) and not ast.unparse(last).startswith("print")
        exec(compile(ast.Module(first if value else [*first, last], []), "tutorial", "exec"), names)
        if value:
            shown.append(eval(ast.unparse(last), names)._repr_html_())
    assert len(shown) == 3
    assert all("90 %" in page for page in shown)
    assert "mean size" in capsys.readouterr().out
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)  # none to go stale


@pytest.mark.usefixtures("reader")
def test_the_fine_tuning_example_warns_about_the_ordinary_network_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(keepcover.KeepcoverWarning) as caught:
        made = runpy.run_path(str(ROOT / "examples" / TUNING), run_name="__main__")
    assert "fine-tuned" in capsys.readouterr().out
    assert len(caught) == 1
    assert re.match(r"the model is right on only \d\d.\d% of noisy draws.*on 9\d.\d% without", str(caught[0].message))
    assert made["predictor"].warning is None


def test_generated_parts_are_current() -> None:
    """Tables and figures follow from results/, the references from the commands and the public names."""
    pytest.importorskip("fastapi")  # the reference imports keepcover.serve
    command = [sys.executable, "docs/generate.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr


# -- what is said ------------------------------------------------------------------------------------------------------


def test_the_readme_compares_with_the_papers_best_at_each_number_of_draws() -> None:
    """The paper prints sizes for more draws than its tables have elsewhere, and they are smaller."""
    printed: dict[int, list[float]] = {}
    for path in (ROOT / "results" / "reproduce").glob("*.json"):
        for row in json.loads(path.read_text())["rows"]:
            if row.get("dataset") == "cifar100" and row.get("certified") and (row.get("paper") or {}).get("size"):
                printed.setdefault(row["draws"], []).append(row["paper"]["size"])
    usual, most = (f"{min(printed[draws]):.1f} with {draws:,}" for draws in (256, max(printed)))
    assert f"the paper's best is {usual} and {most} " in text_of("README.md")


def test_every_command_is_documented() -> None:
    reference = text_of("docs/cli.md")
    commands = {" ".join(path) for path, _ in every_command()}
    assert commands == set(re.findall(r"^## keepcover ([\w ]+)", reference, re.MULTILINE))


@pytest.mark.parametrize("page", PAGES)
def test_every_command_shown_would_be_accepted(page: str) -> None:
    assert documents.command_problems(text_of(page)) == []
    assert documents.missing_targets(text_of(page), text_of("Makefile")) == []


@pytest.mark.parametrize("page", PAGES)
def test_no_internal_link_is_dead(page: str) -> None:
    assert documents.dead_links(ROOT / page) == []
    assert documents.hidden_lists(text_of(page)) == []


def documented() -> set[str]:
    """Names in the Python reference: described there, or said to be another name of something described."""
    pages = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "api").glob("*.md"))
    return set(re.findall(r"^::: (\S+)$", pages, re.MULTILINE)) | set(
        re.findall(r"^- \[?`(keepcover\.\S+)`", pages, re.MULTILINE)
    )


def public() -> set[str]:
    """``__all__`` of the package and of everything in it; the command line has a reference of its own."""
    names = {f"keepcover.{name}" for name in keepcover.__all__}
    for info in pkgutil.walk_packages(keepcover.__path__, "keepcover."):
        # The kernel needs Triton.
        if not info.name.startswith(("keepcover.cli", "keepcover.noise.kernel")) and not info.name.endswith("__main__"):
            names |= {f"{info.name}.{name}" for name in getattr(importlib.import_module(info.name), "__all__", ())}
    return names


def test_every_public_name_is_in_the_reference() -> None:
    assert documents.undocumented(public(), documented()) == []


def test_every_name_that_pages_and_examples_import_is_in_the_reference() -> None:
    """A reader of a page finds what the page uses."""
    code = [fence.code for page in PAGES for fence in documents.fences(text_of(page)) if fence.language == "python"]
    code += [text_of(f"examples/{example}") for example in EXAMPLES]
    names = set().union(*(documents.imported_names(one) for one in code)) - {"keepcover.cli.main"}
    assert len(names) > 20
    modules = {name for name in names if type(documents.value_of(name)).__name__ == "module"}
    assert documents.undocumented(names - modules, documented()) == []


def test_every_page_is_in_the_navigation() -> None:
    """The strict build says so too; this one needs no site generator."""
    listed = set(re.findall(r"[\w/-]+\.md", text_of("mkdocs.yml")))
    there = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert there == listed - {"changelog.md", "examples.md"}


def test_the_architecture_names_every_room() -> None:
    rooms = {
        path.stem for path in (ROOT / "src" / "keepcover").iterdir() if not path.name.startswith(("_", "py.", "."))
    }
    assert rooms - set(re.findall(r"`(\w+)/?`", text_of("docs/architecture.md"))) == set()


def test_every_public_name_has_a_docstring() -> None:
    for name in keepcover.__all__:
        assert (getattr(keepcover, name).__doc__ or "").strip() or name == "METHODS", name


# -- the checks find planted mistakes ----------------------------------------------------------------------------------


PAGE = """# Title

Some `code` and [a link](other.md#here), ![a figure](figure.svg).

```python
print(1)
```

*Not run by the tests: needs a cluster.*

```python
import cluster
```

- a list

    ```sh
    keepcover plan --epsilon 0.125 \\
      --sigma 0.25 --draws 4  # a comment
    ```
"""


def test_fences_are_read_as_they_are_meant() -> None:
    first, second, third = documents.fences(PAGE)
    assert (first.code, first.runs) == ("print(1)\n", True)
    assert (second.code, second.runs) == ("import cluster\n", False)
    assert third.code.startswith("keepcover plan")
    assert list(documents.shell_commands(PAGE)) == [["plan", "--epsilon", "0.125", "--sigma", "0.25", "--draws", "4"]]
    assert documents.Fence("python", "", "*Not run by the tests: .*").runs  # a reason is needed
    assert documents.Fence("python", "", "not run").runs


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("plan --epsilon 0.1 --sigma 0.2", None),
        ("evaluate a.npz --epsilon 0.1 --method exact rcp1", None),
        ("smooth ... --draws 4", None),
        ("audit --help", None),
        ("plam --epsilon 0.1 --sigma 0.2", "no command keepcover plam"),
        ("train bass --sigma 1", "no command keepcover train bass"),
        ("train", "no command keepcover train"),
        ("plan --epsilom 0.1 --sigma 0.2", "--epsilom"),
        ("plan --sigma 0.1", "Missing option '--epsilon'"),
        ("plan --epsilon tiny --sigma 0.2", "expected a number such as"),
        ("plan --epsilon", "requires an argument"),
        ("evaluate a.npz --epsilon 0.1 --score hsp", "hsp"),
        ("evaluate a.npz b.npz --epsilon 0.1", "b.npz"),
        ("evaluate --epsilon 0.1", "Missing argument"),
    ],
)
def test_a_wrong_command_is_found(command: str, problem: str | None) -> None:
    found = documents.command_problem(command.split())
    assert (found is None) if problem is None else (problem in (found or "")), found
    shown = documents.command_problems(f"```sh\nkeepcover {command}\n```\n")
    assert bool(shown) == (problem is not None)


def test_wrong_options_in_running_text_are_found() -> None:
    assert documents.command_problems("`keepcover plan --epsilon E --sigma S` and `keepcover plan`") == []
    assert len(documents.command_problems("`keepcover plan --epsilon E --sigm S`")) == 1


SPEAKING = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**/*.md", "examples/*.py", "benchmarks/*.py")


def test_every_install_line_names_the_checkout_and_extras_that_it_has() -> None:
    """Nothing of ours is on a package index: its name there may be another's. Messages of the code are in tests/test_house.py."""
    files = sorted(path for pattern in SPEAKING for path in ROOT.glob(pattern))
    found = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files}
    assert sum(bool(documents.installs(text)) for text in found.values()) > 10
    wrong = {name: documents.install_problems(text, text_of("pyproject.toml")) for name, text in found.items()}
    assert {name: problems for name, problems in wrong.items() if problems} == {}


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("`pip install .` and `pip install '.[a,b]'`", []),
        (
            "RUN pip install --no-cache-dir --extra-index-url https://example.org/cpu '/src[a]' \\\n    && rm -rf /src",
            [],
        ),
        ("pip install '.[demo]'  # in a checkout", [".[demo]: no extra demo"]),
        ("pip install keepcover", ["keepcover is not the checkout"]),
        ("needs x: pip install 'keepcover[a]' in", ["keepcover[a] is not the checkout"]),
        ("``pip install 'ray[serve]'``", ["ray[serve] is not the checkout"]),
        ("and the digits `'.[c]'`", [".[c]: no extra c"]),
    ],
)
def test_wrong_installs_are_found(text: str, problems: list[str]) -> None:
    assert documents.install_problems(text, "[project.optional-dependencies]\na = []\nb = []\n") == problems


@pytest.mark.parametrize(
    ("page", "extra"),
    [
        ("README.md", "demo"),
        ("docs/quickstart.md", "demo"),
        ("docs/onnx.md", "onnx-export"),
        ("docs/onnx.md", "demo"),
        ("docs/deploying.md", "serve,demo"),
    ],
)
def test_pages_name_what_their_code_needs(page: str, extra: str) -> None:
    assert f".[{extra}]'" in text_of(page)


def test_missing_files_are_found(tmp_path: Path) -> None:
    text = "```sh\nx out/a.png @out/b.png --out out/c.png\n```\n\n```python\n'out/d.png'\n```\n"
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a.png").touch()
    assert documents.missing_files(text, tmp_path) == ["out/b.png"]


def test_a_missing_target_is_found() -> None:
    text = "Say `make tea`.\n\n```sh\nmake coffee\nmake test\n```\n"
    assert documents.missing_targets(text, "test: x\n\techo\n") == ["coffee", "tea"]


def test_dead_links_and_anchors_are_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text(
        "# Title\n\n## A `code` heading, σ & more\n\n## Twice\n\n## Twice\n\n::: keepcover.calibrate\n"
    )
    good = [
        "other.md",
        "other.md#title",
        "other.md#a-code-heading-σ--more",
        "other.md#twice-1",
        "other.md#keepcover.calibrate",
        "#here",
    ]
    bad = ["another.md", "other.md#tittle", "other.md#twice-2", "missing.svg", "#there"]
    page = tmp_path / "page.md"
    page.write_text("# Here\n\n" + "\n".join(f"[x]({target}) [web](https://example.org/x#y)" for target in good + bad))
    assert documents.dead_links(page) == bad
    page.write_text("`[x](gone.md)`\n\n```text\n[x](gone.md)\n```\n")
    assert documents.dead_links(page) == []


def test_hidden_lists_are_found() -> None:
    assert documents.hidden_lists("Words:\n- one\n- two\n") == ["- one"]
    assert documents.hidden_lists("Words:\n\n- one\n  goes on\n- two\n\n1. three\n2. four\n") == []


def test_undocumented_names_are_found() -> None:
    assert documents.imported_names("from keepcover.noise import Stream\nimport torch\nfrom torch import nn") == {
        "keepcover.noise.Stream"
    }
    assert documents.undocumented({"keepcover.noise.Stream"}, {"keepcover.Stream"}) == []
    assert documents.undocumented({"keepcover.load"}, {"keepcover.Stream"}) == ["keepcover.load"]


def test_a_session_that_prints_something_else_is_found() -> None:
    test = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "page", "page", 0)
    assert doctest.DocTestRunner(verbose=False).run(test, out=lambda _: None).failed == 1
