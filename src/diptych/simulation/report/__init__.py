"""How a simulation is shown: tables, a page, a timeline."""
