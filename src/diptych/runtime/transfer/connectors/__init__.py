"""The ways in which KV goes from worker to worker, one file each."""
