"""Names that the server and the application agree on."""

STREAM_KEY = "gateway.stream"
"""Key in the ASGI scope's ``state``: the request's stream, which has ``abort()``."""
