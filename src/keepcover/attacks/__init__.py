"""Attacks on smoothed models, and audits that compare what predictors promise with what attacks leave of it."""

from keepcover.attacks.audit import Audit, audit
from keepcover.attacks.pgd import Margin, NoisyModel, mean_softmax, pgd, random_search, smooth_adv, transfer

__all__ = ["Audit", "Margin", "NoisyModel", "audit", "mean_softmax", "pgd", "random_search", "smooth_adv", "transfer"]
