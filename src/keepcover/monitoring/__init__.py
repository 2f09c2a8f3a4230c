"""Monitoring in production: whether misses come more often than promised, and whether queries drift."""

from keepcover.monitoring.monitor import Monitor, monitor
from keepcover.monitoring.outcomes import Outcomes
from keepcover.monitoring.queries import Queries

__all__ = ["Monitor", "Outcomes", "Queries", "monitor"]
