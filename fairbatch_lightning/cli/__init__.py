"""The command line: `fairbatch demo`, `fit`, `validate`, `test`, `report` and `tradeoff`.

In: arguments. Out: trained models, pages and tables. Open `main.py` first; the other files are one command each, but
for `extras.py`, which says what to install.
"""
