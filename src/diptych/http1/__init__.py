"""HTTP/1.1 as a client reads it, without sockets: what the load generator and the front end have in common.

Both bring a transport of their own: bench reads sockets itself, because it needs the kernel's times of arrival; the
front gets its bytes from asyncio, and calls back instead of waiting.
"""
