"""The solver: gaps and times over instances and budgets, certificates, time limits, chain programs."""
