"""Reports: from histories and audits to logs, tables, pictures and a page.

In: numbers of `rules` and `fairness`. Out: what people look at. Open `page.py` first; `log_format.py` knows the names
of logged values, for writing and for reading; `curves.py` is what `figures.py` draws over time.
"""
