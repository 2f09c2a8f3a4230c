"""keepcover: prediction sets that keep their coverage under attack.

predictor = keepcover.calibrate(model, (images, labels), alpha=0.1, epsilon=0.125, sigma=0.25)
sets = predictor.predict(new_images)
"""

from keepcover import bounds, scores
from keepcover.advice import Check, check
from keepcover.attacks import Audit, audit
from keepcover.bounds import conformal_quantile
from keepcover.engine.fingerprint import fingerprint
from keepcover.engine.smoother import Smoother
from keepcover.errors import InputError, KeepcoverWarning
from keepcover.evaluation import evaluate
from keepcover.guarantee import Guarantee
from keepcover.methods import METHODS
from keepcover.models.denoiser import denoised
from keepcover.monitoring import Monitor, monitor
from keepcover.noise import Ablation, Bands, Gaussian, Laplace, Noise, RandomBands, Stream, Threat, Uniform
from keepcover.pages.evidence import Evidence, evidence
from keepcover.prediction import Predictor, calibrate, calibrate_outputs, split_conformal
from keepcover.prediction.artifact import load
from keepcover.promises import Promise
from keepcover.scores import APS, HPS, PTT, RAPS, CustomScore, Draws, Score
from keepcover.store import LogitStore
from keepcover.tasks import (
    Classification,
    Evaluation,
    Loss,
    Multilabel,
    PixelSets,
    PredictionIntervals,
    PredictionSets,
    Regression,
    RiskEvaluation,
    Segmentation,
    Task,
)

__version__ = "0.2.0"

__all__ = [
    "APS",
    "HPS",
    "METHODS",
    "PTT",
    "RAPS",
    "Ablation",
    "Audit",
    "Bands",
    "Check",
    "Classification",
    "CustomScore",
    "Draws",
    "Evaluation",
    "Evidence",
    "Gaussian",
    "Guarantee",
    "InputError",
    "KeepcoverWarning",
    "Laplace",
    "LogitStore",
    "Loss",
    "Monitor",
    "Multilabel",
    "Noise",
    "PixelSets",
    "PredictionIntervals",
    "PredictionSets",
    "Predictor",
    "Promise",
    "RandomBands",
    "Regression",
    "RiskEvaluation",
    "Score",
    "Segmentation",
    "Smoother",
    "Stream",
    "Task",
    "Threat",
    "Uniform",
    "audit",
    "bounds",
    "calibrate",
    "calibrate_outputs",
    "check",
    "conformal_quantile",
    "denoised",
    "evaluate",
    "evidence",
    "fingerprint",
    "load",
    "monitor",
    "scores",
    "split_conformal",
]
