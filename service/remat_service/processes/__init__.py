"""Solver processes: each job runs in a child that can be killed, forked from a process with the solver loaded."""
