"""The command line: ``diptych serve | generate | simulate | bench | calibrate | replay | guide``."""
