"""The client side of the engine: what runs in the API server between HTTP and the wire."""
