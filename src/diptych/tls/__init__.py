"""Encrypted connections between the processes of one server, which know each other by one shared key."""
