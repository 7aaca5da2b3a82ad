"""A fleet of workers under virtual time."""
