"""Early exit: the sets of full drawing from fewer draws, whatever the scores, the rules and their number."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from keepcover.engine.inputs import Batch
from keepcover.errors import InputError
from keepcover.methods import Setting, get_method
from keepcover.methods.early_exit import Vote
from keepcover.methods.exact import CountRule, Exact
from keepcover.prediction.calibration import calibrate
from keepcover.scores.draws import Draws

patient = settings(deadline=None, derandomize=True, max_examples=150)


def rule(draws: int, kappa: int, gamma: float = 0.0) -> Exact:
    return Exact(Setting(0.1, 0.1, 0.2, draws, 100, 5), kappa=kappa, gamma=gamma)


@st.composite
def votes(draw: st.DrawFn) -> tuple[tuple[CountRule, ...], tuple[float, ...], Tensor, Tensor]:
    """Rules with thresholds, scores [n, K, N] with many ties, and the images' uniforms."""
    count = draw(st.integers(1, 3))
    rules = []
    for _ in range(count):
        draws = draw(st.integers(1, 24))
        rules.append(rule(draws, draw(st.integers(0, draws)), draw(st.sampled_from([0.0, 0.5]))))
    thresholds = tuple(draw(st.sampled_from([-0.5, 0.25, 0.5, 1.0])) for _ in rules)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    n, most = draw(st.integers(1, 6)), max(one.test_draws for one in rules)
    scores = torch.randint(5, (n, 3, most), generator=generator) / 4
    return tuple(rules), thresholds, scores, torch.rand(n, generator=generator)


@patient
@given(votes())
def test_the_sets_are_those_of_full_drawing(
    case: tuple[tuple[CountRule, ...], tuple[float, ...], Tensor, Tensor],
) -> None:
    rules, thresholds, scores, v = case
    vote, asked = Vote.of(rules, thresholds), []

    def exceeded(some: Batch, span: range) -> Tensor:
        asked.append((some.ids, span))
        return vote.above(Draws(scores[some.ids][..., span.start : span.stop]), span)

    batch = Batch(torch.zeros(len(scores), 1), None, torch.arange(len(scores)))
    masks, used = vote.run(batch, v, exceeded)
    for one, t, mask in zip(rules, thresholds, masks, strict=True):
        assert torch.equal(mask, one.decide(Draws(scores).first(one.test_draws), t, v))
    made = torch.zeros_like(used)
    for ids, span in asked:
        made[ids] += len(span)
    assert torch.equal(made, used)  # what is reported is what was drawn


@patient
@given(votes())
def test_every_draw_is_made_at_most_once_and_in_order(
    case: tuple[tuple[CountRule, ...], tuple[float, ...], Tensor, Tensor],
) -> None:
    rules, thresholds, _, _ = case
    stages = Vote(rules, thresholds).stages
    assert [draw for stage in stages for draw in stage] == list(range(max(one.test_draws for one in rules)))


def test_an_image_is_left_alone_as_soon_as_it_is_decided() -> None:
    """kappa 2 of 8: out after the first 6 draws exceed, in after 6 that do not, all 8 where it hangs in the balance."""
    scores = torch.zeros(3, 1, 8)
    scores[0] = 1.0
    scores[2, 0, [0, 1]] = 1.0  # two exceed: the last two draws decide
    vote = Vote.of([rule(8, 2)], [0.5])
    batch = Batch(torch.zeros(3, 1), None, torch.arange(3))
    (mask,), used = vote.run(
        batch, torch.ones(3), lambda some, span: vote.above(Draws(scores[some.ids][..., span.start : span.stop]), span)
    )
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


@pytest.mark.parametrize("method", ["exact", "exact_asymmetric", "rcp1"])
@pytest.mark.parametrize("score", ["hps", "aps"])
def test_a_predictor_gives_the_same_sets_from_fewer_draws(method: str, score: str) -> None:
    predictor = calibrate(
        model(),
        blobs(700, 0),
        sigma=0.3,
        epsilon=(0.1, 0.2),
        draws=24,
        method=method,
        score=score,
        seed=3,
        progress=False,
    )
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


def test_rules_that_average_are_refused() -> None:
    predictor = calibrate(
        model(), blobs(400, 0), sigma=0.3, epsilon=0.1, draws=8, method="rscp", seed=3, progress=False
    )
    with pytest.raises(InputError, match=r"early exit needs a rule that counts draws.*rscp averages"):
        predictor.predict(blobs(5, 1)[0], early_exit=True)
    assert not issubclass(get_method("rscp"), CountRule)
