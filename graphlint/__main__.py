"""`python -m graphlint` is `graphlint`."""

from graphlint.cli import main

main()
