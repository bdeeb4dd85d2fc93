"""`python -m pointsman` is `pointsman`."""

from pointsman.cli import main

main()
