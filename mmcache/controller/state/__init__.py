"""What a controller must not forget: one contract, kept on SQLite, and in memory for simulation."""
