"""SGD as a step that can be recorded: what base models and heads are trained with."""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor


class Sgd:
    """SGD with momentum and weight decay whose rate is a tensor, so that a recorded step can be replayed at any rate.

    Example:
        >>> weight = torch.tensor([1.0])
        >>> sgd = Sgd([weight], momentum=0.0, weight_decay=0.0)
        >>> _ = sgd.lr.fill_(0.5)
        >>> sgd.step([torch.tensor([1.0])])
        >>> weight
        tensor([0.5000])
    """

    def __init__(
        self, parameters: Iterable[Tensor], momentum: float, weight_decay: float, nesterov: bool = False
    ) -> None:
        self.parameters = list(parameters)
        self.momentum, self.weight_decay, self.nesterov = momentum, weight_decay, nesterov
        self.velocity = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.lr = torch.zeros((), device=self.parameters[0].device)

    @torch.no_grad()
    def step(self, gradients: tuple[Tensor, ...] | list[Tensor]) -> None:
        """Move the parameters against the gradients, in place."""
        slopes = torch._foreach_add(gradients, self.parameters, alpha=self.weight_decay)
        torch._foreach_mul_(self.velocity, self.momentum)
        torch._foreach_add_(self.velocity, slopes)
        moves = torch._foreach_add(slopes, self.velocity, alpha=self.momentum) if self.nesterov else self.velocity
        torch._foreach_sub_(self.parameters, torch._foreach_mul(moves, self.lr))

    def state(self) -> dict[str, Tensor]:
        return {f"velocity.{i}": value for i, value in enumerate(self.velocity)}


class Replayed:
    """A step without arguments, recorded as a CUDA graph at its first call on a GPU and replayed from then on.

    Small networks spend more time launching kernels than running them; a replay launches once. Elsewhere the step is
    called as it is. ``state`` names every tensor a step changes: recording runs the step a few times and must leave no
    trace in them, nor in the random numbers.
    """

    def __init__(
        self, step: Callable[[], None], state: Callable[[], Mapping[str, Tensor]], device: torch.device
    ) -> None:
        self.step, self.state, self.device = step, state, device
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if self.device.type != "cuda":
            self.step()
            return
        if self._graph is None:
            self._graph = self._record()
        self._graph.replay()

    def _record(self) -> torch.cuda.CUDAGraph:
        # Detached: a clone that remembers its parameter would tie the recording to the stream it was made on.
        kept = {name: value.detach().clone() for name, value in self.state().items()}
        random = torch.cuda.get_rng_state(self.device)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        copy_into(self.state(), kept)
        torch.cuda.set_rng_state(random, self.device)
        return graph


@torch.no_grad()
def copy_into(target: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> None:
    """Copy values in place: a recorded step holds on to these very tensors."""
    for name, value in target.items():
        value.copy_(source[name])


def epoch_key(seed: int, epoch: int) -> int:
    """The seed of one epoch: randomness depends on (seed, epoch) alone, so a resumed run takes the same steps."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{epoch}".encode()).digest()[:6], "little")
