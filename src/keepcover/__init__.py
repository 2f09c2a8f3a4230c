"""keepcover: prediction sets that keep their coverage under attack.

predictor = keepcover.calibrate(model, (images, labels), alpha=0.1, epsilon=0.125, sigma=0.25)
sets = predictor.predict(new_images)
"""

from keepcover.attacks.audit import Audit, audit
from keepcover.bounds import bounds
from keepcover.engine.fingerprint import fingerprint
from keepcover.engine.smoother import Smoother
from keepcover.errors import InputError, KeepcoverWarning
from keepcover.guarantee import Guarantee, conformal_quantile
from keepcover.methods import METHODS
from keepcover.noise.stream import Stream
from keepcover.prediction.artifact import load
from keepcover.prediction.calibration import calibrate, conformalize
from keepcover.prediction.plain import split_conformal
from keepcover.prediction.predictor import Predictor
from keepcover.scores import scores, transforms
from keepcover.scores.draws import Draws
from keepcover.scores.scores import APS, HPS, RAPS, CustomScore, Score
from keepcover.scores.transforms import PTT
from keepcover.store import LogitStore
from keepcover.tasks.metrics import Evaluation, evaluate
from keepcover.tasks.sets import PredictionSets

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
    "KeepcoverWarning",
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
]
