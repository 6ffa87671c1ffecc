"""`mmcache put`, `get` and `lookup`: single entries by hand."""
