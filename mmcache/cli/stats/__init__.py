"""`mmcache stats`: figures of the controller and the store, and whether a client here could serve."""
