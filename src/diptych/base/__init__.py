"""What every part may use of its process, its machine and its terminal: none of it serves a request."""
