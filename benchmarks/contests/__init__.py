"""The contests of `bench.py`, one module each: `run(settings)` returns what was measured."""
