"""How many entries are NaN or infinite."""
