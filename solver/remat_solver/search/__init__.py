"""The local search: plans without proof, by annealing over sets of recomputations."""
