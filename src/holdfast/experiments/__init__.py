"""Experiments: methods over random splits of precomputed noisy logits, and the demo."""
