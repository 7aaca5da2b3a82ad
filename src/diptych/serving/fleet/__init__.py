"""The front end's side of its workers."""
