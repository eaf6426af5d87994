"""Open reports of torch's about its own recomputation, each as a program: what torch does, what a tagged plan gives.

`python -m benchmarks.upstream` runs all; a program is named by its report's number. Each exits with 0 where the report
is still true of the installed torch and the tagged plan is right, and says what has changed else.
"""
