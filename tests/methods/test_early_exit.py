"""Early exit: the sets of full drawing from fewer draws, whatever the scores, the rules and their number."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from keepcover.engine.smoother import Smoother
from keepcover.errors import InputError
from keepcover.methods import Exact, Rule, get_method
from keepcover.methods.early_exit import Vote
from keepcover.prediction import calibrate
from keepcover.scores import Draws
from tests.methods.worst import asked_for, kept

patient = settings(deadline=None, derandomize=True, max_examples=150)


def rule(draws: int, kappa: int, gamma: float = 0.0) -> Rule:
    return Exact().rule(asked_for(100, draws), kappa=kappa, gamma=gamma)


@st.composite
def numbers(draw: st.DrawFn) -> tuple[list[tuple[int, int, float]], list[tuple[int, ...]], int, int]:
    """Draws, kappa and gamma of some rules, the shapes of their thresholds (one for all, or per label), images and a seed."""
    rules = []
    for _ in range(draw(st.integers(1, 3))):
        draws = draw(st.integers(1, 24))
        rules.append((draws, draw(st.integers(0, draws - 1)), draw(st.sampled_from([0.0, 0.5]))))
    shapes = [draw(st.sampled_from([(), (3,), (1, 3)])) for _ in rules]
    return rules, shapes, draw(st.integers(1, 6)), draw(st.integers(0, 10**6))


Votes = tuple[list[Rule], list[Tensor], Tensor, Tensor]


def votes(case: tuple[list[tuple[int, int, float]], list[tuple[int, ...]], int, int]) -> Votes:
    """Rules with thresholds, scores [n, K, N] with many ties, and the images' uniforms."""
    numbers, shapes, n, seed = case
    rules, generator = [rule(*some) for some in numbers], torch.Generator().manual_seed(seed)
    values = torch.tensor([-0.5, 0.25, 0.5, 1.0, torch.inf])
    thresholds = [values[torch.randint(5, shape, generator=generator)] for shape in shapes]
    scores = torch.randint(5, (n, 3, max(one.test_draws for one in rules)), generator=generator) / 4
    return rules, thresholds, scores, torch.rand(n, generator=generator)


@patient
@given(numbers())
def test_the_sets_are_those_of_full_drawing(case: Any) -> None:
    rules, thresholds, scores, v = votes(case)
    vote, asked = Vote.of(rules, thresholds), []

    def exceeded(positions: Tensor, span: range) -> Tensor:
        asked.append((positions, span))
        return vote.above(Draws(scores[positions][..., span.start : span.stop]), span, positions)

    masks, used = vote.run(torch.arange(len(scores)), v, exceeded)
    for one, t, mask in zip(rules, thresholds, masks, strict=True):
        assert torch.equal(mask, one.test_statistic(Draws(scores).first(one.test_draws), v) <= t)
    made = torch.zeros_like(used)
    for positions, span in asked:
        made[positions] += len(span)
    assert torch.equal(made, used)  # what is reported is what was drawn
    stages = vote.stages
    assert [draw for stage in stages for draw in stage] == list(range(max(one.test_draws for one in rules)))


def test_an_image_is_left_alone_as_soon_as_it_is_decided() -> None:
    """kappa 2 of 8: out after the first 6 draws exceed, in after 6 that do not, all 8 where it hangs in the balance."""
    scores = torch.zeros(3, 1, 8)
    scores[0] = 1.0
    scores[2, 0, [0, 1]] = 1.0  # two exceed: the last two draws decide
    vote = Vote.of([rule(8, 2)], [torch.tensor(0.5)])
    (mask,), used = vote.run(
        torch.arange(3),
        torch.ones(3),
        lambda some, span: vote.above(Draws(scores[some][..., span.start : span.stop]), span, some),
    )
    assert torch.equal(mask, kept(rule(8, 2), Draws(scores), 0.5))
    assert mask[:, 0].tolist() == [False, True, True]
    assert used.tolist() == [6, 6, 8]


def blobs(n: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (n,), generator=generator)
    centres = torch.rand(4, 1, 4, 4, generator=torch.Generator().manual_seed(7))
    return (centres[labels] + 0.25 * torch.randn(n, 1, 4, 4, generator=generator)).clamp(0, 1), labels


def model() -> nn.Module:
    torch.manual_seed(1)
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 4))
    centres = torch.rand(4, 1, 4, 4, generator=torch.Generator().manual_seed(7)).flatten(1)
    with torch.no_grad():
        network[1].weight.copy_(10 * centres)
        network[1].bias.copy_(-5 * centres.square().sum(dim=1))
    return network.eval()


@pytest.mark.parametrize("method", ["exact", "exact_asymmetric", "rcp1", "bincp_sharp"])
@pytest.mark.parametrize("score", ["hps", "aps"])
def test_a_predictor_gives_the_same_sets_from_fewer_draws(method: str, score: str) -> None:
    smoother = Smoother(model(), 0.3, progress=False)
    predictor = calibrate(smoother, blobs(700, 0), epsilon=(0.1, 0.2), draws=24, method=method, score=score, seed=3)
    images, _ = blobs(200, 1)
    for epsilon in (0.1, 0.2):
        for nested in (False, True):
            full = predictor.predict(images, seed=9, epsilon=epsilon, nested=nested)
            early = predictor.predict(images, seed=9, epsilon=epsilon, nested=nested, early_exit=True)
            assert torch.equal(full.mask, early.mask)
            assert full.draws_used is None
            assert early.draws_used is not None
            assert early.draws_used.shape == (200,)
            assert int(early.draws_used.max()) <= predictor.draws
            if method != "rcp1":
                assert float(early.draws_used.double().mean()) < predictor.draws
    assert early[:3].draws_used is not None
    assert len(early[:3].draws_used) == 3


@pytest.mark.parametrize(("fixed", "used"), [(0.0, 14), (1.0, 24)])
def test_stages_are_left_out_where_they_cannot_pay(fixed: float, used: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is no CPU and whose clock goes on by a fixed time per call of the model and a little per row."""
    clock, calls, network = [0.0], [], model()

    def timed(inputs: Tensor) -> Tensor:
        calls.append(len(inputs))
        clock[0] += fixed + 1e-4 * len(inputs)
        return network(inputs)

    smoother = Smoother(timed, 0.3, progress=False)
    predictor = calibrate(smoother, blobs(700, 0), epsilon=0.1, draws=24, method="exact", seed=3, fingerprint="timed")
    images, _ = blobs(200, 1)
    expected = predictor.predict(images, seed=9)
    monkeypatch.setattr(smoother, "device", SimpleNamespace(type="elsewhere"))
    monkeypatch.setattr("keepcover.engine.inputs.Batch.to", lambda self, device: self)
    monkeypatch.setattr(Tensor, "to", lambda self, *_, **__: self.float() if self.is_floating_point() else self)
    monkeypatch.setattr("keepcover.prediction.predictor.time.perf_counter", lambda: clock[0])
    calls.clear()
    found = predictor.predict(images, seed=9, early_exit=True)
    assert torch.equal(found.mask, expected.mask)
    assert int(found.draws_used.min()) == used
    assert (len(calls) == 7) == (used == 24)  # three of each measurement, and one pass


def test_rules_that_average_are_refused() -> None:
    predictor = calibrate(
        Smoother(model(), 0.3, progress=False), blobs(400, 0), epsilon=0.1, draws=8, method="rscp", seed=3
    )
    with pytest.raises(InputError, match=r"early exit needs a rule that counts draws.*rscp averages"):
        predictor.predict(blobs(5, 1)[0], early_exit=True)
    assert predictor.rule.counting is None
    assert get_method("exact").rule(asked_for(100, 8), kappa=3).counting == (3, 0.0)
