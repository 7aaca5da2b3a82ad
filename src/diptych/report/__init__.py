"""How figures are shown: tables, charts, pages. Used by simulations and by measurements."""
