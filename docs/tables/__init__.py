"""The tables and numbers of the pages, a module for each page: what `docs/render.py` writes."""
