"""Messages between the front end and its workers: what both processes know."""
