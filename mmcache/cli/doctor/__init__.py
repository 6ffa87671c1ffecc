"""`mmcache doctor`: what keeps this machine, or its cluster, from serving, and what to do about it."""
