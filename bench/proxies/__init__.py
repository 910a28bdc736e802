"""Two proxies as one would write them with FastAPI and httpx: what the gateway is compared with."""
