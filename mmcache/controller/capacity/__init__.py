"""What stays and what goes. Plain classes, without I/O; the directory tells them what is there."""
