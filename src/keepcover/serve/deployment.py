"""A predictor file, the model under it and settings: all that a process needs to build the service."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from fastapi import FastAPI

from keepcover.serve.app import create_app
from keepcover.specs import load_predictor
from keepcover.web.settings import Settings


@dataclass(frozen=True)
class Deployment:
    """Names, not objects: it travels to worker processes and to Ray replicas, and each loads its own model.

    Args:
        predictor: what :meth:`Predictor.save` wrote.
        model: see :func:`keepcover.specs.load_model`.
        weights: checkpoint of a built-in model.
        fingerprint: the string given at calibration for a model that is not an ``nn.Module``.
        device: where the model runs; its own choice by default.
        model_output: what an ONNX file returns, ``logits`` or ``probabilities``.
        threads: CPU threads of torch in each process.
        settings: limits and policies.
    """

    predictor: Path
    model: str
    weights: str | Path | None = None
    fingerprint: str | None = None
    device: str | None = None
    model_output: str = "logits"
    threads: int | None = None
    settings: Settings = field(default_factory=Settings)

    def build(self) -> FastAPI:
        """Load the model in this process and build the application around it."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        how = (self.weights, self.device, self.model_output)
        predictor = load_predictor(self.predictor, self.model, *how, fingerprint=self.fingerprint)
        return create_app(predictor, self.settings)
