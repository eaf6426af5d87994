"""A model planned in parts: one budget for units that run one after the other, an exact choice of plans."""
