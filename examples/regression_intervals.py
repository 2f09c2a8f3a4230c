"""Intervals for a number that hold when the features are attacked: two quantiles, trained and certified under noise."""

import torch

import keepcover

torch.manual_seed(0)
x = torch.rand(3000, 2)
y = x.sum(dim=1) + (0.05 + 0.3 * x[:, 0]) * torch.randn(3000)  # noisier to the right

model = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.SiLU(), torch.nn.Linear(64, 2))
optimiser, levels = torch.optim.Adam(model.parameters(), 0.01), torch.tensor([0.05, 0.95])
for _ in range(300):
    short = y[:1000, None] - model(x[:1000] + 0.05 * torch.randn(1000, 2))
    optimiser.zero_grad()
    torch.maximum(levels * short, (levels - 1) * short).mean().backward()  # the pinball loss
    optimiser.step()

predictor = keepcover.calibrate(
    model, (x[1000:2500], y[1000:2500]), task="regression", score="quantiles", epsilon=0.05, sigma=0.05
)
print(predictor.guarantee)
intervals = predictor.predict(x[2500:])
print(intervals.measure(y[2500:]))
narrow, wide = intervals.length[x[2500:, 0] < 0.5].mean(), intervals.length[x[2500:, 0] >= 0.5].mean()
print(f"mean length {narrow:.2f} on the left, {wide:.2f} on the right")
print(keepcover.audit(predictor, (x[2500:], y[2500:]), steps=5, progress=False))
