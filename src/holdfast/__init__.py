"""holdfast: prediction sets that keep their coverage under attack.

predictor = holdfast.calibrate(model, (images, labels), alpha=0.1, epsilon=0.125, sigma=0.25)
sets = predictor.predict(new_images)
"""

from holdfast import bounds, scores, transforms
from holdfast.artifact import load
from holdfast.audit import Audit, audit
from holdfast.calibration import calibrate, conformalize
from holdfast.conformal import Guarantee, conformal_quantile
from holdfast.draws import Draws
from holdfast.errors import HoldfastWarning, InputError
from holdfast.fingerprint import fingerprint
from holdfast.methods import METHODS
from holdfast.metrics import Evaluation, evaluate
from holdfast.noise import Stream
from holdfast.plain import split_conformal
from holdfast.predictor import Predictor
from holdfast.scores import APS, HPS, RAPS, CustomScore, Score
from holdfast.sets import PredictionSets
from holdfast.smoothing import Smoother
from holdfast.store import LogitStore
from holdfast.transforms import PTT

__version__ = "0.1.0"

__all__ = [
    "APS",
    "HPS",
    "METHODS",
    "PTT",
    "RAPS",
    "Audit",
    "CustomScore",
    "Draws",
    "Evaluation",
    "Guarantee",
    "HoldfastWarning",
    "InputError",
    "LogitStore",
    "PredictionSets",
    "Predictor",
    "Score",
    "Smoother",
    "Stream",
    "audit",
    "bounds",
    "calibrate",
    "conformal_quantile",
    "conformalize",
    "evaluate",
    "fingerprint",
    "load",
    "scores",
    "split_conformal",
    "transforms",
]  # fmt: skip
