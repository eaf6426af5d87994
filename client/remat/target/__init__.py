"""A device that is not here: what it has, which kernels it would run, what they would cost, and what would fit."""
