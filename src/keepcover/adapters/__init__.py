"""Models from elsewhere: ONNX files, ``torch.export`` programs, Hugging Face folders, estimators with ``predict_proba``.

Each is a callable images -> logits with a ``fingerprint``, for :func:`keepcover.calibrate` and :func:`keepcover.load`. The
scikit-learn estimator is in :mod:`keepcover.adapters.sklearn`.
"""

from keepcover.adapters.exported import ExportedClassifier
from keepcover.adapters.hugging_face import HuggingFaceClassifier, from_hugging_face
from keepcover.adapters.onnx import OnnxClassifier
from keepcover.adapters.proba import ProbabilityClassifier, from_predict_proba

__all__ = [
    "ExportedClassifier",
    "HuggingFaceClassifier",
    "OnnxClassifier",
    "ProbabilityClassifier",
    "from_hugging_face",
    "from_predict_proba",
]
