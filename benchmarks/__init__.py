"""Measurements of speed and memory, each beside something to compare it with. ``python benchmarks/run.py`` runs them."""
