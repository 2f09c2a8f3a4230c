"""holdfast: prediction sets that keep their coverage under attack."""

__version__ = "0.1.0"
