"""The demo: photographs are encoded in some processes and read in others, and every bit is checked."""
