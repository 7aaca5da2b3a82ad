"""How simulations and plans are shown: the record of a run, tables, pages."""
