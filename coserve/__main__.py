"""`python -m coserve`."""

from coserve.cli.main import main

main()
