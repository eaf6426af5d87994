"""Chains: the persistent dynamic program over memory slots, its baselines, and what graphs are chains in disguise."""
