"""Rules: from the losses of the cells to their new shares, and to weights of samples within them.

In: losses, counts, and what the rule remembers. Out: new shares. Open `base.py` first: what a rule is. `criteria.py`
says what is to be equal, `signed_steps.py` is the paper's rule, `importance.py` the paper's weights within cells.
"""
