"""Instances to measure with, and the commands that measure."""
