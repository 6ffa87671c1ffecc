"""The agent: a process beside an engine that does the cache's work for it, so that no fault of it is the engine's.

The engine's process and the agent share a file of memory (`staging`) and a socket (`link` on the engine's side,
`process` on the agent's). The engine never waits for its agent, and outlives it.
"""
