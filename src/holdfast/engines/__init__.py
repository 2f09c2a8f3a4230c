"""Where smoothing runs: this process (:meth:`holdfast.LogitStore.fill`), or a Ray cluster (:mod:`holdfast.engines.ray`)."""

from holdfast.engines.cluster import Cluster, ClusterFilled

__all__ = ["Cluster", "ClusterFilled"]
