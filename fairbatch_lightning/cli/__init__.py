"""The command line: `fairbatch demo`, `fit`, `validate`, `test`, `report` and `tradeoff`.

In: arguments. Out: trained models, pages and tables. Open `main.py` first; every other file is one command.
"""
