"""The same application on Ray Serve: several replicas, several GPUs, one address. Needs the extra ``serve-ray``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from keepcover.errors import InputError, install
from keepcover.serve.app import Deployment

if TYPE_CHECKING:
    from fastapi import FastAPI


def ray_application(
    deployment: Deployment, *, replicas: int = 1, cpus: float = 1.0, gpus: float = 0.0, name: str = "keepcover"
) -> Any:
    """A Ray Serve application; ``ray.serve.run`` starts it.

    Every replica loads its own model and keeps its own queue, and every answer draws its noise from the operating system
    of the machine it runs on. Ray sends a replica twice what it has room for, so that a full replica refuses with its own
    503 and Retry-After; what waits in Ray's proxies beyond that is bounded too, and refused by Ray with a plain 503.

    Args:
        deployment: what to serve; the files it names must exist on every node.
        replicas: how many.
        cpus, gpus: what Ray reserves for each.
        name: of the deployment, in Ray's dashboard and metrics.
    """
    try:
        from ray import serve  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        raise InputError(f"replicas need Ray: {install('serve-ray')}") from None

    def build() -> FastAPI:
        return deployment.build()

    settings = deployment.settings
    room = settings.max_queue + settings.max_batch
    ingress: Any = serve.deployment(
        serve.ingress(build)(),
        name=name,
        num_replicas=replicas,
        max_ongoing_requests=2 * room,
        max_queued_requests=room,
        graceful_shutdown_timeout_s=settings.shutdown_timeout,
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
    )
    return ingress.bind()
