"""Registered memory: extents, pools and the tensors that live in them."""
