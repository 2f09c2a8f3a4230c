"""Attacks: closed-form worst cases reached, radii kept in float64, nothing of the model left changed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from keepcover.attacks import Margin, NoisyModel, mean_softmax, pgd, random_search, smooth_adv, transfer
from keepcover.attacks.pgd import Loss
from keepcover.errors import InputError, KeepcoverWarning
from keepcover.methods import RSCP
from keepcover.noise import Stream
from keepcover.noise.norms import L2
from keepcover.noise.stream import ROLES, lattice
from keepcover.prediction import Predictor, calibrate
from keepcover.scores import hps, log_odds
from tests.toys import flags, half_trained, nearest, toy

patient = settings(deadline=None, derandomize=True, max_examples=40)
ATTACK = Stream(3, "attack")


def linear(scale: float = 1.0) -> nn.Linear:
    """Two classes over six pixels."""
    layer = nn.Linear(6, 2)
    with torch.no_grad():
        layer.weight.copy_(scale * torch.randn(2, 6, generator=torch.Generator().manual_seed(1)))
        layer.bias.zero_()
    return layer


def curved() -> nn.Module:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)).eval()
    with torch.no_grad():
        for layer in model[::2]:
            layer.weight *= 3
    return model


def batch(n: int, classes: int = 2, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(n, 6, generator=generator), torch.randint(classes, (n,), generator=generator)


def distance(a: Tensor, b: Tensor) -> Tensor:
    return (a.double() - b.double()).flatten(1).norm(dim=1)


def value(noisy: NoisyModel, loss: Loss, images: Tensor, labels: Tensor) -> Tensor:
    """The attacker's objective at some images."""
    ids = torch.arange(len(images))
    with torch.no_grad():
        return loss(noisy.outputs(images, ids), labels, ids)


# -- the closed form ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sigma", [0.0, 0.25])
@pytest.mark.parametrize("epsilon", [0.01, 0.5, 2.0])
def test_on_a_linear_model_the_worst_case_is_reached(epsilon: float, sigma: float) -> None:
    """The margin is linear, so the worst point is x + epsilon along w_other - w_own, for the model and under noise."""
    model, (x, y) = linear(), batch(12)
    noisy = NoisyModel(model, sigma, 16, ATTACK)
    away = (model.weight[1] - model.weight[0]).detach()
    worst = x + epsilon * (1 - 2 * y)[:, None] * away / away.norm()
    found = pgd(noisy, x, y, epsilon)
    torch.testing.assert_close(found, worst, rtol=0, atol=1e-4)
    torch.testing.assert_close(
        value(noisy, mean_softmax, found, y), value(noisy, mean_softmax, worst, y), rtol=0, atol=1e-4
    )


def test_the_named_attacks_are_that_loop() -> None:
    model, (x, y) = curved(), batch(10, 4)
    smooth = pgd(NoisyModel(model, 0.2, 8, Stream(5, "attack")), x, y, 0.3)
    assert torch.equal(smooth_adv(model, x, y, 0.3, 0.2, draws=8, seed=5), smooth)
    assert torch.equal(smooth_adv(model, x, y, 0.3, 0.0), pgd(NoisyModel(model, 0.0, 1, ATTACK), x, y, 0.3))
    assert torch.equal(smooth_adv(lambda inputs: model(inputs), x, y, 0.3, 0.2, draws=8, seed=5), smooth)


def test_every_step_is_the_gradient_step_of_the_definition() -> None:
    """Three steps by hand: delta <- project(delta + 2 epsilon / steps * g / |g|), through the mean over the draws."""
    model, (x, y), epsilon = curved(), batch(5, 4), 0.4
    noise = 0.2 * ATTACK.gaussian(torch.arange(5), range(8), (6,))
    best, peak, delta = x.clone(), torch.full((5,), -torch.inf), torch.zeros_like(x)
    for step in range(4):
        here = (x + delta).requires_grad_()
        noisy = here[:, None] + noise
        rounded = (noisy / lattice(0.2) + 0.5).floor() * lattice(0.2)
        own = model(noisy + (rounded - noisy).detach()).softmax(dim=-1)[torch.arange(5), :, y].mean(dim=1)
        loss = -own.log()
        better = loss > peak
        best, peak = torch.where(better[:, None], here.detach(), best), torch.where(better, loss.detach(), peak)
        if step < 3:
            (g,) = torch.autograd.grad(loss.sum(), here)
            delta = delta + 2 * epsilon / 3 * g / g.norm(dim=1, keepdim=True)
            delta = delta * (epsilon / delta.norm(dim=1, keepdim=True)).clamp_max(1)
    found = pgd(NoisyModel(model, 0.2, 8, ATTACK), x, y, epsilon, steps=3)
    torch.testing.assert_close(found, best, rtol=0, atol=1e-5)


# -- the ball ----------------------------------------------------------------------------------------------------------


@patient
@given(
    st.floats(1e-6, 20, allow_subnormal=False),
    st.floats(1e-3, 1.0),
    st.floats(1e-3, 1e3),
    st.booleans(),
    st.sampled_from([None, (0.0, 1.0)]),
)
def test_the_radius_is_kept_in_float64(
    epsilon: float, pixels: float, weights: float, random_start: bool, clip: tuple[float, float] | None
) -> None:
    x, y = batch(7)
    noisy = NoisyModel(linear(weights), 0.0, 1, ATTACK)
    found = pgd(noisy, pixels * x, y, epsilon, steps=4, restarts=2, random_start=random_start, clip=clip)
    assert float(distance(found, pixels * x).max()) <= epsilon
    assert found.isfinite().all()
    if clip:
        assert float(found.min()) >= 0
        assert float(found.max()) <= 1


def test_a_radius_of_zero_moves_nothing() -> None:
    x, y = batch(5)
    assert torch.equal(pgd(NoisyModel(linear(), 0.2, 4, ATTACK), x, y, 0.0, restarts=2), x)


def test_clipped_attacks_are_the_worst_in_the_box_too() -> None:
    """A linear model and a radius beyond the box: every pixel that matters ends at its bound."""
    model, (x, y) = linear(), batch(12)
    away = (1 - 2 * y)[:, None] * (model.weight[1] - model.weight[0]).detach()
    found = pgd(NoisyModel(model, 0.0, 1, ATTACK), x, y, 9.0, step_size=9.0, steps=40, clip=(0.0, 1.0))
    torch.testing.assert_close(found, (away > 0).float(), rtol=0, atol=1e-4)


@patient
@given(st.integers(1, 5), st.floats(0.01, 10), st.floats(1e-6, 1e6))
def test_projection_is_the_nearest_point_of_the_ball(dimension: int, radius: float, scale: float) -> None:
    delta = scale * torch.randn(6, dimension, generator=torch.Generator().manual_seed(dimension))
    inside = L2().project(delta, radius)
    norm = delta.double().norm(dim=1)
    assert torch.equal(inside[norm <= 0.999 * radius], delta[norm <= 0.999 * radius])
    torch.testing.assert_close(inside.double().norm(dim=1), norm.clamp_max(radius), rtol=1e-5, atol=0)
    torch.testing.assert_close(
        inside.double() / inside.double().norm(dim=1, keepdim=True), delta.double() / norm[:, None]
    )
    torch.testing.assert_close(L2().direction(delta).norm(dim=1), torch.ones(6))


def test_random_starts_are_uniform_in_the_ball() -> None:
    """(|delta| / epsilon)^d is uniform: Kolmogorov-Smirnov at 1e-6; the mean direction vanishes at 6 standard errors."""
    from scipy import stats

    delta = L2().random(torch.zeros(4000, 3), 0.7, torch.Generator().manual_seed(0))
    volume = (delta.double().norm(dim=1) / 0.7) ** 3
    assert stats.kstest(volume.numpy(), "uniform").pvalue > 1e-6
    assert float(delta.mean(dim=0).abs().max()) < 6 * float(delta.std()) / math.sqrt(4000)


# -- the loop ----------------------------------------------------------------------------------------------------------


def test_restarts_never_lower_the_loss() -> None:
    model, (x, y) = curved(), batch(20, 4)
    noisy = NoisyModel(model, 0.1, 8, ATTACK)
    losses = [value(noisy, mean_softmax, pgd(noisy, x, y, 0.8, steps=3, restarts=r, seed=4), y) for r in (1, 2, 4)]
    assert (losses[1] >= losses[0] - 1e-5).all()
    assert (losses[2] >= losses[1] - 1e-5).all()
    assert (losses[2] > losses[0] + 1e-4).any()
    assert (losses[0] >= value(noisy, mean_softmax, x, y) - 1e-6).all()  # the start itself is a candidate


def test_the_goal_stops_the_work() -> None:
    """Images beyond the goal are left alone; whether the goal is exceeded is what the whole attack would say."""
    model, (x, y), rows = curved(), batch(24, 4), []

    def counted(inputs: Tensor) -> Tensor:
        rows.append(len(inputs))
        return model(inputs)

    noisy = NoisyModel(counted, 0.0, 1, ATTACK)
    clean, full = value(noisy, mean_softmax, x, y), value(noisy, mean_softmax, pgd(noisy, x, y, 0.5), y)
    rows.clear()
    assert torch.equal(pgd(noisy, x, y, 0.5, goal=float(clean.min()) - 1), x)
    assert rows == [24]
    goal = float(full.median())
    rows.clear()
    found = pgd(noisy, x, y, 0.5, goal=goal)
    assert rows == sorted(rows, reverse=True)
    assert sum(rows) < 21 * 24
    assert torch.equal(value(noisy, mean_softmax, found, y) > goal, full > goal)


def test_the_same_seed_is_the_same_attack() -> None:
    model, (x, y) = curved(), batch(10, 4)
    one, same, other = (smooth_adv(model, x, y, 0.3, 0.5, draws=4, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    noisy = NoisyModel(model, 0.0, 1, ATTACK)
    starts = [pgd(noisy, x, y, 0.3, steps=1, random_start=True, seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[1], starts[2])
    fresh = [smooth_adv(model, x, y, 0.3, 0.5, draws=4) for _ in range(2)]
    assert not torch.equal(*fresh)


@pytest.mark.parametrize("rows", [1, 8, 20, 1000])
def test_chunks_do_not_change_the_attack(rows: int) -> None:
    model, (x, y) = curved(), batch(11, 4)
    noisy = NoisyModel(model, 0.3, 8, ATTACK)
    torch.testing.assert_close(pgd(noisy, x, y, 0.5, rows=rows), pgd(noisy, x, y, 0.5), rtol=0, atol=1e-5)


def test_ids_key_the_attackers_noise() -> None:
    model, (x, y), order = curved(), batch(9, 4), torch.tensor([3, 1, 8, 0, 2, 4, 7, 5, 6])
    noisy, ids = NoisyModel(model, 0.5, 4, ATTACK), torch.arange(9) + 40
    one, two = pgd(noisy, x, y, 0.3, ids=ids), pgd(noisy, x[order], y[order], 0.3, ids=ids[order])
    torch.testing.assert_close(two, one[order], rtol=0, atol=1e-5)
    assert not torch.allclose(one, pgd(noisy, x, y, 0.3), atol=1e-5)


@pytest.mark.parametrize("role", [role for role in ROLES if role != "attack"])
def test_the_attackers_noise_is_its_own(role: str) -> None:
    with pytest.raises(InputError, match=f"must be its own: expected role 'attack', got '{role}'"):
        NoisyModel(linear(), 0.1, 4, Stream(0, role))


def test_the_model_is_left_as_it_was() -> None:
    """Modes and requires_grad of every part, after success and after failure; no gradient is left behind."""
    model, (x, y) = half_trained(), toy(4)
    model[0].bias.requires_grad_(False)
    modes, wanted = flags(model), [p.requires_grad for p in model.parameters()]
    weights = [p.clone() for p in model.parameters()]
    with pytest.warns(KeepcoverWarning, match="train mode"):
        pgd(NoisyModel(model, 0.1, 2, ATTACK), x, y, 0.1, steps=2)
    with pytest.warns(KeepcoverWarning, match="train mode"), pytest.raises(RuntimeError):
        pgd(NoisyModel(model, 0.1, 2, ATTACK), x[:, :, :3, :3], y, 0.1, steps=2)
    assert flags(model) == modes
    assert [p.requires_grad for p in model.parameters()] == wanted
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters()))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"epsilon": -0.1}, "epsilon >= 0, steps >= 1 and restarts >= 1"),
        ({"epsilon": math.inf}, "epsilon >= 0"),
        ({"epsilon": math.nan}, "epsilon >= 0"),
        ({"steps": 0}, "steps >= 1"),
        ({"restarts": 0}, "restarts >= 1"),
        ({"images": torch.full((5, 6), torch.nan)}, "NaN or infinity"),
    ],
)
def test_bad_requests_are_refused(options: dict[str, Any], match: str) -> None:
    x, y = batch(5)
    request = {"images": x, "labels": y, "epsilon": 0.1, **options}
    with pytest.raises(InputError, match=match):
        pgd(NoisyModel(linear(), 0.0, 1, ATTACK), **request)


# -- what is climbed ---------------------------------------------------------------------------------------------------


@patient
@given(st.integers(0, 1000), st.floats(0.1, 60))
def test_mean_softmax_is_the_formula(seed: int, scale: float) -> None:
    """-log of the mean over draws of softmax; in float64, and in float32 without underflow."""
    generator = torch.Generator().manual_seed(seed)
    logits, labels = scale * torch.randn(4, 5, 3, generator=generator), torch.tensor([0, 2, 1, 1])
    expected = -logits.double().softmax(dim=-1)[torch.arange(4), :, labels].mean(dim=1).log()
    torch.testing.assert_close(mean_softmax(logits, labels, torch.arange(4)).double(), expected, rtol=1e-5, atol=1e-5)


CAL, HELD, TEST = toy(150, seed=1), toy(40, seed=2), toy(24, seed=3)
PREDICTORS: dict[str, dict[str, Any]] = {
    "rscp-ptt": {"method": "rscp", "draws": 16},
    "rscp-plain": {"method": RSCP(transform=None), "draws": 16},
    "cp": {"method": "cp", "draws": 1, "sigma": 0.0},
    "aps": {"method": RSCP(transform=None), "draws": 16, "score": "aps"},
    "exact": {"method": "exact", "draws": 16},
    "rcp1": {"method": "rcp1", "draws": 1},
}


def predictor_for(case: str) -> Predictor:
    return calibrate(nearest(), CAL, **{"epsilon": 0.1, "sigma": 0.15, "seed": 1, "holdout": HELD, **PREDICTORS[case]})


@pytest.mark.parametrize("case", list(PREDICTORS))
def test_an_attack_raises_what_it_climbs(case: str) -> None:
    """No image ends below its start, most end well above; the loss belongs to the predictor's rule."""
    predictor = predictor_for(case)
    noisy, loss = NoisyModel(nearest(), predictor.noise, 32, ATTACK), Margin(predictor, ATTACK)
    before = value(noisy, loss, *TEST)
    after = value(noisy, loss, pgd(noisy, *TEST, 0.1, loss=loss), TEST[1])
    assert (after >= before - 1e-5).all()
    assert float((after > before).double().mean()) > 0.7
    if case == "aps":  # piecewise: its gradient misses the jumps
        return
    softmax = value(noisy, loss, pgd(noisy, *TEST, 0.1), TEST[1])
    assert float(after.mean()) >= float(softmax.mean()) - 0.01 * abs(float(softmax.mean()))


def test_the_smoothed_score_is_the_predictors() -> None:
    logits, ids = torch.randn(6, 9, 4), torch.arange(6)
    labels = torch.tensor([0, 1, 2, 3, 0, 1])
    plain = Margin(predictor_for("rscp-plain"), ATTACK)(logits, labels, ids)
    torch.testing.assert_close(plain, hps(logits)[torch.arange(6), :, labels].mean(dim=1))
    predictor = predictor_for("rscp-ptt")
    own, ptt = log_odds(logits)[torch.arange(6), :, labels], predictor.rule.transform
    assert ptt is not None
    smooth = Margin(predictor, ATTACK)(logits, labels, ids)
    rank = torch.searchsorted(ptt.reference, own.contiguous(), right=True)
    low, high = (ptt.table[(rank + step).clamp(0, len(ptt.reference))].mean(dim=1) for step in (0, 1))
    assert (low - 1e-6 <= smooth).all()  # a straight line between neighbouring steps of PTT
    assert (smooth <= high + 1e-6).all()


def test_the_count_margin_is_the_rules() -> None:
    """With the rule's own number of draws: above zero iff more than kappa of the true label's draws exceed t."""
    predictor = predictor_for("exact")
    logits, ids, labels = 3 * torch.randn(200, 16, 4), torch.arange(200), torch.arange(200) % 4
    own = log_odds(logits)[torch.arange(200), :, labels]
    found = Margin(predictor, ATTACK)(logits, labels, ids)
    kappa = predictor.rule.parameters()["kappa"]
    torch.testing.assert_close(found, own.sort(dim=1, descending=True).values[:, kappa] - float(predictor.threshold))
    lost = ~predictor.decide(logits, ids, Stream(0, "test"))[0.1, 0.1][torch.arange(200), labels]
    assert torch.equal(found > 0, lost)
    assert 0 < int(lost.sum()) < 200


def test_the_margin_is_that_of_the_level_asked_for() -> None:
    predictor = calibrate(nearest(), CAL, epsilon=0.1, sigma=0.15, alpha=[0.1, 0.3], method="rcp1", draws=1, seed=1)
    logits, ids, labels = torch.randn(20, 1, 4), torch.arange(20), torch.arange(20) % 4
    own = log_odds(logits)[torch.arange(20), 0, labels]
    for alpha in (0.1, 0.3):
        one = predictor.at(alpha)
        torch.testing.assert_close(Margin(one, ATTACK)(logits, labels, ids), own - float(one.threshold))


def test_losses_have_gradients_everywhere_they_are_needed() -> None:
    """A step function has none: PTT is climbed through its interpolation."""
    for case in PREDICTORS:
        predictor = predictor_for(case)
        logits = torch.randn(8, 5, 4).requires_grad_()
        labels = torch.arange(8) % 4
        loss = Margin(predictor, ATTACK)(logits, labels, torch.arange(8))
        (gradient,) = torch.autograd.grad(loss.sum(), logits)
        assert gradient.isfinite().all()
        assert (gradient != 0).any(), case


# -- without gradients -------------------------------------------------------------------------------------------------


class Queries:
    """A black box that counts what it is asked."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.rows = model, 0

    def __call__(self, images: Tensor) -> Tensor:
        self.rows += len(images)
        return self.model(images).detach()


@patient
@given(
    epsilon=st.floats(0.01, 3),
    steps=st.integers(1, 12),
    sigma=st.sampled_from([0.0, 0.2]),
    clip=st.sampled_from([None, (0.0, 1.0)]),
)
def test_a_search_by_queries_stays_in_the_ball_and_never_loses(
    epsilon: float, steps: int, sigma: float, clip: tuple[float, float] | None
) -> None:
    x, y = batch(7, classes=4)
    box = Queries(curved())
    noisy = NoisyModel(box, sigma, 3, ATTACK)
    found = random_search(noisy, x, y, epsilon, steps=steps, clip=clip)
    assert not found.requires_grad
    assert box.rows == 7 * noisy.rows(x) * (steps + 1)  # one query per image, draw and step, and one for the start
    assert float((found.double() - x.double()).norm(dim=1).max()) <= epsilon
    if clip is not None:
        assert 0 <= float(found.min()) <= float(found.max()) <= 1
    ids = torch.arange(7)
    before, after = (mean_softmax(noisy.outputs(i, ids), y, ids) for i in (x, found))
    assert bool((after >= before - 1e-5).all())


def test_a_long_search_comes_near_the_gradient() -> None:
    """On a linear model in six dimensions, where the worst case is known: nine tenths of its gain, for every image."""
    model, (x, y) = linear(), batch(20)
    noisy = NoisyModel(model, 0.0, 1, ATTACK)
    losses = [
        mean_softmax(noisy.outputs(images, torch.arange(20)), y, torch.arange(20)).detach()
        for images in (
            x,
            random_search(NoisyModel(Queries(model), 0.0, 1, ATTACK), x, y, 0.5, steps=300),
            pgd(noisy, x, y, 0.5),
        )
    ]
    gain = (losses[1] - losses[0]) / (losses[2] - losses[0])
    assert float(gain.min()) > 0.9
    assert float(gain.max()) <= 1 + 1e-4


def test_searches_follow_their_seed_and_use_their_restarts() -> None:
    x, y = batch(9, classes=4)
    noisy = NoisyModel(Queries(curved()), 0.0, 1, ATTACK)
    one, same, other = (random_search(noisy, x, y, 0.5, steps=5, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    ids = torch.arange(9)
    losses = [
        mean_softmax(noisy.outputs(random_search(noisy, x, y, 0.5, steps=5, restarts=r), ids), y, ids).mean()
        for r in (1, 4)
    ]
    assert losses[1] > losses[0]


def test_gradient_attacks_on_a_black_box_say_what_remains() -> None:
    x, y = batch(3, classes=4)
    for attack in (
        lambda: smooth_adv(Queries(curved()), x, y, 0.5, 0.0),
        lambda: smooth_adv(Queries(curved()), x, y, 0.5, 0.2, 2),
    ):
        with pytest.raises(
            InputError, match=r"no gradients.*'random'.*--attack random.*transfer\(surrogate, sigma\).*--surrog"
        ):
            attack()


def test_a_transferred_attack_is_smooth_adv_on_the_surrogate() -> None:
    x, y = batch(5, classes=4)
    attack = transfer(curved(), 0.2, draws=4, steps=3, seed=6)
    assert torch.equal(attack(x, y, 0.3), smooth_adv(curved(), x, y, 0.3, 0.2, 4, steps=3, seed=6))
