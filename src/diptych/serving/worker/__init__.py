"""The worker process: the only part of serving that may import torch."""
