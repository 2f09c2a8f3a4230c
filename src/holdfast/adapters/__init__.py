"""Models from elsewhere: ONNX files, ``torch.export`` programs, Hugging Face folders, estimators with ``predict_proba``.

Each is a callable images -> logits with a ``fingerprint``, for :func:`holdfast.calibrate` and :func:`holdfast.load`. The
scikit-learn estimator is in :mod:`holdfast.adapters.sklearn`.
"""

from holdfast.adapters.exported import ExportedClassifier
from holdfast.adapters.hugging_face import HuggingFaceClassifier, from_hugging_face
from holdfast.adapters.onnx import OnnxClassifier
from holdfast.adapters.proba import ProbabilityClassifier, from_predict_proba

__all__ = [
    "ExportedClassifier", "HuggingFaceClassifier", "OnnxClassifier", "ProbabilityClassifier", "from_hugging_face", "from_predict_proba",
]  # fmt: skip
