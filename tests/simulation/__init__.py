"""The whole protocol in one deterministic world: the real core and sessions; a simulated network, clocks, disk, store.

A schedule is what one seed makes of it. `checker` says what must hold in every one of them; `world` plays it.
"""
