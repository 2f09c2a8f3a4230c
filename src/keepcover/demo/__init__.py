"""The demo: train, calibrate and attack every method on handwritten digits."""
