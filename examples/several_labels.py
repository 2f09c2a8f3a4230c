"""Lists of labels that miss few of what is there, under attack: two of scikit-learn's digits in one image."""

import torch

import keepcover
from keepcover.data import digits


def pairs(data, count, seed):
    """Two random digits side by side, and which digits they are."""
    rows = torch.randint(len(data), (count, 2), generator=torch.Generator().manual_seed(seed))
    truth = torch.nn.functional.one_hot(data.labels[rows], 10).bool().any(dim=1)
    return torch.cat([data.images[rows[:, 0]], data.images[rows[:, 1]]], dim=3), truth


torch.manual_seed(0)
train, rest = digits().split(900, -1)
model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(16 * 8 * 16, 10)
)
optimiser = torch.optim.Adam(model.parameters(), 0.002)
images, truth = pairs(train, 4000, 1)
for _ in range(3):
    for rows in torch.randperm(4000).split(100):  # under the noise that it is certified with
        logits = model(images[rows] + 0.5 * torch.randn(100, 1, 8, 16))
        optimiser.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(logits, truth[rows].float()).backward()
        optimiser.step()

predictor = keepcover.calibrate(model, pairs(rest, 800, 2), task="multilabel", epsilon=0.25, sigma=0.5, draws=8)
print(predictor.guarantee)

images, truth = pairs(rest, 200, 3)
sets = predictor.predict(images)
print(sets[:4])
print(sets.measure(truth))
print(keepcover.audit(predictor, (images[:50], truth[:50]), steps=5, draws=8, progress=False))
