"""Models that are not PyTorch modules: ONNX files, ``torch.export`` programs, estimators with ``predict_proba``.

Each is a callable images -> logits with a ``fingerprint``, for :func:`holdfast.calibrate` and :func:`holdfast.load`. The
scikit-learn estimator is in :mod:`holdfast.adapters.sklearn`.
"""

from holdfast.adapters.exported import ExportedClassifier
from holdfast.adapters.onnx import OnnxClassifier
from holdfast.adapters.proba import ProbabilityClassifier, from_predict_proba

__all__ = ["ExportedClassifier", "OnnxClassifier", "ProbabilityClassifier", "from_predict_proba"]
