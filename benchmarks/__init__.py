"""One question per command; results carry command, commit and hardware.

Each module that `main.py` lists asks one question. The others are what these share.
"""
