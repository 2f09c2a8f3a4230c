"""Scores of candidates under noise: HPS, APS, RAPS and yours; PTT; and the draws that rules read."""

from keepcover.scores.draws import Draws, Reading
from keepcover.scores.scores import (
    APS,
    HPS,
    RAPS,
    SCORES,
    CustomScore,
    Score,
    aps,
    as_logits,
    get_score,
    hps,
    log_odds,
    log_odds_of,
    raps,
    top_label,
)
from keepcover.scores.tally import GRID, Items, Tally
from keepcover.scores.transforms import PTT, Steps

__all__ = [
    "APS",
    "GRID",
    "HPS",
    "PTT",
    "RAPS",
    "SCORES",
    "CustomScore",
    "Draws",
    "Items",
    "Reading",
    "Score",
    "Steps",
    "Tally",
    "aps",
    "as_logits",
    "get_score",
    "hps",
    "log_odds",
    "log_odds_of",
    "raps",
    "top_label",
]
