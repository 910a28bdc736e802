"""The soak: mixed load for as long as asked, and whether anything is left over from it.

    scripts/soak --requests 100000

Three processes, as in the bench: a simulated engine that also fails in every way (`engine.py`), the gateway,
and the clients, of whom three in ten leave (`mix.py` decides what each does, `clients.py` does it). The load
comes in rounds; between them everybody is gone, and `target.py` looks at what the gateway holds on to.
`verdict.py` compares the rounds, the gateway's records with what was sent and seen, and the engine's peak.
"""
