"""Benchmarks: `python -m fodit.bench kernels`, operations (`... ops`), steps of whole models (`... step`)."""
