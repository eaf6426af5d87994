"""Load on a running service: hits, identical and distinct problems, kills and restarts, clusters."""
