"""`mmcache export`, `import` and `warm`: entries in files, for a cluster that starts with nothing."""
