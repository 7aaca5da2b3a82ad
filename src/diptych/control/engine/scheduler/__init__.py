"""What runs in the next step of one worker."""
