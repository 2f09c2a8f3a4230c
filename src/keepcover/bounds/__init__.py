"""The arithmetic of certificates, in float64 on a few numbers: quantiles, concentration, laws, the hull, the majorant.

Bounds know a :class:`keepcover.noise.Threat` and its ``up``, never epsilon / sigma, and err on the safe side of rounding.
"""

from keepcover.bounds.concentration import bernstein, clopper_pearson, dkw, hoeffding, hoeffding_bentkus, mean_interval
from keepcover.bounds.counts import Counts
from keepcover.bounds.hull import hull_bracket, hull_curve, hull_level, hull_levels
from keepcover.bounds.laws import (
    binomial_tail,
    conformal_law,
    covered_at_most,
    covered_at_most_given,
    hypergeometric,
    risk_control_law,
)
from keepcover.bounds.majorant import is_majorant, majorant, majorant_cost, majorant_gap
from keepcover.bounds.quantile import conformal_quantile, conformal_rank, exact_level, order_statistic

__all__ = [
    "Counts",
    "bernstein",
    "binomial_tail",
    "clopper_pearson",
    "conformal_law",
    "conformal_quantile",
    "conformal_rank",
    "covered_at_most",
    "covered_at_most_given",
    "dkw",
    "exact_level",
    "hoeffding",
    "hoeffding_bentkus",
    "hull_bracket",
    "hull_curve",
    "hull_level",
    "hull_levels",
    "hypergeometric",
    "is_majorant",
    "majorant",
    "majorant_cost",
    "majorant_gap",
    "mean_interval",
    "order_statistic",
    "risk_control_law",
]
