"""Benchmarks: operations (`python -m fodit.bench ops`) and steps of whole models (`... step`)."""
