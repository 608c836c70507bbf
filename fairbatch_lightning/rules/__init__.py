"""Rules: from the errors or losses of the cells to their new shares, and to weights of samples within them.

In: what was measured, and what the rule remembers. Out: new shares. Open `base.py` first: what a rule is. `criteria.py`
says what is to be equal, `adaptive.py` is the default rule, `signed_steps.py` the paper's, `importance.py` the paper's
weights within cells.
"""
