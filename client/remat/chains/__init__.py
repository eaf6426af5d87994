"""Stages that run as they are, one after the other or in branches that meet: measured, planned, executed."""
