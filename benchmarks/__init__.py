"""Scripts that print ratios: run them as ``.venv/bin/python -m benchmarks.NAME``."""
