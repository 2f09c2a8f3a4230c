"""Optimisers whose steps can be recorded as CUDA graphs, averages of weights, and the recording."""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property

import torch
from torch import Tensor

Step = Callable[[], None]
State = Mapping[str, Tensor]


class Sgd:
    """SGD with momentum and weight decay whose rate is a tensor, so that a recorded step can be replayed at any rate.

    It is here because torch's own reads such a rate on the host, which a recorded CUDA graph cannot.

    Example:
        >>> weight = torch.tensor([1.0])
        >>> sgd = Sgd([weight], momentum=0.0, weight_decay=0.0, nesterov=False)
        >>> _ = sgd.lr.fill_(0.5)
        >>> sgd.step([torch.tensor([1.0])])
        >>> weight
        tensor([0.5000])
    """

    def __init__(self, parameters: Iterable[Tensor], momentum: float, weight_decay: float, nesterov: bool) -> None:
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


class AdamW:
    """Adam with decoupled weight decay, for the same reason as :class:`Sgd`: rate and count of steps are tensors."""

    def __init__(self, parameters: Iterable[Tensor], weight_decay: float) -> None:
        self.parameters, self.weight_decay = list(parameters), weight_decay
        self.mean, self.square = ([torch.zeros_like(p) for p in self.parameters] for _ in range(2))
        self.lr, self.count = (torch.zeros((), device=self.parameters[0].device) for _ in range(2))

    @torch.no_grad()
    def step(self, gradients: tuple[Tensor, ...] | list[Tensor]) -> None:
        """Move the parameters against the gradients, in place."""
        self.count += 1
        torch._foreach_lerp_(self.mean, gradients, 0.1)
        torch._foreach_mul_(self.square, 0.999)
        torch._foreach_addcmul_(self.square, gradients, gradients, 0.001)
        sizes = torch._foreach_sqrt(self.square)
        torch._foreach_div_(sizes, (1 - 0.999**self.count).sqrt())
        torch._foreach_add_(sizes, 1e-8)
        torch._foreach_mul_(self.parameters, 1 - self.lr * self.weight_decay)
        moves = torch._foreach_div(self.mean, sizes)
        torch._foreach_sub_(self.parameters, torch._foreach_mul(moves, self.lr / (1 - 0.9**self.count)))

    def state(self) -> dict[str, Tensor]:
        each = {f"{name}.{i}": value for name in ("mean", "square") for i, value in enumerate(getattr(self, name))}
        return {**each, "count": self.count}


class Muon:
    """Momentum whose every step turns the kernels of convolutions by one angle, in all directions alike; :class:`Sgd` for the rest.

    A kernel [o, i, h, w] is a matrix W [o, i h w]. Of the gradient and its velocity together, as Nesterov takes them, only the
    nearest orthogonal matrix O is used (Newton and Schulz's iteration, Jordan et al. 2024), and the length of W stays what it was:

        W <- |W| (W - lr |W| O / |O|) / | W - lr |W| O / |O| |

    Where batch norm follows, the length of a kernel means nothing, so lr is what there is to choose: the angle of a step, or the
    most it can be. Kernels without batch norm behind them keep the length they start with: take another optimiser for those. What
    has no direction (a kernel of zeros, or of one output) and what is no kernel moves by SGD at four times that rate, and alone
    decays.

    Example:
        >>> kernel, shift = torch.eye(2).view(2, 2, 1, 1).clone(), torch.zeros(2)
        >>> muon = Muon([kernel, shift], momentum=0.0, weight_decay=0.0)
        >>> _ = muon.lr.fill_(0.5)
        >>> muon.step([torch.tensor([[0.0, -3.0], [3.0, 0.0]]).view(2, 2, 1, 1), torch.zeros(2)])
        >>> kernel.view(2, 2)  # turned by atan(1/2)
        tensor([[ 0.8944,  0.4472],
                [-0.4472,  0.8944]])
    """

    def __init__(self, parameters: Iterable[Tensor], momentum: float, weight_decay: float) -> None:
        self.parameters, self.momentum = list(parameters), momentum
        self.kernels: dict[torch.Size, list[int]] = {}  # those of one shape are orthogonalised together
        turned = [p.ndim == 4 and len(p) > 1 and bool(p.any()) for p in self.parameters]
        for number, parameter in enumerate(self.parameters):
            if turned[number]:
                self.kernels.setdefault(parameter.shape, []).append(number)
        self.velocity = {i: torch.zeros_like(self.parameters[i]) for same in self.kernels.values() for i in same}
        self.others = [i for i, turns in enumerate(turned) if not turns]
        rest = [self.parameters[i] for i in self.others]
        self.rest = Sgd(rest, momentum, weight_decay, nesterov=True) if rest else None
        self.lr = torch.zeros((), device=self.parameters[0].device)

    @torch.no_grad()
    def step(self, gradients: tuple[Tensor, ...] | list[Tensor]) -> None:
        """Move the parameters against the gradients, in place."""
        for same in self.kernels.values():
            kernels, velocity, slopes = ([of[i] for i in same] for of in (self.parameters, self.velocity, gradients))
            torch._foreach_mul_(velocity, self.momentum)
            torch._foreach_add_(velocity, slopes)
            ahead = torch._foreach_add(slopes, velocity, alpha=self.momentum)
            turn = unit(orthogonal(torch.stack(ahead).flatten(2)))
            weights = torch.stack(kernels).flatten(2)
            length = weights.norm(dim=(1, 2), keepdim=True)
            moved = length * unit(weights - self.lr * length * turn)
            torch._foreach_copy_(kernels, moved.view(-1, *kernels[0].shape).unbind())
        if self.rest:
            self.rest.lr.copy_(4 * self.lr)
            self.rest.step([gradients[i] for i in self.others])

    def state(self) -> dict[str, Tensor]:
        rest = self.rest.state() if self.rest else {}
        return {**{f"kernel.{i}": value for i, value in self.velocity.items()}, **rest}


def unit(matrices: Tensor) -> Tensor:
    """Each matrix [n, r, c] with length 1."""
    return matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-12)


def orthogonal(matrices: Tensor) -> Tensor:
    """Nearly the nearest semi-orthogonal matrix of each [n, r, c]: five steps bring singular values from a 300th of the matrix's
    length upwards to 0.65 to 1.25; smaller ones stay smaller.

    Example:
        >>> values = torch.linalg.svdvals(orthogonal(torch.diag(torch.tensor([3.0, 2.0, 1.0]))[None]).float())
        >>> bool((values > 0.6).all() and (values < 1.3).all())
        True
    """
    x = unit(matrices.float()).bfloat16()
    if tall := matrices.shape[1] > matrices.shape[2]:
        x = x.mT
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (2.0315 * square @ square - 4.775 * square) @ x
    return (x.mT if tall else x).to(matrices.dtype)


def clipped(gradients: tuple[Tensor, ...], length: float) -> list[Tensor]:
    """Gradients scaled down to this length together, where they are longer.

    Example:
        >>> clipped((torch.tensor([3.0]), torch.tensor([4.0])), 1.0)
        [tensor([0.6000]), tensor([0.8000])]
    """
    found = torch.stack(torch._foreach_norm(gradients)).norm()
    return list(torch._foreach_mul(gradients, (length / (found + 1e-12)).clamp(max=1.0)))


class Average:
    """An exponential average of the floating-point tensors of ``state``, kept beside them."""

    def __init__(self, state: State) -> None:
        self.values = {name: value.detach().clone() for name, value in state.items()}
        self.smooth = [name for name, value in self.values.items() if value.is_floating_point()]
        self.weight = torch.ones((), device=next(iter(self.values.values())).device)

    def set(self, done: int, window: float) -> None:
        """The weight of the next value: 1/window in the long run, more while few values were seen."""
        self.weight.fill_(max(1 / max(window, 1.0), 9 / (10 + done)))

    @torch.no_grad()
    def step(self, state: State) -> None:
        """Move towards ``state``."""
        mine = [self.values[name] for name in self.smooth]
        steps = torch._foreach_sub([state[name] for name in self.smooth], mine)
        torch._foreach_add_(mine, torch._foreach_mul(steps, self.weight))

    def state(self) -> dict[str, Tensor]:
        return {f"average.{name}": value for name, value in self.values.items()}


class Replayed:
    """A step without arguments, recorded as a CUDA graph at its first call on a GPU and replayed from then on.

    Small networks spend more time launching kernels than running them; a replay launches once. Elsewhere the step is
    called as it is. ``state`` names every tensor a step changes: the first call rehearses the step and must leave no trace in
    them, nor in the random numbers. Where the rehearsal fails, ``simplify`` may make the step simpler for another try.
    """

    def __init__(
        self, step: Step, state: Callable[[], State], device: torch.device, simplify: Callable[[Exception], bool]
    ) -> None:
        self.step, self.state, self.device, self.simplify = step, state, device, simplify

    def __call__(self) -> None:
        self._rehearsed()

    @cached_property
    def _rehearsed(self) -> Step:
        # Detached: a clone that remembers its parameter would tie the recording to the stream it was made on.
        kept = {name: value.detach().clone() for name, value in self.state().items()}
        devices = [self.device] if self.device.type == "cuda" else []
        while True:
            try:
                with torch.random.fork_rng(devices):
                    if devices:
                        return self._record()
                    self.step()
                    return self.step
            except Exception as error:  # a compiler may raise anything
                if not self.simplify(error):
                    raise
            finally:
                copy_into(self.state(), kept)

    def _record(self) -> Step:
        cudnn = torch.backends.cudnn
        # The recorded convolutions run often: the fastest are worth a search.
        chooses, cudnn.benchmark = cudnn.benchmark, True
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(side):
                for _ in range(3):
                    self.step()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.step()
        finally:
            cudnn.benchmark = chooses
        return graph.replay


@torch.no_grad()
def copy_into(target: State, source: State) -> None:
    """Copy values in place: a recorded step holds on to these very tensors."""
    for name, value in target.items():
        value.copy_(source[name])


def epoch_key(seed: int, epoch: int) -> int:
    """The seed of one epoch: randomness depends on (seed, epoch) alone, so a resumed run takes the same steps."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{epoch}".encode()).digest()[:6], "little")
