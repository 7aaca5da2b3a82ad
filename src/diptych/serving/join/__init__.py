"""Workers on other hosts: the connection to their front end, and the agent that runs one beside it."""
