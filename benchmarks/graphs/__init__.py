"""Training graphs to plan: generated families, and the networks of the papers layer by layer."""
