"""The client: reading, publishing, and computing once."""
