"""`python -m remat` is the command `remat`."""

from .cli import main

main()
