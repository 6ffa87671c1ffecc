"""Adapters to serving engines; each imports its engine only where it is used."""
