"""Open reports of torch's about its own recomputation, each as a program: what torch does, what a tagged plan gives.

`python -m benchmarks.upstream` runs all, or those whose numbers it is given, and exits with 0 where each report is
still true of the installed torch and the tagged plan is right; else it says what has changed.
"""
