"""The solver: gaps and times over instances and budgets, how long programs take to write, chain programs."""
