"""One module for each command of the static half; `cli.py` fetches them by name."""
