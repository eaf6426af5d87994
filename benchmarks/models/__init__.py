"""Models to train: real architectures from configurations with random weights, and lists of stages."""
