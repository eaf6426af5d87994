"""Decomposition at narrow places: a training graph as a chain of blocks, of which equal ones are solved once."""
