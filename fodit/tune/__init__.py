"""Measure a machine once, predict operations, search plans, remember them."""
