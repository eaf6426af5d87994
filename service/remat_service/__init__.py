"""Answers over HTTP: each problem solved once, verified, stored and shared."""
