"""What steps cost on this machine, measured for the simulator."""
