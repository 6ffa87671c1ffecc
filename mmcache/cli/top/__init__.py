"""`mmcache top`: what the cache holds and saves, live."""
