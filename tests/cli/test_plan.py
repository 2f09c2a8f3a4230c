"""``keepcover plan``: JSON that is make_plan's, a table with the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepcover.evaluation.plan import make_plan
from tests.cli.runner import as_json, refused, run

PLAN = ["plan", "--epsilon", "0.1", "--sigma", "0.2", "--draws", "4", "--calibration-draws", "8"]


def test_plan_as_json_is_make_plan(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, *PLAN)
    assert set(found) == {"alpha", "epsilon", "noise", "norm", "shape", "draws", "n", "beta", "plans"}
    assert (found["alpha"], found["epsilon"], found["draws"], found["n"]) == (0.1, 0.1, 4, 4750)
    assert found["noise"] == {"name": "gaussian", "sigma": 0.2}
    expected = make_plan(0.1, 0.1, 0.2, 4, calibration_draws=8)
    assert found["plans"] == [plan.to_dict() for plan in expected]
    keys = {"method", "draws", "calibration_draws", "c", "kappa", "level", "estimated_size", "rule", "least"}
    assert all(set(plan) == keys for plan in found["plans"])
    assert [plan["method"] for plan in found["plans"]] == [
        "exact",
        "exact",
        "exact_asymmetric",
        "rcp1",
        "rscp_plus_hoeffding",
    ]


def test_numbers_may_be_fractions(capsys: pytest.CaptureFixture[str]) -> None:
    """1/255 in every pixel is how people say it."""
    written = ["--epsilon", "1/255", "--norm", "linf", "--shape", "3x32x32", "--alpha", "1/10"]
    found = as_json(capsys, *PLAN, *written)
    assert (found["epsilon"], found["alpha"]) == (1 / 255, 0.1)
    for bad in ("1/0", "one", "1/2/3", "/"):
        code, _, error = run(capsys, *PLAN, "--epsilon", bad)
        assert code == 2
        assert f"expected a number such as 0.25 or 1/255, got '{bad}'" in " ".join(error.replace("│", " ").split())


def test_plan_as_text_has_the_same_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *PLAN)
    assert code == 0
    for plan in make_plan(0.1, 0.1, 0.2, 4, calibration_draws=8):
        assert f"{plan.method} ({plan.draws}/{plan.calibration_draws}): {plan.rule}" in out.replace("\n", " ") or (
            plan.rule in out
        )
        if plan.level is not None:
            assert f"{plan.level:.5f}" in out
        if plan.estimated_size is not None:
            assert f"{plan.estimated_size:.2f}" in out


def test_plan_reads_your_holdout(capsys: pytest.CaptureFixture[str], logits_file: Path) -> None:
    own = as_json(capsys, *PLAN, "--holdout", logits_file)["plans"]
    assert own != as_json(capsys, *PLAN)["plans"]
    assert all(plan["estimated_size"] is None or 0 < plan["estimated_size"] <= 4 for plan in own)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (["--alpha", "1.5"], "alpha strictly between 0 and 1"),
        (["--alpha", "0"], "alpha strictly between 0 and 1"),
        (["--epsilon", "-1"], "epsilon >= 0"),
        (["--sigma", "0"], "sigma"),
        (["--sigma", "-1"], "sigma"),
        (["--n", "3"], "are needed; add data"),
        (["--draws", "0"], "draw"),
        (["--calibration-draws", "0", "--draws", "0"], "draw"),
        (["--beta", "0"], "beta"),
        (["--epsilon", "abc"], "--epsilon"),
        (["--holdout", "nothing.npz"], "no file at nothing.npz"),
        (["--bogus"], "--bogus"),
    ],
)
def test_bad_plans_are_refused(changes: list[str], match: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert match in refused(capsys, *PLAN, *changes)
