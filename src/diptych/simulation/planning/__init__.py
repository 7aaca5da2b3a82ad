"""Which fleet to run for a load: layouts, the search among them, and what it found."""
