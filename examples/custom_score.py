"""A regression-style score: how far the label's bin lies from the predicted value, in a model that bins a number."""

import torch
from torch import Tensor, nn

import keepcover

# The "image" is a vector whose mean is the target in [0, 1]; the classifier votes for one of 20 bins of it.
BINS = 20
centres = (torch.arange(BINS) + 0.5) / BINS


class Binned(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        value = inputs.flatten(1).mean(dim=1, keepdim=True)
        return -200 * (value - centres) ** 2


def distance(logits: Tensor) -> Tensor:
    """|bin centre - expected value|: unbounded scores are fine for the exact certificates."""
    expected = (logits.softmax(dim=-1) * centres).sum(dim=-1, keepdim=True)
    return (centres - expected).abs()


torch.manual_seed(0)
targets = torch.rand(2000)
inputs = (targets[:, None] + 0.3 * torch.randn(2000, 64)).view(-1, 1, 8, 8).clamp(-0.7, 1.7)
labels = (targets * BINS).long().clamp_max(BINS - 1)

predictor = keepcover.calibrate(
    Binned(),
    (inputs[:1500], labels[:1500]),
    epsilon=0.25,
    sigma=0.25,
    score=distance,
    fingerprint="binned-mean-v1",
    class_names=[f"{c:.3f}" for c in centres],
)
sets = predictor.predict(inputs[1500:])
print(sets)
print(sets.measure(labels[1500:]))
