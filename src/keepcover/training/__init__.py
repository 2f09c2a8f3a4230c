"""Training under Gaussian noise: what makes a classifier useful to every certificate here."""

from keepcover.training.base import fit_under_noise

__all__ = ["fit_under_noise"]
