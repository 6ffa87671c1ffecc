"""Where the bytes are: one contract, Mooncake Store behind it, and a store in memory for simulation."""
