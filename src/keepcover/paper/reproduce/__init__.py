"""The paper's tables and figures as data, and the one runner that executes them."""
