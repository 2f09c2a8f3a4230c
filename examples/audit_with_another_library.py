"""Audit a predictor with an attack from another library: foolbox or torchattacks where installed, a home-made one otherwise."""

import torch
from torch import Tensor, nn

import keepcover
from keepcover.data import digits
from keepcover.models import SmallCNN
from keepcover.training import fit_under_noise

SIGMA, EPSILON = 0.5, 0.5


class Smoothed(nn.Module):
    """Log of the mean softmax over noise: what attack libraries, which know nothing of noise, should differentiate."""

    def __init__(self, model: nn.Module, draws: int = 8) -> None:
        super().__init__()
        self.model, self.draws = model, draws

    def forward(self, images: Tensor) -> Tensor:
        noisy = images[:, None] + SIGMA * torch.randn(len(images), self.draws, *images.shape[1:])
        probs = self.model(noisy.flatten(0, 1)).softmax(dim=-1).view(len(images), self.draws, -1)
        return probs.mean(dim=1).log()


def with_foolbox(images: Tensor, labels: Tensor, epsilon: float) -> Tensor:
    import foolbox

    attack = foolbox.attacks.L2PGD(steps=10)
    target = foolbox.PyTorchModel(Smoothed(model).eval(), bounds=(-10, 11))
    return attack(target, images, labels, epsilons=epsilon * (1 - 1e-6))[1]


def with_torchattacks(images: Tensor, labels: Tensor, epsilon: float) -> Tensor:
    import torchattacks

    return torchattacks.PGDL2(Smoothed(model).eval(), eps=epsilon * (1 - 1e-6), alpha=epsilon / 5, steps=10)(
        images, labels
    )


def one_gradient_step(images: Tensor, labels: Tensor, epsilon: float) -> Tensor:
    x = images.clone().requires_grad_(True)
    loss = nn.functional.nll_loss(Smoothed(model)(x), labels)
    (gradient,) = torch.autograd.grad(loss, x)
    return images + epsilon * (1 - 1e-6) * gradient / gradient.flatten(1).norm(dim=1).clamp_min(1e-12).view(-1, 1, 1, 1)


def available() -> dict:
    attacks = {"one step": one_gradient_step}
    for name, attack in (("foolbox", with_foolbox), ("torchattacks", with_torchattacks)):
        try:
            __import__(name)
            attacks[name] = attack
        except ImportError:
            print(f"{name} is not installed, skipping it")
    return attacks


torch.manual_seed(0)
train, calibration, test = digits().split(800, 500, 100)
model = fit_under_noise(SmallCNN(), *train.pair, sigma=SIGMA)
predictor = keepcover.calibrate(model, calibration.pair, epsilon=EPSILON, sigma=SIGMA, draws=8)
print(keepcover.audit(predictor, test.pair, attacks=available()))
