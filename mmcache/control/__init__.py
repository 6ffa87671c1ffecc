"""What clients and controller share: messages, and the client's session."""
