"""Trainers as people write them, each trained by `aot_eager` and by plans from one seed: `make recipes`."""
