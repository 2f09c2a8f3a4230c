"""keepcover: prediction sets that keep their coverage under attack.

predictor = keepcover.calibrate(model, (images, labels), alpha=0.1, epsilon=0.125, sigma=0.25)
sets = predictor.predict(new_images)
"""

from keepcover import bounds, scores
from keepcover.attacks import Audit, audit
from keepcover.bounds import conformal_quantile
from keepcover.engine.fingerprint import fingerprint
from keepcover.engine.smoother import Smoother
from keepcover.errors import InputError, KeepcoverWarning
from keepcover.evaluation import evaluate
from keepcover.guarantee import Guarantee
from keepcover.methods import METHODS
from keepcover.noise import Gaussian, Noise, Stream, Threat
from keepcover.prediction import Predictor, calibrate, calibrate_outputs, split_conformal
from keepcover.prediction.artifact import load
from keepcover.promises import Promise
from keepcover.scores import APS, HPS, PTT, RAPS, CustomScore, Draws, Score
from keepcover.store import LogitStore
from keepcover.tasks import Classification, Evaluation, PredictionSets, Task

__version__ = "0.2.0"

__all__ = [
    "APS",
    "HPS",
    "METHODS",
    "PTT",
    "RAPS",
    "Audit",
    "Classification",
    "CustomScore",
    "Draws",
    "Evaluation",
    "Gaussian",
    "Guarantee",
    "InputError",
    "KeepcoverWarning",
    "LogitStore",
    "Noise",
    "PredictionSets",
    "Predictor",
    "Promise",
    "Score",
    "Smoother",
    "Stream",
    "Task",
    "Threat",
    "audit",
    "bounds",
    "calibrate",
    "calibrate_outputs",
    "conformal_quantile",
    "evaluate",
    "fingerprint",
    "load",
    "scores",
    "split_conformal",
]
