"""Work that waits on disk: files of requests, the batches made of them, and the lines that run when there is slack."""
