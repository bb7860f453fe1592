"""`python -m innerloop`."""

from innerloop.cli import main

main()
