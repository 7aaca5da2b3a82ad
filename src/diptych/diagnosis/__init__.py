"""What limits a server now: from its telemetry to causes in seconds, and from there to advice."""
