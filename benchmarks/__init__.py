"""Instances to measure with, and the commands that measure; a bound that a plan refutes ends any of them."""

from remat_solver.contradiction import LOG, RaiseContradictions

if not any(isinstance(handler, RaiseContradictions) for handler in LOG.handlers):
    LOG.addHandler(RaiseContradictions())
