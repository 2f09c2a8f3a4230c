"""Calibrate a model or its noisy outputs, predict with guarantees, save and load."""

from keepcover.prediction.calibration import calibrate, calibrate_outputs
from keepcover.prediction.plain import split_conformal
from keepcover.prediction.predictor import Predictor

__all__ = ["Predictor", "calibrate", "calibrate_outputs", "split_conformal"]
