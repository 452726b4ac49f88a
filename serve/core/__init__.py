"""The engine core: scheduler, KV-cache manager and the loop that drives the worker. Plain Python, no torch."""
