"""Where smoothing runs: this process (:meth:`keepcover.LogitStore.fill`), or a Ray cluster (:mod:`keepcover.store.cluster.ray`)."""

from keepcover.store.cluster.cluster import Cluster, ClusterFilled

__all__ = ["Cluster", "ClusterFilled"]
