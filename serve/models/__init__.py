"""Model architectures: layers, weights and the table that maps an architecture's name to its builder."""
