"""The command line: one file for each command of ``diptych``, and what they share."""
