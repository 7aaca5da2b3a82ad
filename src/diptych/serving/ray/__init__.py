"""Ray starts and stops workers, and reports their ends. Nothing of a request goes through it."""
