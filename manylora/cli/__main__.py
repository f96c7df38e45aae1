"""`python -m manylora.cli`."""

from manylora.cli import main

main()
